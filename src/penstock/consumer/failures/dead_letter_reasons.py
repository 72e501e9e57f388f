"""Dead letters by reason: how many were written since the start, from which topic, of which error, and the last."""

from __future__ import annotations

from dataclasses import dataclass

#: Reasons that are counted apart; those beyond count as one.
_MOST = 50
_OTHERS = "other errors"


@dataclass(frozen=True, slots=True)
class DeadLetterReason:
    """Dead letters of one topic and one class of error.

    Attributes:
        topic: topic that they came from, not a retry topic.
        dead_letter_topic: topic that has them.
        error: class of what the last try raised.
        count: how many.
        partition: of the last one, in its topic.
        offset: of the last one.
        at: when that was written, on the engine's clock.
    """

    topic: str
    dead_letter_topic: str
    error: str
    count: int
    partition: int
    offset: int
    at: float


class DeadLetterReasons:
    """Counts them. Written by the poll thread, read by any."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], DeadLetterReason] = {}

    def count(self, topic: str, dead_letter_topic: str, error: str, place: tuple[int, int], now: float) -> None:
        """Count one that was written; `place` is its partition and offset in its topic."""
        reason = (topic, dead_letter_topic, error)
        if reason not in self._found and len(self._found) >= _MOST:
            reason = ("", "", _OTHERS)
        former = self._found.get(reason)
        self._found[reason] = DeadLetterReason(*reason, 1 if former is None else former.count + 1, *place, now)

    def all(self) -> list[DeadLetterReason]:
        """Return them, the most frequent first. Any thread."""
        return sorted(self._found.values(), key=lambda reason: -reason.count)
