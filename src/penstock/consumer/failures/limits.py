"""Limits on what is given up: a consumer that loses everything should stop, not empty its topics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from penstock import options as check
from penstock.errors import ConfigurationError

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

    def refusal(self, place: str) -> str | None:
        """Count a message that is about to be given up; return why it may not be, where it would be one too many."""
        limit = self._limit
        if limit is None:
            return None
        with self._lock:
            handled = self._handled()
            self._in_a_row = in_a_row = self._in_a_row + 1 if handled == self._handled_then else 1
            self._handled_then = handled
            self._count += 1
            count = self._count
        done = count + handled
        if limit.consecutive is not None and in_a_row > limit.consecutive:
            why = f"{limit.consecutive} messages were given up in a row with none handled in between"
        elif limit.ratio is not None and done >= limit.at_least and count > limit.ratio * done:
            why = f"{count - 1} of {done - 1} messages were given up, and the limit is {limit.ratio:g} of all"
        else:
            return None
        return f"{why}: {place} is not given up and {self.ends}; find what fails every message, then start again"
