"""Dead letters counted by where they come from and why they died."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.dead_letters.reader import DeadLetter, DeadLetterLog
from penstock.places import place_text

_UNKNOWN = "?"
#: Kinds counted separately; forged headers must not fill the memory.
_MAX_KINDS = 10_000


@dataclass(slots=True)
class Kind:
    """Dead letters of one origin and one exception, counted."""

    #: Original topic and partition; "?" where they are not known.
    origin: str
    #: Class of the error as the header has it, which anybody may have written; "?" where there is none.
    exception: str
    count: int = 0
    #: How many of them wait, and how many a replay sent; None where this user may not know.
    pending: int | None = 0
    replayed: int | None = 0
    #: Time of the earliest and the latest, milliseconds since the epoch; -1 where none has a time.
    first_ms: int = -1
    last_ms: int = -1

    def add(self, timestamp_ms: int, *, was_replayed: bool | None) -> None:
        """Count one more."""
        self.count += 1
        if was_replayed is None or self.replayed is None:
            self.replayed = self.pending = None
        else:
            self.replayed += was_replayed
            self.pending = self.count - self.replayed
        if timestamp_ms >= 0:
            self.first_ms = timestamp_ms if self.first_ms < 0 else min(self.first_ms, timestamp_ms)
            self.last_ms = max(self.last_ms, timestamp_ms)


def count(log: DeadLetterLog, topic: str) -> list[Kind]:
    """Read a topic to its end and count. Raises as `DeadLetterLog` does."""
    kinds: dict[tuple[str, str], Kind] = {}
    for number in range(log.partitions(topic)):
        low, high = log.bounds(topic, number)
        for batch in log.read(topic, number, low, high):
            for letter in batch:
                kind = _kind_of(letter)
                if kind not in kinds and len(kinds) >= _MAX_KINDS:
                    kind = ("(others)", "(others)")
                kinds.setdefault(kind, Kind(*kind)).add(letter.timestamp_ms, was_replayed=log.was_replayed(letter))
    return list(kinds.values())


def _kind_of(letter: DeadLetter) -> tuple[str, str]:
    origin = letter.origin
    if origin is None or origin.topic is None:
        return _UNKNOWN, _UNKNOWN if origin is None else origin.exception or _UNKNOWN
    place = origin.topic if origin.partition is None else place_text(origin.topic, origin.partition)
    return place, origin.exception or _UNKNOWN
