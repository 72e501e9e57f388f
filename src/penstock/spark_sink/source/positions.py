"""Where a query begins and ends: a word, an offset for each partition, or a time.

Of the three ways Spark's options know, a time for all partitions counts before times for each, and those before
offsets. What a position means on the logs as they are is settled by `Position.resolve`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from penstock.errors import ConfigurationError, MessageFormatError, SourceError
from penstock.spark_sink.source.plan import EARLIEST, LATEST, Log, Offsets, TopicPartition, parse_offsets, place

#: What the client answers for a time after the last message.
_NO_OFFSET = -1
#: The latest time there is in Kafka's protocol.
_LAST_MS = 2**63 - 1

#: Returns the first offset at or after a time (ms) of each partition, -1 where there is none.
AtTimes = Callable[[Mapping[TopicPartition, int]], Offsets]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a read begins or ends.

    Attributes:
        option: the option that says so, for errors.
        given: the next offset, -2 for the first and -1 for the end; or a time in milliseconds since the epoch, which
            stands for the first message at or after it. One for all partitions, or one for each.
        is_time: whether it is a time.
        or_latest: whether a partition without a message as late as the time is taken at its end; else it is an error.
    """

    option: str
    given: int | Offsets
    is_time: bool = False
    or_latest: bool = False

    def names(self, word: int) -> bool:
        """Tell whether a partition is to be taken at its beginning (-2), or at its end (-1)."""
        return not self.is_time and word in ([self.given] if isinstance(self.given, int) else self.given.values())

    def restricted(self, partitions: Collection[TopicPartition]) -> Position:
        """Return the position without what it says of other partitions than these."""
        if isinstance(self.given, int):
            return self
        return replace(self, given={part: value for part, value in self.given.items() if part in partitions})

    def resolve(self, logs: Mapping[TopicPartition, Log], at_times: AtTimes) -> Offsets:
        """Return the offsets of exactly the partitions that are read, whose logs these are.

        A position that lacks a partition, or names one that is not read, is a `ConfigurationError` about the option; a
        partition without a message as late as the time is a `SourceError`, unless it is taken at its end then.
        """
        given = dict.fromkeys(logs, self.given) if isinstance(self.given, int) else self.given
        if missing := sorted(logs.keys() - given.keys()):
            every = "milliseconds since the epoch" if self.is_time else "an offset, -2 for earliest, -1 for latest,"
            raise ConfigurationError(
                f"the option {self.option} lacks {', '.join(map(place, missing))}; give {every} for every partition"
            )
        if foreign := sorted(given.keys() - logs.keys()):
            names = ", ".join(map(place, foreign))
            raise ConfigurationError(
                f"the option {self.option} names {names}, which the query does not read; leave it out"
            )
        if not self.is_time:
            words = {part: {EARLIEST: log.first, LATEST: log.end} for part, log in logs.items()}
            return {part: words[part].get(offset, offset) for part, offset in given.items()}
        found = at_times(given)
        none = sorted(part for part, offset in found.items() if offset == _NO_OFFSET)
        if none and not self.or_latest:
            raise SourceError(
                f"{place(none[0])} has no message at or after {given[none[0]]} ms, where the option {self.option} "
                f"begins ({len(none)} such partitions); give an earlier time, or set "
                "startingOffsetsByTimestampStrategy to latest to begin there at the end"
            )
        # A message that came after the end was looked up lies past it.
        ends = {part: log.end for part, log in logs.items()}
        return {part: ends[part] if offset == _NO_OFFSET else min(offset, ends[part]) for part, offset in found.items()}


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
    return _position("starting", given, or_latest=strategy == "latest")


def ending_position(given: Mapping[str, str]) -> Position | None:
    """Return where a batch query ends, or None where no option says so; as `starting_position`."""
    return _position("ending", given, or_latest=True)


def _position(side: str, given: Mapping[str, str], *, or_latest: bool) -> Position | None:
    for_all, for_each, offsets = f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"
    if (text := given.get(for_all.lower())) is not None:
        text = text.strip()
        if not (text.isascii() and text.isdecimal()) or len(text) > len(str(_LAST_MS)) or int(text) > _LAST_MS:
            raise ConfigurationError(
                f"the option {for_all} must be a number of milliseconds since the epoch, at most {_LAST_MS}, but is "
                f"{text!r}"
            )
        return Position(for_all, int(text), is_time=True, or_latest=or_latest)
    if (text := given.get(for_each.lower())) is not None:
        times = _by_partition(for_each, text, 'JSON such as {"orders": {"0": 1700000000000}}')
        if min(times.values()) < 0 or max(times.values()) > _LAST_MS:
            raise ConfigurationError(f"the option {for_each} must name times in milliseconds, from 0 to {_LAST_MS}")
        return Position(for_each, times, is_time=True, or_latest=or_latest)
    if (text := given.get(offsets.lower())) is not None:
        word = {"earliest": EARLIEST, "latest": LATEST}.get(text.strip().lower())
        return Position(offsets, _by_partition(offsets, text, "earliest, latest or JSON") if word is None else word)
    return None


def _by_partition(option: str, text: str, what: str) -> Offsets:
    """Return the numbers that an option has by partition."""
    try:
        numbers = parse_offsets(text)
    except MessageFormatError as error:
        raise ConfigurationError(f"the option {option} must be {what}: {error}") from error
    if not numbers:
        raise ConfigurationError(f"the option {option} names no partition; name every one that is read")
    return numbers
