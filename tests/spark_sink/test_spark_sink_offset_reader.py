"""What the driver does with the answers of brokers that are given by hand: it asks again, or says why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AclOperation

from penstock.clients.rights import MissingRightError
from penstock.errors import BrokerConnectionError, SourceError, TopicNotFoundError
from penstock.spark_sink.source.brokers import OffsetReader
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import Log

#: What a leader that moves, a broker that starts and a network that is away for a moment look like.
PASSING = [
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
]

PART = ("orders", 0)


def answered(result: object) -> Future[Any]:
    """Return a future that has its answer; an error's code is raised."""
    future: Future[Any] = Future()
    if isinstance(result, int):
        future.set_exception(KafkaException(KafkaError(result)))
    else:
        future.set_result(result)
    return future


class Admin:
    """An admin client whose answers the test gives, the last one again and again."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.asked = 0

    def _next(self) -> object:
        self.asked += 1
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def poll(self, _timeout: float) -> int:
        return 0

    def describe_topics(self, topics: TopicCollection, **_: object) -> dict[str, Future[Any]]:
        return {name: answered(self._next()) for name in topics.topic_names}

    def list_offsets(self, specs: Mapping[TopicPartition, object], **_: object) -> dict[TopicPartition, Future[Any]]:
        return {part: answered(self._next()) for part in specs}


@pytest.fixture
def view() -> Callable[..., OffsetReader]:
    def make(admin: object, **options: str) -> OffsetReader:
        settings = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "orders", "fetchOffset.retryIntervalMs": "0"}
        made = OffsetReader(SourceOptions.parse({**settings, **options}))
        made._make_admin = lambda: admin  # type: ignore[assignment,return-value] # it answers as one
        made._admin = made._make_admin()
        return made

    return make


THERE = SimpleNamespace(partitions=[0, 1], topic_id="id-1", authorized_operations=None)


@pytest.mark.parametrize("code", PASSING)
def test_what_a_broker_cannot_tell_just_now_is_asked_for_again(view: Callable[..., OffsetReader], code: int) -> None:
    offsets, topics = Admin(code, code, SimpleNamespace(offset=7)), Admin(code, code, THERE)

    assert view(offsets).logs([PART]) == {PART: Log(7, 7, 7)}
    found = view(topics).topics(expected={"orders"})

    assert (found.counts, found.ids, found.refused) == ({"orders": 2}, {"orders": "id-1"}, {})
    assert topics.asked == 3


@pytest.mark.parametrize(
    ("code", "kind", "said", "asked"),
    [
        (KafkaError.LEADER_NOT_AVAILABLE, SourceError, r"orders\[0\] could not be read at .*LEADER_NOT_AVAILABLE", 3),
        (
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            MissingRightError,
            r"offsets of orders\[0\] .* Read on topic",
            1,
        ),
    ],
)
def test_an_offset_that_is_not_known_in_the_end_is_an_error_with_the_reason(
    view: Callable[..., OffsetReader], code: int, kind: type[Exception], said: str, asked: int
) -> None:
    admin = Admin(code)

    with pytest.raises(kind, match=said):
        view(admin, **{"fetchOffset.numRetries": "2"}).at_times({PART: 1})

    assert admin.asked == asked


def test_a_client_that_asks_a_node_which_is_away_is_replaced(view: Callable[..., OffsetReader]) -> None:
    stuck, another = Admin(KafkaError._TIMED_OUT), Admin(THERE)
    reader = view(stuck)
    reader._make_admin = lambda: another  # type: ignore[assignment,return-value] # as above

    assert reader.topics(expected={"orders"}).counts == {"orders": 2}

    assert (stuck.asked, another.asked) == (1, 1)


def test_what_is_not_expected_is_told_at_once(view: Callable[..., OffsetReader]) -> None:
    unknown, forbidden = Admin(KafkaError.UNKNOWN_TOPIC_OR_PART), Admin(KafkaError.TOPIC_AUTHORIZATION_FAILED)

    with pytest.raises(TopicNotFoundError, match="orders"):
        view(unknown).partitions()
    with pytest.raises(MissingRightError, match=r"topic orders cannot be read: User:clerk lacks .* Read on topic ord"):
        view(forbidden, **{"kafka.sasl.username": "clerk"}).partitions()
    with pytest.raises(BrokerConnectionError, match="no Kafka broker answered"):
        view(Admin(KafkaError._TRANSPORT)).partitions()

    assert (unknown.asked, forbidden.asked) == (1, 1)


def test_a_topic_that_may_be_seen_and_not_read_is_told_before_any_task_is_planned(
    view: Callable[..., OffsetReader],
) -> None:
    seen = SimpleNamespace(**vars(THERE) | {"authorized_operations": [AclOperation.DESCRIBE]})
    readable = SimpleNamespace(**vars(THERE) | {"authorized_operations": [AclOperation.READ, AclOperation.DESCRIBE]})

    with pytest.raises(MissingRightError, match=r"--operation Read --topic 'orders'"):
        view(Admin(seen)).partitions()
    assert view(Admin(readable)).partitions() == [("orders", 0), ("orders", 1)]

    # A query that runs keeps its position in it.
    topics = view(Admin(seen)).topics(["orders"])
    assert (dict(topics.counts), topics.is_unknown("orders"), list(topics.refused)) == ({}, False, ["orders"])
