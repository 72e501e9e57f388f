"""Which partitions a query reads: by the names of topics, by a pattern, or partition by partition."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import ConfigurationError, TopicNotFoundError
from penstock.spark_sink.source.offsets.planning import TopicPartition

#: Topics of Kafka's own, which a pattern leaves out; who wants one names it.
_INTERNAL = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})


class Selection(Protocol):
    """What of the broker's topics a query reads."""

    def pick(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return the chosen partitions, given the number of partitions of every topic."""

    def pick_existing(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return those of the chosen partitions that there are."""

    def names(self) -> frozenset[str] | None:
        """Return the topics, or None where it depends on which there are."""

    def covers(self, topic: str) -> bool:
        """Tell whether a topic of that name is read, wholly or in part, whether there is one or not."""

    def __str__(self) -> str:
        """Say it as the option does, for errors."""


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

    def names(self) -> frozenset[str] | None:
        """Return the topics."""
        return frozenset(self.topics)

    def covers(self, topic: str) -> bool:
        """Tell whether the topic is named."""
        return topic in self.topics

    def __str__(self) -> str:
        return f"subscribe={','.join(self.topics)}"


@dataclass(frozen=True, slots=True)
class SubscribePattern:
    """Every topic whose whole name matches a regular expression, save Kafka's own."""

    pattern: str

    def pick(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return all partitions of the topics that match now; there may be none yet."""
        return self.pick_existing(counts)

    def pick_existing(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return the same: a pattern asks for nothing by name."""
        return [
            (topic, partition) for topic in sorted(filter(self.covers, counts)) for partition in range(counts[topic])
        ]

    def names(self) -> frozenset[str] | None:
        """Return None: the brokers are asked which topics there are."""
        return None

    def covers(self, topic: str) -> bool:
        """Tell whether the name matches."""
        return topic not in _INTERNAL and re.fullmatch(self.pattern, topic) is not None

    def __str__(self) -> str:
        return f"subscribePattern={self.pattern}"


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

    def names(self) -> frozenset[str] | None:
        """Return the topics of the partitions."""
        return frozenset(topic for topic, _ in self.partitions)

    def covers(self, topic: str) -> bool:
        """Tell whether a partition of the topic is named."""
        return any(topic == named for named, _ in self.partitions)

    def __str__(self) -> str:
        return f"assign={', '.join(f'{topic}[{partition}]' for topic, partition in self.partitions)}"


def parse_selection(given: Mapping[str, str]) -> Selection:
    """Return what the options, by names in lower case, choose; `ConfigurationError` where that is not one thing."""
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


def _require(topics: tuple[str, ...] | set[str], counts: Mapping[str, int], option: str) -> None:
    missing = sorted(topic for topic in topics if topic not in counts)
    if missing:
        raise TopicNotFoundError(
            f"the option {option} names topics that do not exist: {', '.join(missing)}; "
            "create them first, or correct the name"
        )
