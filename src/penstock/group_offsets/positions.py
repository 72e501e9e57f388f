"""Where a group stands in each partition, and which offsets lie before it: what all commands for offsets start from.

Pure: what the brokers said comes in as values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.offsets import decode, owner_of
from penstock.places import place_text

#: Topic and partition.
Part = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a group, as its coordinator tells."""

    client_id: str
    host: str
    #: `group.instance.id`, where it has one.
    instance: str | None
    partitions: frozenset[Part]

    def __str__(self) -> str:
        """Return it as it stands in a sentence; without what a terminal might obey, for these names are free."""
        named = f"{self.client_id} ({self.instance})" if self.instance else self.client_id
        text = f"{named} on {self.host.lstrip('/')}"
        return "".join(char if char.isprintable() else "?" for char in text)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a group stands in one partition. Numbers of offsets count markers and compacted records along."""

    topic: str
    partition: int
    #: The next offset to handle, as committed; None where nothing is committed.
    committed: int | None
    #: The first offset of the log and the one after its last.
    log: range
    #: What is done above the committed offset: ranges that rise and lie apart.
    done: tuple[range, ...] = ()
    #: Whether there is metadata that is no offset map of this group and partition for this offset.
    is_foreign: bool = False

    @property
    def part(self) -> Part:
        """Topic and partition."""
        return self.topic, self.partition

    @property
    def place(self) -> str:
        """Topic and partition, for messages."""
        return place_text(self.topic, self.partition)

    @property
    def is_past_the_end(self) -> bool:
        """Whether the committed offset lies past the end of the log, as where the topic was made again."""
        return self.committed is not None and self.committed > self.log.stop

    @property
    def is_before_the_start(self) -> bool:
        """Whether messages from the committed offset on are no longer in the log."""
        return self.committed is not None and self.committed < self.log.start

    @property
    def lag(self) -> int | None:
        """Offsets of the log from the committed one on; None where that is not known."""
        if self.committed is None or self.is_past_the_end:
            return None
        return self.log.stop - max(self.committed, self.log.start)

    @property
    def done_above(self) -> int:
        """How many offsets of the log are done above the committed one."""
        return total(clipped(self.done, self.log.start, self.log.stop))

    @property
    def left(self) -> int | None:
        """Offsets that are not done; None where the lag is not known."""
        return None if self.lag is None else self.lag - self.done_above

    def is_done(self, offset: int) -> bool:
        """Tell whether an offset counts as done."""
        return self.committed is not None and (offset < self.committed or any(offset in run for run in self.done))


def position(group: str, part: Part, committed: tuple[int, str | None] | None, log: range) -> Position:
    """Return a group's position by its commit: offset and metadata, or None without one."""
    if committed is None:
        return Position(*part, None, log)
    offset, metadata = committed
    found = decode(offset, metadata, owner_of(group, *part))
    return Position(*part, offset, log, found.done if found else (), is_foreign=bool(metadata) and found is None)


def clipped(runs: Iterable[range], start: int, stop: int) -> tuple[range, ...]:
    """Return what of these ranges lies from `start` to before `stop`."""
    inside = (range(max(run.start, start), min(run.stop, stop)) for run in runs)
    return tuple(run for run in inside if run)


def total(runs: Iterable[range]) -> int:
    """Return how many offsets the ranges hold."""
    return sum(map(len, runs))
