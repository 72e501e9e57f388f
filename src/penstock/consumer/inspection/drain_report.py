"""The log of a drain: that it begins and how much is in flight, why it is not over, and what it left undone."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from penstock.consumer.assignments import Assignment

_log = logging.getLogger(__name__)

#: Seconds between two log lines about why a drain is not over.
_LOG_AGAIN_S = 5.0


class DrainLog:
    """Logs one drain. On the poll thread only, save `unfinished`."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._log_at = 0.0
        #: Messages in flight when the drain was cut short, by its time or a request to leave; 0 where it was not.
        self.unfinished = 0

    def begin(self, assignments: Iterable[Assignment], now: float, seconds: float) -> None:
        """Log that it begins."""
        self._log_at = now + _LOG_AGAIN_S
        count = _in_flight(assignments)
        _log.info("%s stops: %d messages are in flight, and have %.1f s to be done", self._group, count, seconds)

    def go_on(self, assignments: Iterable[Assignment], now: float, seconds: float, waits: Iterable[str]) -> None:
        """Log why it is not over, every few seconds."""
        if now < self._log_at:
            return
        self._log_at = now + _LOG_AGAIN_S
        _log.info(
            "%s is not done: %d messages are in flight (%s), and have %.1f s",
            self._group,
            _in_flight(assignments),
            ", ".join(waits) or "to be committed",
            max(0.0, seconds),
        )

    def cut_short(self, assignments: Iterable[Assignment], waits: Iterable[str]) -> None:
        """Log what is left undone by a drain that had not finished."""
        self.unfinished = _in_flight(assignments)
        if self.unfinished:
            _log.warning(
                "%s stops with %d messages not done (%s); they are handled again by the next owner",
                self._group,
                self.unfinished,
                ", ".join(waits),
            )


def _in_flight(assignments: Iterable[Assignment]) -> int:
    return sum(assignment.tracker.in_flight for assignment in assignments)
