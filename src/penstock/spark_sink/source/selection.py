"""What a query reads: topics by their names or by a pattern, from where and up to where.

A position is a word, an offset for each partition, or a time, which counts before the others. What it means on the logs
as they are is settled by `Position.resolve`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from penstock.errors import ConfigurationError, MessageFormatError, SourceError, TopicNotFoundError
from penstock.spark_sink.source.plan import EARLIEST, LATEST, Log, Offsets, TopicPartition, parse_offsets, place

#: Kafka's own topics. A pattern leaves them out; to read one, name it.
_INTERNAL = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})

#: What the client answers for a time after the last message.
_NO_OFFSET = -1
#: The latest time there is in Kafka's protocol.
_LAST_MS = 2**63 - 1
#: Returns the first offset at or after a time (ms) of each partition, -1 where there is none.
AtTime = Callable[[int, Iterable[TopicPartition]], Offsets]


@dataclass(frozen=True, slots=True)
class Selection:
    """What of the brokers' topics a query reads.

    Attributes:
        said: the option that says so, for errors.
        topics: the topics that are named.
        pattern: matches the whole names of topics, except Kafka's own; None where topics are named.
    """

    said: str
    topics: tuple[str, ...]
    pattern: str | None = None

    def pick(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return the chosen partitions that exist, given the number of partitions of every topic."""
        topics = self.topics if self.pattern is None else sorted(filter(self.covers, counts))
        return [(topic, number) for topic in topics for number in range(counts.get(topic, 0))]

    def require(self, topics: AbstractSet[str]) -> None:
        """Raise `TopicNotFoundError` for a topic that is named and not among those; of a pattern there may be none."""
        if missing := sorted(set(self.topics) - topics):
            raise TopicNotFoundError(
                f"the option subscribe names topics that do not exist: {', '.join(missing)}; create them first, or "
                "correct the name"
            )

    def covers(self, topic: str) -> bool:
        """Tell whether a topic of that name is read, whether it exists or not."""
        if self.pattern is None:
            return topic in self.topics
        return topic not in _INTERNAL and re.fullmatch(self.pattern, topic) is not None


def parse_selection(given: Mapping[str, str]) -> Selection:
    """Return what the options, by names in lower case, choose; `ConfigurationError` where that is not one thing."""
    chosen = [name for name in ("subscribe", "subscribePattern") if name.lower() in given]
    if len(chosen) != 1:
        found = " and ".join(chosen) or "none"
        raise ConfigurationError(f"give exactly one of the options subscribe and subscribePattern; found {found}")
    text = given[chosen[0].lower()].strip()
    said = f"{chosen[0]}={text}"
    if chosen[0] == "subscribe":
        topics = [name.strip() for name in text.split(",") if name.strip()]
        if not topics:
            raise ConfigurationError("the option subscribe names no topic; give one or several, with commas")
        return Selection(said, tuple(dict.fromkeys(topics)))
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigurationError(
            f"the option subscribePattern is no regular expression: {error}; correct it"
        ) from error
    return Selection(said, (), text)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a read begins or ends.

    Attributes:
        option: the option that says so, for errors.
        given: the next offset, -2 for the first and -1 for the end, of all partitions or of each; or a time in
            milliseconds since the epoch, which stands for the first message at or after it.
        is_time: whether it is a time.
    """

    option: str
    given: int | Offsets
    is_time: bool = False

    def names(self, word: int) -> bool:
        """Tell whether a partition is to be taken at its beginning (-2), or at its end (-1)."""
        return not self.is_time and word in ([self.given] if isinstance(self.given, int) else self.given.values())

    def restricted(self, partitions: Collection[TopicPartition]) -> Position:
        """Return the position without what it says of other partitions than these."""
        if isinstance(self.given, int):
            return self
        return replace(self, given={part: value for part, value in self.given.items() if part in partitions})

    def resolve(self, logs: Mapping[TopicPartition, Log], at_time: AtTime) -> Offsets:
        """Return the offsets of exactly the partitions that are read, whose logs these are.

        A position that lacks a partition, or names one that is not read, is a `ConfigurationError` about the option; a
        partition without a message as late as the time of a beginning is a `SourceError`.
        """
        if isinstance(self.given, int) and self.is_time:
            return self._at_time(self.given, logs, at_time)
        given = dict.fromkeys(logs, self.given) if isinstance(self.given, int) else self.given
        if missing := sorted(logs.keys() - given.keys()):
            raise ConfigurationError(
                f"the option {self.option} lacks {', '.join(map(place, missing))}; give an offset, -2 for earliest, "
                "-1 for latest, for every partition"
            )
        if foreign := sorted(given.keys() - logs.keys()):
            names = ", ".join(map(place, foreign))
            raise ConfigurationError(
                f"the option {self.option} names {names}, which the query does not read; leave it out"
            )
        words = {part: {EARLIEST: log.first, LATEST: log.end} for part, log in logs.items()}
        return {part: words[part].get(offset, offset) for part, offset in given.items()}

    def _at_time(self, time_ms: int, logs: Mapping[TopicPartition, Log], at_time: AtTime) -> Offsets:
        found = at_time(time_ms, logs)
        none = sorted(part for part, offset in found.items() if offset == _NO_OFFSET)
        if none and self.option == "startingTimestamp":
            raise SourceError(
                f"{place(none[0])} has no message at or after {time_ms} ms, where the option {self.option} begins "
                f"({len(none)} such partitions); give an earlier time, or -1 in startingOffsets to begin at their end"
            )
        # A message that came after the end was looked up lies past it.
        ends = {part: log.end for part, log in logs.items()}
        return {part: ends[part] if offset == _NO_OFFSET else min(offset, ends[part]) for part, offset in found.items()}


def position(side: str, given: Mapping[str, str]) -> Position | None:
    """Return where a query begins ("starting") or a batch query ends ("ending"), or None where no option says so.

    Names of options are in lower case. A `ConfigurationError` names an option that is wrong.
    """
    timestamp, offsets = f"{side}Timestamp", f"{side}Offsets"
    if (text := given.get(timestamp.lower())) is not None:
        text = text.strip()
        if not (text.isascii() and text.isdecimal()) or len(text) > len(str(_LAST_MS)) or int(text) > _LAST_MS:
            raise ConfigurationError(
                f"the option {timestamp} must be a number of milliseconds since the epoch, at most {_LAST_MS}, but is "
                f"{text!r}"
            )
        return Position(timestamp, int(text), is_time=True)
    if (text := given.get(offsets.lower())) is None:
        return None
    word = {"earliest": EARLIEST, "latest": LATEST}.get(text.strip().lower())
    if word is not None:
        return Position(offsets, word)
    try:
        by_partition = parse_offsets(text)
    except MessageFormatError as error:
        raise ConfigurationError(f"the option {offsets} must be earliest, latest or JSON: {error}") from error
    if not by_partition:
        raise ConfigurationError(f"the option {offsets} names no partition; name every one that is read")
    return Position(offsets, by_partition)
