"""The topic watch: whether topics are still those that they were, or were deleted and created again.

The client reads a recreated topic from its position in the old one, silently, where no metadata showed it absent in
between. What the new one holds below that would be lost and committed. Topic ids differ (KIP-516), and the client
does not compare them (librdkafka 2.16), so the brokers are asked every few seconds. The same answers show whether a
topic is absent, and whether brokers answer at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from confluent_kafka import KafkaException

from penstock.clients.cluster import Answer
from penstock.clients.kafka_errors import reason
from penstock.clients.requests.topic_ids import TopicIds

#: Seconds between two questions.
_EVERY_S = 5.0


class TopicWatch:
    """Asks for the ids of topics. On the poll thread only, save `trouble`."""

    def __init__(self, topics: Sequence[str], ask: Callable[[Sequence[str]], Answer[TopicIds]]) -> None:
        self._topics = list(topics)
        self._ask = ask
        self._asked: Answer[TopicIds] | None = None
        self._next = 0.0
        self._ids: dict[str, str] = {}
        # What is wrong with a topic, in words. Replaced as a whole, so that any thread may read it.
        self._troubles: dict[str, str] = {}
        #: Those of them that did not exist, at the last answer.
        self.absent: frozenset[str] = frozenset()
        #: Whether the last `check` has brought the answer that all topics are those that they were.
        self.all_same = False

    def watch(self, topics: Sequence[str]) -> None:
        """Ask for these topics from now on. One that is watched no more is another one when it comes back."""
        self._topics, watched = list(topics), set(topics)
        self._ids = {topic: topic_id for topic, topic_id in self._ids.items() if topic in watched}
        self._troubles = {topic: why for topic, why in self._troubles.items() if topic in watched}

    def check_now(self) -> None:
        """Ask at the next `check`: the client has found something wrong."""
        self._next = 0.0

    def check(self, now: float) -> list[str]:
        """Return the topics that were found to be recreated; ask again when it is time."""
        recreated: list[str] = []
        self.all_same = False
        if self._asked is not None:
            found = self._asked.answer()
            if found is None:
                return []
            self._asked = None
            recreated = self._compare(found)
            self.all_same = not recreated and all(topic in found.ids for topic in self._topics)
        if now >= self._next:
            self._next = now + _EVERY_S
            try:
                self._asked = self._ask(self._topics)
            except KafkaException as error:
                self._troubles = dict.fromkeys(self._topics, f"the client cannot ask the brokers: {reason(error)}")
        return recreated

    def _compare(self, found: TopicIds) -> list[str]:
        known, watched = self._ids, set(self._topics)
        # Some that were asked for may not be watched any more.
        ids = {topic: topic_id for topic, topic_id in found.ids.items() if topic in watched}
        recreated = [topic for topic, topic_id in ids.items() if known.get(topic, topic_id) != topic_id]
        self._ids = {**known, **ids}
        self.absent = found.absent
        self._troubles = {
            topic: "the topic does not exist" if topic in found.absent else f"brokers do not tell of the topic: {why}"
            for topic, why in found.failures.items()
            if topic in watched
        }
        return recreated

    def trouble(self, topic: str) -> str | None:
        """Return what is wrong with a topic, or None. Any thread."""
        return self._troubles.get(topic)
