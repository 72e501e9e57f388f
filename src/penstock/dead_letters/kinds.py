"""Dead letters counted by where they come from and why they died."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.dead_letters.reader import DeadLetter, DeadLetterLog

_UNKNOWN = "?"
#: Kinds counted apart; forged headers must not fill the memory.
_MAX_KINDS = 10_000


@dataclass(slots=True)
class Kind:
    """Dead letters of one origin and one exception, counted."""

    #: Original topic and partition; "?" where they are not known.
    origin: str
    #: Class of the error as the header has it, which anybody may have written; "?" where there is none.
    exception: str
    count: int = 0
    #: How many of them a replay sent; None where this user may not know.
    replayed: int | None = 0
    #: Time of the earliest, milliseconds since the epoch; -1 where none has a time.
    first_ms: int = -1
    last_ms: int = -1

    def add(self, timestamp_ms: int, *, was_replayed: bool | None) -> None:
        """Count one more."""
        self.count += 1
        if was_replayed is None or self.replayed is None:
            self.replayed = None
        else:
            self.replayed += was_replayed
        if timestamp_ms >= 0:
            self.first_ms = timestamp_ms if self.first_ms < 0 else min(self.first_ms, timestamp_ms)
            self.last_ms = max(self.last_ms, timestamp_ms)


def count(log: DeadLetterLog, topic: str, partitions: int, *, knows_replays: bool = True) -> list[Kind]:
    """Read a topic to its end and count. Raises what `DeadLetterLog.read` raises.

    `knows_replays`: whether this user may read the offsets of the group `REPLAY_GROUP`.
    """
    kinds: dict[tuple[str, str], Kind] = {}
    for number in range(partitions):
        low, high = log.bounds(topic, number)
        base, done = log.replayed(topic, number) if knows_replays else (None, None)
        for batch in log.read(topic, number, low, high):
            for letter in batch:
                kind = _kind_of(letter)
                if kind not in kinds and len(kinds) >= _MAX_KINDS:
                    kind = ("(others)", "(others)")
                sent = None if base is None else letter.offset < base or (done is not None and letter.offset in done)
                kinds.setdefault(kind, Kind(*kind)).add(letter.timestamp_ms, was_replayed=sent)
    return list(kinds.values())


def _kind_of(letter: DeadLetter) -> tuple[str, str]:
    origin = letter.origin
    if origin is None:
        return _UNKNOWN, _UNKNOWN
    partition = "" if origin.partition is None else f" {origin.partition}"
    return f"{origin.topic or _UNKNOWN}{partition}", origin.exception or _UNKNOWN
