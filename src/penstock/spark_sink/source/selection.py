"""Which topics a query reads: by their names, or by a pattern."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
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
