"""The position of a group in a partition: committed offset, log and lag. Pure: the brokers' answers are arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.offsets import decode, owner_of
from penstock.places import place_text, printable

#: Topic and partition.
Part = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a group, by the group's coordinator."""

    client_id: str
    host: str
    #: `group.instance.id`, or None.
    instance: str | None
    partitions: frozenset[Part]

    def __str__(self) -> str:
        """Return its name for a sentence."""
        named = f"{self.client_id} ({self.instance})" if self.instance else self.client_id
        return printable(f"{named} on {self.host.lstrip('/')}")


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a group in one partition. Counts of offsets include markers and compacted records."""

    topic: str
    partition: int
    #: The committed offset, the next one to handle; None without a commit.
    committed: int | None
    #: The first and the end offset of the log.
    log: range
    #: The offsets done above the committed one: disjoint, ascending ranges.
    done: tuple[range, ...] = ()
    #: Whether the commit has metadata that is no offset map of this group, partition and offset.
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
        """Whether the committed offset lies past the end of the log, for example of a recreated topic."""
        return self.committed is not None and self.committed > self.log.stop

    @property
    def is_before_the_start(self) -> bool:
        """Whether the committed offset lies before the start of the log: messages were deleted."""
        return self.committed is not None and self.committed < self.log.start

    @property
    def lag(self) -> int | None:
        """The number of offsets from the committed one to the end of the log; None if it is unknown."""
        if self.committed is None or self.is_past_the_end:
            return None
        return self.log.stop - max(self.committed, self.log.start)

    @property
    def done_above(self) -> int:
        """The number of offsets done above the committed one."""
        return total(clipped(self.done, self.log.start, self.log.stop))

    @property
    def left(self) -> int | None:
        """The number of offsets that are not done; None if the lag is unknown."""
        return None if self.lag is None else self.lag - self.done_above

    def is_done(self, offset: int) -> bool:
        """Return whether an offset is done."""
        return self.committed is not None and (offset < self.committed or any(offset in run for run in self.done))


def position(group: str, part: Part, committed: tuple[int, str | None] | None, log: range) -> Position:
    """Return a group's position; `committed` is its commit, offset and metadata, or None."""
    if committed is None:
        return Position(*part, None, log)
    offset, metadata = committed
    found = decode(offset, metadata, owner_of(group, *part))
    return Position(*part, offset, log, found.done if found else (), is_foreign=bool(metadata) and found is None)


def clipped(runs: Iterable[range], start: int, stop: int) -> tuple[range, ...]:
    """Return the parts of ranges from `start` to before `stop`."""
    inside = (range(max(run.start, start), min(run.stop, stop)) for run in runs)
    return tuple(run for run in inside if run)


def total(runs: Iterable[range]) -> int:
    """Return the number of offsets in ranges."""
    return sum(map(len, runs))
