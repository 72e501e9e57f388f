"""Commands that run until a signal."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Stop(BaseException):
    """Raised in the main thread by a signal. Not an Exception: no `except Exception` on its way may eat it."""


@contextlib.contextmanager
def until_signal() -> Iterator[None]:
    """Leave the block at SIGINT or SIGTERM; context managers inside it close in order. Main thread only.

    A second signal interrupts that closing, so that a command that hangs can still be left.
    """

    def stop(_number: int, _frame: object) -> None:
        raise _Stop

    before = {number: signal.signal(number, stop) for number in _STOP_SIGNALS}
    try:
        yield
    except _Stop:
        return
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
