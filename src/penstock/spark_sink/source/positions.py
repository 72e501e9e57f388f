"""The begin of a query, or the end of a batch query: a word, an offset for each partition, or a time.

If both are given, the time counts. `Position.resolve` computes the offsets in the present logs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from penstock.errors import ConfigurationError, MessageFormatError
from penstock.spark_sink.source.plan import EARLIEST, LATEST, Log, Offsets, TopicPartition, parse_offsets, place

#: The client's answer for a time after the last message.
_NO_OFFSET = -1
#: The latest time in Kafka's protocol.
_LAST_MS = 2**63 - 1
#: Returns for each partition the first offset at or after a time (ms), -1 if there is none.
AtTime = Callable[[int, Iterable[TopicPartition]], Offsets]


@dataclass(frozen=True, slots=True)
class Position:
    """The begin or end of a read.

    Attributes:
        option: the option's name, for errors.
        given: the next offset for all partitions or for each; -2 is the first, -1 the end. Or a time in milliseconds
            since the epoch: the first message at or after it, or the end if there is none.
        is_time: whether `given` is a time.
    """

    option: str
    given: int | Offsets
    is_time: bool = False

    def restricted(self, partitions: Collection[TopicPartition]) -> Position:
        """Return the position restricted to these partitions."""
        if isinstance(self.given, int):
            return self
        return replace(self, given={part: value for part, value in self.given.items() if part in partitions})

    def resolve(self, logs: Mapping[TopicPartition, Log], at_time: AtTime) -> Offsets:
        """Return the offsets of exactly the partitions that are read; `logs` has their logs.

        Raises `ConfigurationError` about the option if a partition is missing, or a partition that is not read is
        named.
        """
        if isinstance(self.given, int) and self.is_time:
            # Without a message that late, the next message counts. A message after the end of the log was read is past
            # it.
            found, ends = at_time(self.given, logs), {part: log.end for part, log in logs.items()}
            return {part: ends[part] if at == _NO_OFFSET else min(at, ends[part]) for part, at in found.items()}
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


def position(side: str, given: Mapping[str, str]) -> Position | None:
    """Return the begin of a query ("starting") or the end of a batch query ("ending"); None: no option sets it.

    Names of options are in lower case. `ConfigurationError` names a wrong option.
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
