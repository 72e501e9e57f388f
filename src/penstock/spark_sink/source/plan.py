"""Values of planning, and how offsets are shared out and cut into tasks: arithmetic, without Kafka or Spark.

The offsets of a query travel as JSON in the shape of Spark's own Kafka source, `{"topic": {"partition": offset}}`,
where an offset is the next one to read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from penstock.errors import MessageFormatError

T = TypeVar("T")

#: A partition of a topic.
TopicPartition = tuple[str, int]

#: For each partition, the next offset to read.
Offsets = dict[TopicPartition, int]

#: Offsets for which a task of their own is not worth what it costs: some 20 ms, for which a thousand rows are read ten
#: times. Not more, so that what a query does with rows has as many tasks where there is something to do.
SMALL_TASK = 1_000

#: How Spark's JSON says "from the beginning" and "from the end".
EARLIEST, LATEST = -2, -1


@dataclass(frozen=True, slots=True)
class Log:
    """Where the log of a partition begins and ends.

    Attributes:
        first: the first offset that it still holds.
        end: the offset after the last one that may be read: under read_committed an open transaction begins there, or
            nothing more is written.
        written: the offset after the last record, whether it may be read or not.
    """

    first: int
    end: int
    written: int


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """The offsets one task reads: from `start` up to, and without, `end`."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def part(self) -> TopicPartition:
        """The partition."""
        return self.topic, self.partition

    @property
    def size(self) -> int:
        """Number of offsets, which is at least the number of rows: markers and aborted records count."""
        return self.end - self.start


def place(part: TopicPartition) -> str:
    """Return a partition as texts show it."""
    return f"{part[0]}:{part[1]}"


def to_json(offsets: Mapping[TopicPartition, T]) -> dict[str, dict[str, T]]:
    """Return the offsets, or other values by partition, in Spark's shape.

    Sorted: Spark recognizes "nothing new" by comparing the text.
    """
    shaped: dict[str, dict[str, T]] = {}
    for topic, partition in sorted(offsets):
        shaped.setdefault(topic, {})[str(partition)] = offsets[topic, partition]
    return shaped


def from_json(shaped: Any) -> Offsets:
    """Return the offsets of a value in Spark's shape; for another a `MessageFormatError` says which part is wrong."""
    if not isinstance(shaped, Mapping):
        raise MessageFormatError(
            f'offsets must be a JSON object {{"topic": {{"0": 42}}}}, but are a {type(shaped).__name__}'
        )
    offsets: Offsets = {}
    for topic, partitions in shaped.items():
        if not isinstance(partitions, Mapping):
            raise MessageFormatError(f'offsets of topic {topic} must be an object such as {{"0": 42}}')
        for partition, offset in partitions.items():
            if not str(partition).isdecimal() or type(offset) is not int or offset < EARLIEST:
                raise MessageFormatError(
                    f"offsets of topic {topic}: partition {partition!r} must be a number in quotes and its "
                    "offset a whole number: 0 or more, -1 for latest, -2 for earliest"
                )
            offsets[str(topic), int(partition)] = offset
    return offsets


def parse_offsets(text: str) -> Offsets:
    """Return the offsets of a JSON text in Spark's shape, or raise `MessageFormatError`."""
    try:
        return from_json(json.loads(text))
    except json.JSONDecodeError as error:
        raise MessageFormatError(
            f'offsets are not JSON ({error.msg} at character {error.pos}); write {{"topic": {{"0": 42}}}}'
        ) from error


def reported_offsets(given: Any) -> Offsets:
    """Return offsets as Spark reports a source's, in its shape, as text or not; none where a source has others."""
    try:
        offsets = from_json((json.loads(given) if isinstance(given, str) else given) or {})
    except (MessageFormatError, ValueError):
        return {}
    return offsets if min(offsets.values(), default=0) >= 0 else {}  # below are words, no positions


def limited(start: Mapping[TopicPartition, int], latest: Offsets, limit: int) -> Offsets:
    """Return ends that take at most `limit` offsets in all, shared among partitions by what each has behind.

    Every partition with something to read gets one offset before any gets a second, those with most behind
    first, so that a small partition does not starve beside a large one. A partition missing in `start` is
    new and begins at 0. The sum taken is `min(limit, all there is)`.
    """
    behind = {part: end - start.get(part, 0) for part, end in latest.items() if end > start.get(part, 0)}
    total = sum(behind.values())
    if total <= limit:
        return dict(latest)
    by_size = sorted(behind, key=lambda part: (-behind[part], part))
    served = by_size[:limit]
    rest, spread = limit - len(served), total - len(behind)
    ends = latest | {part: start.get(part, 0) for part in behind}
    before = 0
    for part in served:
        # The differences of a sum that is rounded down add up to the whole sum.
        until = before + behind[part] - 1
        ends[part] += 1 + (rest * until // spread - rest * before // spread if rest else 0)
        before = until
    return ends


def cut(ranges: Iterable[OffsetRange], min_partitions: int | None = None) -> list[tuple[OffsetRange, ...]]:
    """Return the ranges of each task; empty ranges vanish. There is one range for each partition.

    Neighbours that are small share a task of `SMALL_TASK` offsets at most. With `min_partitions` none do, and each is
    cut into even pieces, in proportion to its size: into at least so many tasks in all, and never more than offsets.
    """
    whole = [part for part in ranges if part.size > 0]
    if min_partitions is None:
        return _packed(whole)
    total = sum(part.size for part in whole)
    least = 0 if len(whole) >= min_partitions else min_partitions
    pieces: list[tuple[OffsetRange, ...]] = []
    for part in whole:
        # Rounded up: fewer tasks than asked for would break the promise, one more does no harm.
        count = min(part.size, max(1, -(-least * part.size // total)))
        cuts = [part.start + part.size * piece // count for piece in range(count + 1)]
        pieces += [(OffsetRange(part.topic, part.partition, begin, end),) for begin, end in pairwise(cuts)]
    return pieces


def _packed(ranges: Iterable[OffsetRange]) -> list[tuple[OffsetRange, ...]]:
    tasks: list[list[OffsetRange]] = []
    room = 0
    for part in ranges:
        if part.size > room:
            tasks.append([])
            room = SMALL_TASK
        tasks[-1].append(part)
        room -= part.size
    return [tuple(task) for task in tasks]
