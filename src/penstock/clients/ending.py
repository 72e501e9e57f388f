"""Where a client is destroyed: on a thread that nobody waits for without a bound, or not at all.

The client library's destructor waits for the client's own threads, without a bound: one that hangs, in a callback say,
would hold up whoever drops the client. On one of those threads it would end the process; there a client that hangs in a
circle of objects may be found by Python's search for garbage. So every client that is dropped is handed to a thread of
its own. What is left at the end of the interpreter is closed then, within a bound, if no other thread may use it; else
it ends with the process.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import gc
import logging
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

from penstock.clients.client_log import client_log

_log = logging.getLogger("penstock.clients.ending")

#: Seconds for which whoever dropped or found the client may still refer to it, and between two looks.
_FOUND_S = 1.0
_LOOK_S = 0.01
#: Looks at the end of the interpreter for which other threads may still be ending, and seconds for the clients: one
#: whose broker is gone may never close (librdkafka 2.16 keeps waiting for a thread of its own; seen in every third run
#: of a program that stopped its broker on a busy machine), and nothing of it is lost with the process.
_LAST_LOOKS = 10
LAST_S = 1.0

#: Adds a reference that nobody takes back, so that the destructor is never called.
_keep_for_ever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))

#: The clients of this process. Added to by whoever makes one.
living: weakref.WeakSet[DestroyedElsewhere] = weakref.WeakSet()
# The threads of the parent's clients are not there in a child: nothing of them can be closed.
os.register_at_fork(after_in_child=living.clear)


class DestroyedElsewhere:
    """A client of the library that may be dropped on any thread: nobody waits for its destructor."""

    # What it calls are defaults: at the end of the interpreter a module has lost its names.
    def __del__(self, is_finalizing: Any = sys.is_finalizing, keep_for_ever: Any = _keep_for_ever) -> None:
        if is_finalizing():
            keep_for_ever(self)
        else:
            # It lives on in the list. Nothing waits here: a thread of `threading` would be waited for until it runs.
            _thread.start_new_thread(_destroy, ([self],))


def _destroy(client: list[Any]) -> None:
    deadline = time.monotonic() + _FOUND_S
    # The list and the call of getrefcount refer to it.
    while sys.getrefcount(client[0]) > 2 and time.monotonic() < deadline:  # noqa: PLR2004 - see above
        time.sleep(_LOOK_S)
    left = weakref.ref(client[0])
    client.clear()
    if left() is not None:
        # What lies in the circle with it was found and kept, and would be found anywhere again, without a second
        # `__del__`.
        gc.collect()


@atexit.register
def _close_what_is_left() -> None:
    """Close the clients that are left, where no other thread may be at work with one."""
    for _ in range(_LAST_LOOKS):
        if not _other_threads():
            break
        time.sleep(_LOOK_S)
    else:
        return
    # They say now that brokers which were stopped before them are gone, and nobody works with them any more.
    client_log.connections = logging.INFO
    clients = list(living)
    threads = [threading.Thread(target=_close, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LAST_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if left := sum(thread.is_alive() for thread in threads):
        _log.info("%d Kafka clients did not close within %g s and end with the process", left, LAST_S)


def _other_threads() -> list[threading.Thread]:
    """Return the threads that Python made, save this one. Those of the client library use no client."""
    here = threading.current_thread()
    return [
        thread
        for thread in threading.enumerate()
        if thread is not here and not isinstance(thread, threading._DummyThread)  # noqa: SLF001 - there is no public name
    ]


def _close(client: Any) -> None:
    with suppress(Exception):  # whatever it is, the process ends
        if hasattr(client, "purge"):
            client.purge()  # a producer's: what nobody waits for any more would be waited for
        client.__exit__(None, None, None)
