"""How often a process was asked to stop: a signal that comes twice at once is one request.

`timeout`, systemd and launchers signal a whole group, and whoever started the process may pass the same signal on.
"""

from __future__ import annotations

import os

from penstock.options import PROCESS_VARIABLE

#: Seconds within which the same signal counts once: nobody presses a key again so soon, and no script means to.
_SAME_SIGNAL_S = 0.05
#: The same in a member of `penstock run --processes`: the supervisor gets it beside it, and may be slow to pass it on.
_SAME_SIGNAL_OF_MEMBER_S = 0.25


class StopRequests:
    """Counts requests to stop. For signal handlers: all calls come from the main thread."""

    __slots__ = ("_former", "_same_signal_s", "count")

    def __init__(self) -> None:
        #: Requests so far.
        self.count = 0
        self._former = (0, 0.0)
        self._same_signal_s = _SAME_SIGNAL_OF_MEMBER_S if PROCESS_VARIABLE in os.environ else _SAME_SIGNAL_S

    def add(self, number: int, now: float) -> bool:
        """Take a signal that came at this time, in seconds; return whether it is a request of its own."""
        former, then = self._former
        if number == former and now - then < self._same_signal_s:
            return False
        self._former = (number, now)
        self.count += 1
        return True
