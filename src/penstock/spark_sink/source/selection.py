"""Which partitions a query reads: by the names of topics, by a pattern, or partition by partition."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import ConfigurationError, TopicNotFoundError
from penstock.spark_sink.source.plan import TopicPartition

#: Kafka's own topics. A pattern leaves them out; to read one, name it.
_INTERNAL = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})


@dataclass(frozen=True, slots=True)
class Selection:
    """What of the brokers' topics a query reads.

    Attributes:
        said: the option that says so, for errors.
        named: the topics that are named, each with the partitions that are, or None for all.
        pattern: matches the whole names of topics, except Kafka's own; None where topics are named.
    """

    said: str
    named: Mapping[str, tuple[int, ...] | None]
    pattern: str | None = None

    def pick(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return the chosen partitions, given the number of partitions of every topic.

        A topic or a partition that is named and missing is a `TopicNotFoundError`; of a pattern there may be none yet.
        """
        option = self.said.partition("=")[0]
        if missing := sorted(self.named.keys() - counts.keys()):
            raise TopicNotFoundError(
                f"the option {option} names topics that do not exist: {', '.join(missing)}; create them first, or "
                "correct the name"
            )
        for topic, numbers in self.named.items():
            if numbers and max(numbers) >= counts[topic]:
                raise TopicNotFoundError(
                    f"{option} names {topic}[{max(numbers)}], but the topic has {counts[topic]} partitions; correct "
                    "the number, which starts at 0"
                )
        return self.pick_existing(counts)

    def pick_existing(self, counts: Mapping[str, int]) -> list[TopicPartition]:
        """Return the chosen partitions that exist."""
        topics = self.named if self.pattern is None else sorted(filter(self.covers, counts))
        return [
            (topic, number)
            for topic in topics
            for number in range(counts.get(topic, 0))
            if (chosen := self.named.get(topic)) is None or number in chosen
        ]

    def covers(self, topic: str) -> bool:
        """Tell whether a topic of that name is read, in whole or in part, whether it exists or not."""
        if self.pattern is None:
            return topic in self.named
        return topic not in _INTERNAL and re.fullmatch(self.pattern, topic) is not None


def parse_selection(given: Mapping[str, str]) -> Selection:
    """Return what the options, by names in lower case, choose; `ConfigurationError` where that is not one thing."""
    chosen = [name for name in ("subscribe", "subscribePattern", "assign") if name.lower() in given]
    if len(chosen) != 1:
        found = " and ".join(chosen) or "none"
        raise ConfigurationError(
            f"give exactly one of the options subscribe, subscribePattern and assign; found {found}"
        )
    text = given[chosen[0].lower()].strip()
    said = f"{chosen[0]}={text}"
    if chosen[0] == "subscribe":
        topics = [name.strip() for name in text.split(",") if name.strip()]
        if not topics:
            raise ConfigurationError("the option subscribe names no topic; give one or several, with commas")
        return Selection(said, dict.fromkeys(topics))
    if chosen[0] == "assign":
        return Selection(said, _assigned(text))
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigurationError(
            f"the option subscribePattern is no regular expression: {error}; correct it"
        ) from error
    return Selection(said, {}, text)


def _assigned(text: str) -> dict[str, tuple[int, ...]]:
    try:
        shaped = json.loads(text)
        if shaped and all(type(number) is int and number >= 0 for numbers in shaped.values() for number in numbers):
            return {topic: tuple(numbers) for topic, numbers in shaped.items()}
    except (ValueError, AttributeError, TypeError):
        pass  # no JSON, or none of this shape
    raise ConfigurationError(
        'the option assign must be JSON that lists partitions per topic, such as {"orders": [0, 1]}'
    )
