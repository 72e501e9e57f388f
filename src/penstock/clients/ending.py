"""Where a client is destroyed: never on a thread of its own, for the client library ends the process then.

A client that hangs in a circle of objects is found by Python's search for garbage, which may begin anywhere, also on
the client's own thread while that hands over an answer or asks for a token. So what is found there is destroyed on
another one.
"""

from __future__ import annotations

import _thread
import gc
import sys
import threading
import time
from typing import Any

#: Seconds for which whoever found the client may still refer to it, and between two looks.
_FOUND_S = 1.0
_LOOK_S = 0.01


class DestroyedElsewhere:
    """A client of the library that may be dropped on any thread."""

    def __del__(self) -> None:
        if isinstance(threading.current_thread(), threading._DummyThread):  # noqa: SLF001 - a thread that Python did not make
            destroy_elsewhere([self])


def destroy_elsewhere(client: list[Any]) -> None:
    """Destroy the client in the list on another thread: its destructor may wait for brokers."""
    # It lives on in the list. Nothing waits here: a thread of `threading` would be waited for until it runs.
    _thread.start_new_thread(_destroy, (client,))


def _destroy(client: list[Any]) -> None:
    deadline = time.monotonic() + _FOUND_S
    # The list and the call of getrefcount refer to it.
    while sys.getrefcount(client[0]) > 2 and time.monotonic() < deadline:  # noqa: PLR2004 - see above
        time.sleep(_LOOK_S)
    client.clear()
    # What lies in the circle with it was found and kept, and would be found anywhere again, without a second `__del__`.
    gc.collect()
