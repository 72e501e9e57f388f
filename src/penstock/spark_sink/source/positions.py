"""Where a query begins and ends: a word, an offset for each partition, or a time.

Of the three ways Spark's options know, a time for all partitions counts before times for each, and those before
offsets. What a position means on the logs as they are is settled by `resolve`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from penstock.errors import ConfigurationError, MessageFormatError, SourceError
from penstock.spark_sink.source.plan import EARLIEST, LATEST, Offsets, TopicPartition, parse_offsets, place

#: What the client answers for a time after the last message.
_NO_OFFSET = -1
#: The latest time there is in Kafka's protocol.
_LAST_MS = 2**63 - 1

#: Returns the first offset at or after a time (ms) of each partition, -1 where there is none.
AtTimes = Callable[[Mapping[TopicPartition, int]], Offsets]


@dataclass(frozen=True, slots=True)
class Since:
    """In each partition the first message at or after a time.

    Attributes:
        option: the option that says so, for errors.
        times_ms: milliseconds since the epoch, one for all partitions or one for each.
        or_latest: whether a partition without such a message is taken at its end; else it is an error.
    """

    option: str
    times_ms: int | Offsets
    or_latest: bool


#: Where a read begins or ends: `earliest`, `latest`, an offset for each partition, or a time.
Position = str | Offsets | Since


def starting_position(given: Mapping[str, str]) -> Position | None:
    """Return where a query begins, or None where no option says so. Names of options are in lower case.

    A `ConfigurationError` names an option that is wrong.
    """
    strategy = given.get("startingoffsetsbytimestampstrategy", "error").strip().lower()
    if strategy not in ("error", "latest"):
        raise ConfigurationError(
            "the option startingOffsetsByTimestampStrategy must be error or latest; "
            "it says what is done where no message is as late as the time given"
        )
    since = _since("startingTimestamp", "startingOffsetsByTimestamp", given, or_latest=strategy == "latest")
    return since or _offsets("startingOffsets", given)


def ending_position(given: Mapping[str, str]) -> Position | None:
    """Return where a batch query ends, or None where no option says so; as `starting_position`."""
    since = _since("endingTimestamp", "endingOffsetsByTimestamp", given, or_latest=True)
    return since or _offsets("endingOffsets", given)


def resolve(option: str, position: Position, first: Offsets, last: Offsets, at_times: AtTimes) -> Offsets:
    """Turn a position into offsets of exactly the partitions that are read.

    Each log holds offsets from `first` up to `last`, or to an earlier one that the query must not pass. A position that
    lacks a partition, or names one that is not read, is a `ConfigurationError` about the option; a partition without a
    message as late as the time is a `SourceError`, unless the position takes its end then.
    """
    if isinstance(position, str):
        return dict(first if position == "earliest" else last)
    if isinstance(position, Since):
        return _resolve_times(position, last, at_times)
    _require_the_same(option, position, first, "an offset for every partition, -2 for earliest, -1 for latest")
    words = {EARLIEST: first, LATEST: last}
    return {part: words[offset][part] if offset in words else offset for part, offset in position.items()}


def restricted(position: Position, partitions: Collection[TopicPartition]) -> Position:
    """Return a position without what it says of other partitions than these."""

    def of_these(offsets: Offsets) -> Offsets:
        return {part: offset for part, offset in offsets.items() if part in partitions}

    if isinstance(position, Since):
        times = position.times_ms
        return position if isinstance(times, int) else replace(position, times_ms=of_these(times))
    return position if isinstance(position, str) else of_these(position)


def refuse_backwards(starting: Position, ending: Position, start: Offsets, end: Offsets) -> None:
    """Raise `ConfigurationError` where a read with both its ends given would begin past its end.

    Where only one of them is an offset, or a time, the log may as well have passed the other: nothing is to be read.
    """

    def is_offset(position: Position, part: TopicPartition) -> bool:
        return isinstance(position, dict) and position[part] not in (EARLIEST, LATEST)

    by_time = isinstance(starting, Since) and isinstance(ending, Since)
    for part, offset in sorted(start.items()):
        if offset > end[part] and (by_time or (is_offset(starting, part) and is_offset(ending, part))):
            raise ConfigurationError(
                f"{place(part)} would be read from offset {offset} to {end[part]}: its start lies past its end; "
                "give an earlier start or a later end"
            )


def _resolve_times(since: Since, last: Offsets, at_times: AtTimes) -> Offsets:
    if isinstance(since.times_ms, int):
        times = dict.fromkeys(last, since.times_ms)
    else:
        times = since.times_ms
        _require_the_same(since.option, times, last, "milliseconds since the epoch for every partition")
    found = at_times(times)
    none = sorted(part for part, offset in found.items() if offset == _NO_OFFSET)
    if none and not since.or_latest:
        raise SourceError(
            f"{place(none[0])} has no message at or after {times[none[0]]} ms, where the option {since.option} "
            f"begins ({len(none)} such partitions); give an earlier time, or set startingOffsetsByTimestampStrategy "
            "to latest to begin there at the end"
        )
    # A message that came after the end was looked up lies past it.
    return {part: last[part] if offset == _NO_OFFSET else min(offset, last[part]) for part, offset in found.items()}


def _require_the_same(option: str, named: Offsets, read: Offsets, what: str) -> None:
    if missing := sorted(read.keys() - named.keys()):
        raise ConfigurationError(f"the option {option} lacks {', '.join(map(place, missing))}; give {what}")
    if foreign := sorted(named.keys() - read.keys()):
        names = ", ".join(map(place, foreign))
        raise ConfigurationError(f"the option {option} names {names}, which the query does not read; leave it out")


def _since(for_all: str, for_each: str, given: Mapping[str, str], *, or_latest: bool) -> Since | None:
    if for_all.lower() in given:
        text = given[for_all.lower()].strip()
        if not (text.isascii() and text.isdecimal()) or len(text) > len(str(_LAST_MS)) or int(text) > _LAST_MS:
            raise ConfigurationError(
                f"the option {for_all} must be a number of milliseconds since the epoch, at most {_LAST_MS}, but is "
                f"{text!r}"
            )
        return Since(for_all, int(text), or_latest)
    times = _by_partition(for_each, given, 'JSON such as {"orders": {"0": 1700000000000}}')
    if times is None:
        return None
    if min(times.values()) < 0 or max(times.values()) > _LAST_MS:
        raise ConfigurationError(f"the option {for_each} must name times in milliseconds, from 0 to {_LAST_MS}")
    return Since(for_each, times, or_latest)


def _offsets(option: str, given: Mapping[str, str]) -> Position | None:
    word = given.get(option.lower(), "").strip().lower()
    return word if word in ("earliest", "latest") else _by_partition(option, given, "earliest, latest or JSON")


def _by_partition(option: str, given: Mapping[str, str], what: str) -> Offsets | None:
    """Return the numbers that an option has by partition, or None where it is not given."""
    text = given.get(option.lower())
    if text is None:
        return None
    try:
        numbers = parse_offsets(text)
    except MessageFormatError as error:
        raise ConfigurationError(f"the option {option} must be {what}: {error}") from error
    if not numbers:
        raise ConfigurationError(f"the option {option} names no partition; name every one that is read")
    return numbers
