"""Limits on what is given up: a consumer that loses everything should stop, not empty its topics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from penstock import options as check
from penstock.errors import ConfigurationError, PenstockError

#: What comes of a message that stops a consumer, in words.
ENDS = "the consumer stops and keeps the offset"


@dataclass(frozen=True, slots=True)
class DeadLetterLimit:
    """When a consumer stops rather than give up one more message, be it written as a dead letter or dropped.

    Give `consecutive`, `ratio` or both.

    Attributes:
        consecutive: so many messages given up with none handled in between; None for no limit.
        ratio: so large a part of all messages that are done, from 0 to 1; None for no limit.
        at_least: messages that must be done before the ratio counts.
    """

    consecutive: int | None = None
    ratio: float | None = None
    at_least: int = 100

    def __post_init__(self) -> None:
        if self.consecutive is None and self.ratio is None:
            raise ConfigurationError(
                "DeadLetterLimit() sets no limit; give consecutive= or ratio=, or leave dead_letter_limit out"
            )
        if self.consecutive is not None:
            check.positive_int("consecutive", self.consecutive)
        if self.ratio is not None:
            check.positive("ratio", self.ratio)
            if self.ratio > 1:
                raise ConfigurationError(f"ratio must lie above 0 and at most at 1, but is {self.ratio!r}")
        check.positive_int("at_least", self.at_least)

    def exceeded(self, in_a_row: int, given_up: int, handled: int) -> str | None:
        """Return why one more message may not be given up, in words; None where it may. It is in the counts.

        Args:
            in_a_row: messages given up with none handled in between.
            given_up: messages given up in all.
            handled: messages handled in all.
        """
        done = given_up + handled
        if self.consecutive is not None and in_a_row > self.consecutive:
            return f"{self.consecutive} messages were given up in a row with none handled in between"
        if self.ratio is not None and done >= self.at_least and given_up > self.ratio * done:
            return f"{given_up - 1} of {done - 1} messages were given up, and the limit is {self.ratio:g} of all"
        return None


class DeadLetterLimits:
    """Counts what is given up against a limit. Thread-safe: the poll thread counts dead letters, lane holders drops."""

    def __init__(self, limit: DeadLetterLimit | None, handled: Callable[[], int], ends: str = ENDS) -> None:
        self._limit = limit
        self._handled = handled
        #: What comes of a failure that is one too many, in words.
        self.ends = ends
        # Guards the fields below.
        self._lock = threading.Lock()
        self._count = 0
        self._in_a_row = 0
        self._handled_then = 0

    def check(self, place: str, error: BaseException) -> None:
        """Count a message that is about to be given up.

        Raises `PenstockError` where it would be one too many: it is not given up, and its offset is kept.
        """
        limit = self._limit
        if limit is None:
            return
        with self._lock:
            handled = self._handled()
            self._in_a_row = in_a_row = self._in_a_row + 1 if handled == self._handled_then else 1
            self._handled_then = handled
            self._count += 1
            count = self._count
        why = limit.exceeded(in_a_row, count, handled)
        if why is not None:
            raise PenstockError(
                f"{why}: {place} is not given up and {self.ends}; find what fails every message, then start again"
            ) from error
