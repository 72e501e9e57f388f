"""A process that ends with the one that started it, SIGKILL included: both ends of a pipe.

The parent alone holds the writing end. When it is gone, the child reads the end of the pipe and ends in order, as at
SIGTERM. PR_SET_PDEATHSIG knows Linux only, and no order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

#: Tells the child the descriptor of its end of the pipe.
LIFELINE_VARIABLE = "PENSTOCK_LIFELINE_FD"
#: Seconds a child has to end in order before it is killed.
_END_BUDGET_S = 60.0


class Lifeline:
    """The parent's end. Children take `reading_end` by `pass_fds` and `environment`."""

    def __init__(self) -> None:
        self.reading_end, self._writing_end = os.pipe()

    @property
    def environment(self) -> dict[str, str]:
        """What the child's environment must hold."""
        return {LIFELINE_VARIABLE: str(self.reading_end)}

    def close(self) -> None:
        """Close both ends: children that still run end."""
        os.close(self.reading_end)
        os.close(self._writing_end)


def end_with_parent() -> None:
    """End this process when its parent does, where the parent holds a lifeline; else do nothing."""
    given = os.environ.pop(LIFELINE_VARIABLE, "")  # not for the processes that this one starts
    with contextlib.suppress(ValueError, OSError):
        descriptor = int(given)
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - it takes no keyword
        threading.Thread(target=_watch, args=(descriptor,), name="penstock-lifeline", daemon=True).start()


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_BUDGET_S)
    os.kill(os.getpid(), signal.SIGKILL)
