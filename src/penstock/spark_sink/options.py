"""The options of the Spark source, by the names of Spark's own Kafka source, checked once on the driver.

Spark hands option names over in lower case, so they are compared so; errors use the names as documented.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.errors import ConfigurationError, MessageFormatError, TopicNotFoundError
from penstock.spark_sink.planning import LATEST, Offsets, TopicPartition, parse_offsets

#: The options of the source, as documented, beside `kafka.*`.
OPTION_NAMES = (
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "endingOffsets",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "failOnDataLoss",
    "includeHeaders",
    "kafkaConsumer.pollTimeoutMs",
)

_POLL_TIMEOUT_MS = "120000"
_KAFKA = "kafka."

#: `kafka.` keys the source holds itself, with what to do in place of them.
_OWNED = {
    "auto.offset.reset": "say where to begin with startingOffsets, and what a gap means with failOnDataLoss",
    "enable.auto.commit": "Spark keeps the offsets in its checkpoint and the sink in its ledger",
    "enable.auto.offset.store": "Spark keeps the offsets in its checkpoint",
    "enable.partition.eof": "the source finds the end of a range by it",
    "group.protocol": "the source assigns partitions itself and joins no group",
    "key.deserializer": "key is binary; cast it in the query",
    "value.deserializer": "value is binary; cast it in the query",
    "key.serializer": "this is a source; it writes nothing",
    "value.serializer": "this is a source; it writes nothing",
    "interceptor.classes": "the client library has no interceptors",
}

#: Where a read begins or ends: a word, or an offset for each partition.
Position = str | Offsets


#: Topics of Kafka's own, which a pattern leaves out; who wants one names it.
_INTERNAL = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})


class Selection(Protocol):
    """What of the broker's topics a query reads."""

    def pick(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return the chosen partitions, given the number of partitions of every topic."""

    def pick_existing(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return those of the chosen partitions that there are."""


@dataclass(frozen=True, slots=True)
class Subscribe:
    """The named topics, all partitions."""

    topics: tuple[str, ...]

    def pick(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return all partitions of the topics; a missing topic is a `TopicNotFoundError`."""
        _require(self.topics, counts, "subscribe")
        return self.pick_existing(counts)

    def pick_existing(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return all partitions of the topics that there are."""
        return [(topic, partition) for topic in self.topics for partition in range(counts.get(topic, 0))]


@dataclass(frozen=True, slots=True)
class SubscribePattern:
    """Every topic whose whole name matches a regular expression, save Kafka's own."""

    pattern: str

    def pick(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return all partitions of the topics that match now; there may be none yet."""
        return self.pick_existing(counts)

    def pick_existing(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return the same: a pattern asks for nothing by name."""
        matching = sorted(topic for topic in counts.keys() - _INTERNAL if re.fullmatch(self.pattern, topic))
        return [(topic, partition) for topic in matching for partition in range(counts[topic])]


@dataclass(frozen=True, slots=True)
class Assign:
    """The named partitions."""

    partitions: tuple[TopicPartition, ...]

    def pick(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return the partitions; a missing one is a `TopicNotFoundError`."""
        _require({topic for topic, _ in self.partitions}, counts, "assign")
        for topic, partition in self.partitions:
            if partition >= counts[topic]:
                raise TopicNotFoundError(
                    f"assign names {topic}[{partition}], but the topic has {counts[topic]} partitions; "
                    "correct the number, which starts at 0"
                )
        return list(self.partitions)

    def pick_existing(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return those of the partitions that there are."""
        return [(topic, partition) for topic, partition in self.partitions if partition < counts.get(topic, 0)]


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of one query, checked.

    Attributes:
        bootstrap_servers: addresses of the brokers.
        client: client settings by librdkafka's names; they may hold secrets, so they are never shown.
        selection: which partitions are read.
        starting: where a read begins: `earliest`, `latest`, offsets, or None for the default.
        ending: where a batch read ends: `latest` or offsets, or None for the default.
        max_offsets: most offsets one micro-batch takes, over all partitions, or None.
        min_partitions: least number of tasks, or None for one per Kafka partition.
        fail_on_data_loss: whether offsets that are gone stop the query or are logged.
        include_headers: whether there is a column `headers`.
        poll_timeout_s: seconds a task waits without any progress before it gives up.
    """

    bootstrap_servers: str
    client: Mapping[str, str] = field(repr=False)
    selection: Selection
    starting: Position | None
    ending: Position | None
    max_offsets: int | None
    min_partitions: int | None
    fail_on_data_loss: bool
    include_headers: bool
    poll_timeout_s: float

    @property
    def read_committed(self) -> bool:
        """Whether only committed messages are read."""
        return self.client["isolation.level"] == "read_committed"

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Check the options of a query.

        Raises:
            ConfigurationError: an option is unknown, wrong, missing or not to be set; it is named.
        """
        given = {name.lower(): value for name, value in options.items()}
        client = {name[len(_KAFKA) :]: value for name, value in given.items() if name.startswith(_KAFKA)}
        _refuse_unknown(given)
        _refuse_owned(client)
        servers = client.pop("bootstrap.servers", "").strip()
        if not servers:
            raise ConfigurationError("the option kafka.bootstrap.servers is missing; give the addresses of the brokers")
        client.setdefault("isolation.level", "read_committed")
        if client["isolation.level"] not in ("read_committed", "read_uncommitted"):
            raise ConfigurationError(
                "the option kafka.isolation.level must be read_committed or read_uncommitted, "
                f"but is {client['isolation.level']!r}"
            )
        return cls(
            bootstrap_servers=servers,
            client=client,
            selection=_selection(given),
            starting=_position("startingOffsets", given),
            ending=_position("endingOffsets", given),
            max_offsets=_count("maxOffsetsPerTrigger", given),
            min_partitions=_count("minPartitions", given),
            fail_on_data_loss=_flag("failOnDataLoss", given, default=True),
            include_headers=_flag("includeHeaders", given, default=False),
            poll_timeout_s=(_count("kafkaConsumer.pollTimeoutMs", given) or int(_POLL_TIMEOUT_MS)) / 1000,
        )

    def for_stream(self) -> SourceOptions:
        """Return these options, or raise `ConfigurationError` where one has no meaning in a stream."""
        if self.ending is not None:
            raise ConfigurationError("the option endingOffsets has no meaning in a stream; leave it out")
        return self

    def for_batch(self) -> SourceOptions:
        """Return these options, or raise `ConfigurationError` where one has no meaning in a batch."""
        if self.starting == "latest" or (isinstance(self.starting, dict) and LATEST in self.starting.values()):
            raise ConfigurationError(
                "the option startingOffsets must not be latest in a batch query, which would read nothing; "
                "give earliest or offsets"
            )
        if self.ending == "earliest" or (isinstance(self.ending, dict) and min(self.ending.values()) < LATEST):
            raise ConfigurationError(
                "the option endingOffsets must not be earliest, which would read nothing; give latest or offsets"
            )
        return self


def _require(topics: tuple[str, ...] | set[str], counts: Mapping[str, int], option: str) -> None:
    missing = sorted(topic for topic in topics if topic not in counts)
    if missing:
        raise TopicNotFoundError(
            f"the option {option} names topics that do not exist: {', '.join(missing)}; "
            "create them first, or correct the name"
        )


def _refuse_unknown(given: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in OPTION_NAMES}
    for name in given:
        if name in known or name.startswith(_KAFKA):
            continue
        near = difflib.get_close_matches(name, [*known, "kafka.bootstrap.servers"], n=1)
        hint = f"did you mean {known.get(near[0], near[0])}?" if near else f"it knows {', '.join(OPTION_NAMES)}"
        raise ConfigurationError(
            f"the source penstock has no option {name!r}; {hint} (client settings begin with kafka.)"
        )


def _refuse_owned(client: Mapping[str, str]) -> None:
    for name in client:
        if name in _OWNED:
            raise ConfigurationError(f"the option kafka.{name} cannot be set: {_OWNED[name]}")


def _selection(given: Mapping[str, str]) -> Selection:
    chosen = [name for name in ("subscribe", "subscribePattern", "assign") if name.lower() in given]
    if len(chosen) != 1:
        found = " and ".join(chosen) or "none"
        raise ConfigurationError(
            f"give exactly one of the options subscribe, subscribePattern and assign; found {found}"
        )
    text = given[chosen[0].lower()].strip()
    if chosen[0] == "subscribe":
        topics = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if not topics:
            raise ConfigurationError("the option subscribe names no topic; give one or several, with commas")
        return Subscribe(topics)
    if chosen[0] == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigurationError(
                f"the option subscribePattern is no regular expression: {error}; correct it"
            ) from error
        return SubscribePattern(text)
    return Assign(_assigned(text))


def _assigned(text: str) -> tuple[TopicPartition, ...]:
    wrong = ConfigurationError(
        'the option assign must be JSON that lists partitions per topic, such as {"orders": [0, 1]}'
    )
    try:
        shaped = json.loads(text)
    except json.JSONDecodeError as error:
        raise wrong from error
    if not isinstance(shaped, dict) or not shaped:
        raise wrong
    chosen: list[TopicPartition] = []
    for topic, partitions in shaped.items():
        if not isinstance(partitions, list) or not all(type(n) is int and n >= 0 for n in partitions):
            raise wrong
        chosen += [(topic, partition) for partition in partitions]
    return tuple(dict.fromkeys(chosen))


def _position(option: str, given: Mapping[str, str]) -> Position | None:
    text = given.get(option.lower())
    if text is None:
        return None
    if text.strip().lower() in ("earliest", "latest"):
        return text.strip().lower()
    try:
        offsets = parse_offsets(text)
    except MessageFormatError as error:
        raise ConfigurationError(f"the option {option} must be earliest, latest or JSON: {error}") from error
    if not offsets:
        raise ConfigurationError(f"the option {option} names no partition; name every one that is read")
    return offsets


def _count(option: str, given: Mapping[str, str]) -> int | None:
    text = given.get(option.lower())
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigurationError(f"the option {option} must be a whole number of at least 1, but is {text!r}")
    return int(text)


def _flag(option: str, given: Mapping[str, str], *, default: bool) -> bool:
    text = given.get(option.lower())
    if text is None:
        return default
    if text.strip().lower() not in ("true", "false"):
        raise ConfigurationError(f"the option {option} must be true or false, but is {text!r}")
    return text.strip().lower() == "true"


__all__ = ["OPTION_NAMES", "Position", "Selection", "SourceOptions"]
