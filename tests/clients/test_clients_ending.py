"""Where clients are destroyed: not on their own threads, and on no thread that a caller waits for."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: An admin client in a circle, dropped before its question is answered. Its thread looks for garbage then.
PROGRAM = """
import gc, threading, weakref
from penstock import clients

class Owner:
    def hear(self, error):
        "Refer to the owner, as a callback does."

gc.disable()
owner = Owner()
client = clients.admin("127.0.0.1:1", {"log_level": 0, "error_cb": owner.hear if INSIDE else print})
owner.client, owner.circle = client, owner
gone, looked = threading.Event(), threading.Event()
weakref.finalize(client.words, gone.set)

def look(_answer):
    gc.collect()
    looked.set()

client.describe_cluster(request_timeout=0.2).add_done_callback(look)
del owner, client
assert looked.wait(60)
assert gone.wait(60)
print("goes on")
"""


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_client_that_its_own_thread_finds_as_garbage_is_destroyed_elsewhere(is_inside: bool) -> None:
    program = PROGRAM.replace("INSIDE", str(is_inside))

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)

    assert (ended.returncode, ended.stdout) == (0, "goes on\n"), ended.stderr


#: A child of a fork that ends in order, with a client of its parent.
FORKED = """
import os
from penstock import clients

client = clients.producer("127.0.0.1:1", {"log_level": 0})
client.produce("t", b"waits")
if os.fork() == 0:
    raise SystemExit(0)
os.wait()
print("goes on")
"""


def test_a_forked_child_waits_for_no_client_of_its_parent() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stdout) == (0, "goes on\n"), ended.stderr


#: An admin client whose own thread hangs in a callback for ever: the library's destructor would wait for it.
HANGING = """
import queue
from penstock import clients

client = clients.admin("127.0.0.1:1", {"log_level": 0})
reached = queue.SimpleQueue()
question = client.describe_cluster(request_timeout=0.2)
question.add_done_callback(reached.put)
question.add_done_callback(queue.SimpleQueue().get)
reached.get(timeout=60)
del question
"""


@pytest.mark.parametrize("how", ["del client", "pass"])
def test_no_caller_waits_for_a_client_that_hangs_while_it_is_destroyed(how: str) -> None:
    program = f"{HANGING}{how}\nprint('goes on')"

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stdout) == (0, "goes on\n"), ended.stderr
