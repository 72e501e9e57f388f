"""Where the half, op and done logs begin and end, and which topics they are: asked without waiting.

The coordinator's loop asks, goes on, and looks later whether the answer is there. What is in an answer was true at some
time after the question: that is what makes an end that was learnt so worth more than one that a fetch brought along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # not in its __all__

from penstock.clients.kafka_errors import reason
from penstock.clients.requests.answers import known_offset
from penstock.clients.requests.topic_ids import AskedTopicIds
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
    lows: Mapping[TopicPartition, Future[Any]]
    ends: Mapping[TopicPartition, Future[Any]]
    ids: AskedTopicIds

    def futures(self) -> Iterable[Future[Any]]:
        return (*self.lows.values(), *self.ends.values(), *self.ids.futures.values())


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
        places = [TopicPartition(topic, number) for topic in self._logs for number in wanted]
        first: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call] # untyped in the library
        last: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call] # untyped in the library
        self._asked = _Asked(
            now,
            self._admin.list_offsets(dict.fromkeys(places, first), request_timeout=_ANSWER_S),
            self._admin.list_offsets(dict.fromkeys(places, last), request_timeout=_ANSWER_S),
            AskedTopicIds(self._admin, self._logs, _ANSWER_S),
        )

    def answer(self) -> Look | None:
        """Return what was answered, once; None as long as it is not complete."""
        asked = self._asked
        if asked is None or not all(future.done() for future in asked.futures()):
            return None
        self._asked = None
        return self._look(asked)

    def _look(self, asked: _Asked) -> Look:
        failures: dict[str, str] = {}
        lows, ends = _offsets(asked.lows, failures), _offsets(asked.ends, failures)
        bounds = {
            (self._logs[place.topic], place.partition): Bounds(lows[place], ends[place])
            for place in lows
            if place in ends
        }
        found = asked.ids.wait()
        failures.update(found.failures)
        return Look(asked.at, bounds, {self._logs[name]: topic_id for name, topic_id in found.ids.items()}, failures)


def topic_ids(admin: AdminClient, topics: StoreTopics, timeout_s: float = _ANSWER_S) -> dict[str, str]:
    """Return the ids of half, op and done by log, waiting for the answer; without those that have none."""
    logs = {topics.half: HALF, topics.op: OP, topics.done: DONE}
    return {logs[name]: topic_id for name, topic_id in AskedTopicIds(admin, logs, timeout_s).wait().ids.items()}


def _offsets(futures: Mapping[TopicPartition, Future[Any]], failures: dict[str, str]) -> dict[TopicPartition, int]:
    """Return what was answered; why something was not goes into `failures`."""
    found = {}
    for place, future in futures.items():
        try:
            found[place] = known_offset(future.result(_ANSWER_S + 1))
        except (KafkaException, TimeoutError) as error:
            name = f"{place.topic}[{place.partition}]"
            failures[name] = reason(error) if isinstance(error, KafkaException) else "the client does not answer"
    return found
