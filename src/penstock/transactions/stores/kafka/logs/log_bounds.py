"""Where the half, op and done logs begin and end, and which topics they are: asked without waiting.

The coordinator's loop asks, goes on, and looks later whether the answer is there. What is in an answer was true at some
time after the question: that is what makes an end that was learnt so worth more than one that a fetch brought along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from confluent_kafka import IsolationLevel
from confluent_kafka.admin import AdminClient

from penstock.clients.kafka_errors import reason
from penstock.clients.requests.answers import Asked
from penstock.clients.requests.log_ends import FIRST, LAST, Offsets, ask_offsets
from penstock.clients.requests.topic_ids import TopicIds, ask_topic_ids
from penstock.transactions.stores.kafka.logs.log_identity import DONE, HALF, OP
from penstock.transactions.wire.topics import StoreTopics

#: Seconds that a broker may take to answer.
_ANSWER_S = 5.0


class Bounds(NamedTuple):
    """Where a log begins and ends."""

    low: int
    end: int


@dataclass(frozen=True, slots=True)
class Look:
    """What the brokers answered.

    Attributes:
        asked_at: when they were asked, in monotonic seconds.
        bounds: by log and half partition; what was not answered is not there.
        ids: topic ids by log.
        failures: why something is not there, by what was asked.
    """

    asked_at: float
    bounds: Mapping[tuple[str, int], Bounds]
    ids: Mapping[str, str]
    failures: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Asked:
    at: float
    lows: Asked[Any, Any, Offsets]
    ends: Asked[Any, Any, Offsets]
    ids: Asked[str, Any, TopicIds]

    @property
    def is_over(self) -> bool:
        return self.lows.is_over and self.ends.is_over and self.ids.is_over


class LogBounds:
    """Asks for the bounds of logs. Used by one thread; waits for nothing."""

    def __init__(self, admin: AdminClient, topics: StoreTopics) -> None:
        self._admin = admin
        self._logs = {topics.half: HALF, topics.op: OP, topics.done: DONE}
        self._asked: _Asked | None = None

    @property
    def is_asked(self) -> bool:
        """Whether an answer is on its way."""
        return self._asked is not None

    def ask(self, partitions: Iterable[int], now: float) -> None:
        """Ask for the bounds of the logs of half partitions, unless an answer is on its way.

        Raises `KafkaException` where the client library refuses to ask. `now` is in monotonic seconds.
        """
        wanted = list(partitions)
        if self._asked is not None or not wanted:
            return
        places = [(topic, number) for topic in self._logs for number in wanted]
        lows, ends = (
            ask_offsets(self._admin, dict.fromkeys(places, spec), _ANSWER_S, IsolationLevel.READ_UNCOMMITTED)
            for spec in (FIRST, LAST)
        )
        self._asked = _Asked(
            now,
            lows,
            ends,
            ask_topic_ids(self._admin, self._logs, _ANSWER_S),
        )

    def answer(self) -> Look | None:
        """Return what was answered, once; None as long as it is not complete and its time is not over."""
        asked = self._asked
        if asked is None or not asked.is_over:
            return None
        self._asked = None
        return self._look(asked)

    def _look(self, asked: _Asked) -> Look:
        (lows, no_lows), (ends, no_ends) = asked.lows.wait(), asked.ends.wait()
        bounds = {
            (self._logs[topic], number): Bounds(low, ends[topic, number])
            for (topic, number), low in lows.items()
            if (topic, number) in ends
        }
        found = asked.ids.wait()
        failures = {f"{topic}[{number}]": reason(why) for (topic, number), why in {**no_lows, **no_ends}.items()}
        failures.update(found.failures)
        return Look(asked.at, bounds, {self._logs[name]: topic_id for name, topic_id in found.ids.items()}, failures)


def topic_ids(admin: AdminClient, topics: StoreTopics, timeout_s: float = _ANSWER_S) -> dict[str, str]:
    """Return the ids of half, op and done by log, waiting for the answer; without those that have none."""
    logs = {topics.half: HALF, topics.op: OP, topics.done: DONE}
    return {logs[name]: topic_id for name, topic_id in ask_topic_ids(admin, logs, timeout_s).wait().ids.items()}
