"""The arithmetic of planning: limits batches and cuts them into tasks. Without Kafka or Spark.

A query's offsets are JSON in the format of Spark's own Kafka source, `{"topic": {"partition": offset}}`. An offset is
the next one to read.
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

#: Ranges with fewer offsets share a task. A task costs about 20 ms, ten times the reading of a thousand rows. The limit
#: is low, so that the rest of a query has enough tasks when there is work.
SMALL_TASK = 1_000

#: The codes for "earliest" and "latest" in Spark's JSON.
EARLIEST, LATEST = -2, -1


@dataclass(frozen=True, slots=True)
class Log:
    """Begin and end of a partition's log.

    Attributes:
        first: the first offset that it still has.
        end: the offset after the last readable one: under read_committed the first of an open transaction, or the end.
        written: the offset after the last record, readable or not.
    """

    first: int
    end: int
    written: int


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """The offsets of one task: from `start` to before `end`."""

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
        """Number of offsets. It is at least the number of rows: markers and aborted records count, too."""
        return self.end - self.start


def place(part: TopicPartition) -> str:
    """Return a partition as text."""
    return f"{part[0]}:{part[1]}"


def to_json(offsets: Mapping[TopicPartition, T]) -> dict[str, dict[str, T]]:
    """Return offsets, or other values by partition, in Spark's format.

    Sorted, because Spark compares the text to recognise "nothing new".
    """
    shaped: dict[str, dict[str, T]] = {}
    for topic, partition in sorted(offsets):
        shaped.setdefault(topic, {})[str(partition)] = offsets[topic, partition]
    return shaped


def from_json(shaped: Any) -> Offsets:
    """Return the offsets of a value in Spark's format; `MessageFormatError` names a wrong part."""
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
    """Return the offsets of a JSON text in Spark's format, or raise `MessageFormatError`."""
    try:
        return from_json(json.loads(text))
    except json.JSONDecodeError as error:
        raise MessageFormatError(
            f'offsets are not JSON ({error.msg} at character {error.pos}); write {{"topic": {{"0": 42}}}}'
        ) from error


def reported_offsets(given: Any) -> Offsets:
    """Return the offsets that Spark reports for a source, as text or value; empty for sources with other offsets."""
    try:
        offsets = from_json((json.loads(given) if isinstance(given, str) else given) or {})
    except (MessageFormatError, ValueError):
        return {}
    return {} if LATEST in offsets.values() else offsets  # it is a code, no position


def limited(start: Mapping[TopicPartition, int], latest: Offsets, limit: int) -> Offsets:
    """Return ends that take at most `limit` offsets in all, shared among partitions in proportion to their backlogs.

    Every partition with a backlog gets one offset before any gets a second, the largest backlog first, so that a small
    partition does not starve. A partition that is missing in `start` is new and begins at 0. The sum taken is
    `min(limit, whole backlog)`.
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
        # Differences of rounded-down partial sums add up to the whole sum.
        until = before + behind[part] - 1
        ends[part] += 1 + (rest * until // spread - rest * before // spread if rest else 0)
        before = until
    return ends


def cut(ranges: Iterable[OffsetRange], min_partitions: int | None = None) -> list[tuple[OffsetRange, ...]]:
    """Return the ranges of each task, given one range for each partition. Empty ranges are dropped.

    Small neighbours share a task of at most `SMALL_TASK` offsets. With `min_partitions` none do: each range is cut into
    even pieces in proportion to its size, so that there are at least that many tasks, but not more than offsets.
    """
    whole = [part for part in ranges if part.size > 0]
    if min_partitions is None:
        return _packed(whole)
    total = sum(part.size for part in whole)
    least = 0 if len(whole) >= min_partitions else min_partitions
    pieces: list[tuple[OffsetRange, ...]] = []
    for part in whole:
        # Rounded up: one task more does no harm, one less would break the promise.
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
