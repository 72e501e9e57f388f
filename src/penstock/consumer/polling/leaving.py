"""Leaving the group: how long a stop waits for a client whose coordinator does not answer."""

from __future__ import annotations

import logging

from penstock.clients.cluster import Clock
from penstock.consumer.polling.poll_loop import PollLoop

_log = logging.getLogger(__name__)

#: Seconds that leaving the group may take beyond the time that running handlers have.
_LEAVE_S = 5.0


class Leaving:
    """Tells when a poll thread that leaves the group should be left alone. For the thread that waits for it.

    Args:
        group: the consumer group.
        revoke_timeout: the budget of the revocation that leaving begins with, in seconds.
        clock: the engine's clock.
    """

    def __init__(self, group: str, revoke_timeout: float, clock: Clock) -> None:
        self._group = group
        self._revoke_timeout = revoke_timeout
        self._now = clock.monotonic
        # When leaving was seen to have begun, and whether it was said that nobody waits for its end.
        self._since: float | None = None
        self._said = False

    def takes_too_long(self, loop: PollLoop) -> bool:
        """Tell whether leaving takes so long that nobody should wait for it. Said once."""
        if not loop.leaving.is_set():
            return False
        now = self._now()
        if self._since is None:
            self._since = now
        begun = self._since
        if now < min(begun + self._revoke_timeout, max(begun, loop.end_by)) + _LEAVE_S:
            return False
        if not self._said:
            self._said = True
            _log.warning(
                "%s cannot leave its group: the coordinator does not answer; the client goes on trying while the "
                "process lives, and what was not committed is handled again",
                self._group,
            )
        return True


__all__ = ["Leaving"]
