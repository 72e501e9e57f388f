"""A client that is found as garbage on a thread of its own, which the client library must not see destroyed there."""

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
