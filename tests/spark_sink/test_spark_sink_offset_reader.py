"""The driver with answers of brokers that a test gives: it asks again, or says why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AclOperation

from fake_admin import FakeAdmin
from penstock.clients.rights import MissingRightError
from penstock.errors import BrokerConnectionError, SourceError, TopicNotFoundError
from penstock.spark_sink.source.brokers import OffsetReader, View
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


THERE = SimpleNamespace(partitions=[0], topic_id="id-1", authorized_operations=None)
SEVEN = SimpleNamespace(offset=7)


class Admin(FakeAdmin):
    """An admin client whose answers the test gives, of topics and of offsets, the last one again and again."""

    def __init__(self, *topics: object, offsets: Sequence[object] = (SEVEN,)) -> None:
        self._topics, self._offsets = list(topics or (THERE,)), list(offsets)
        self.asked = 0

    def _next(self, answers: list[object]) -> object:
        self.asked += 1
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def describe_topics(self, topics: TopicCollection, **_: object) -> dict[str, Future[Any]]:
        return {name: answered(self._next(self._topics)) for name in topics.topic_names}

    def list_offsets(self, specs: Mapping[TopicPartition, object], **_: object) -> dict[TopicPartition, Future[Any]]:
        return {part: answered(self._next(self._offsets)) for part in specs}


@pytest.fixture
def view() -> Callable[..., OffsetReader]:
    def make(admin: object, **options: str) -> OffsetReader:
        settings = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "orders", "fetchOffset.retryIntervalMs": "0"}
        made = OffsetReader(SourceOptions.parse({**settings, **options}))
        made._make_admin = lambda: admin  # type: ignore[assignment,return-value] # it answers as one
        made._admin = made._make_admin()
        return made

    return make


@pytest.mark.parametrize("code", PASSING)
def test_what_a_broker_cannot_tell_just_now_is_asked_for_again(view: Callable[..., OffsetReader], code: int) -> None:
    admin = Admin(code, code, THERE, offsets=(code, code, SEVEN))

    found = view(admin).view(expected={"orders"})

    assert found == View({PART: Log(7, 7, 7)}, {"orders": "id-1"}, {})


@pytest.mark.parametrize(
    ("code", "kind", "said", "asked"),
    [
        (KafkaError.LEADER_NOT_AVAILABLE, SourceError, r"orders:0 could not be read at .*LEADER_NOT_AVAILABLE", 3),
        (
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            MissingRightError,
            r"offsets of orders:0 .* Read on topic",
            1,
        ),
    ],
)
def test_an_offset_that_is_not_known_in_the_end_is_an_error_with_the_reason(
    view: Callable[..., OffsetReader], code: int, kind: type[Exception], said: str, asked: int
) -> None:
    admin = Admin(offsets=(code,))

    with pytest.raises(kind, match=said):
        view(admin, **{"fetchOffset.numRetries": "2"}).at_time(1, [PART])

    assert admin.asked == asked


def test_a_client_that_asks_a_node_which_is_away_is_replaced(view: Callable[..., OffsetReader]) -> None:
    stuck, another = Admin(KafkaError._TIMED_OUT), Admin()
    reader = view(stuck)
    reader._make_admin = lambda: another  # type: ignore[assignment,return-value] # as above

    assert reader.view(expected={"orders"}).logs == {PART: Log(7, 7, 7)}

    assert stuck.asked == 1


def test_what_is_not_expected_is_reported_at_once(view: Callable[..., OffsetReader]) -> None:
    unknown, forbidden = Admin(KafkaError.UNKNOWN_TOPIC_OR_PART), Admin(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    forbidden.config = {"sasl.username": "clerk"}

    with pytest.raises(TopicNotFoundError, match=r"option subscribe .*: no such topic at .*: orders; create it"):
        view(unknown).first_view()
    with pytest.raises(MissingRightError, match=r"orders cannot be seen at .*: User:clerk lacks .* Read on topic ord"):
        view(forbidden).first_view()
    with pytest.raises(BrokerConnectionError, match="no Kafka broker answered"):
        view(Admin(KafkaError._TRANSPORT)).first_view()

    assert (unknown.asked, forbidden.asked) == (1, 1)


def test_a_topic_that_may_be_seen_and_not_read_is_reported_before_any_task_is_planned(
    view: Callable[..., OffsetReader],
) -> None:
    seen = Admin(SimpleNamespace(**vars(THERE) | {"authorized_operations": [AclOperation.DESCRIBE]}))
    readable = Admin(
        SimpleNamespace(**vars(THERE) | {"authorized_operations": [AclOperation.READ, AclOperation.DESCRIBE]})
    )

    with pytest.raises(MissingRightError, match=r"--operation Read --topic 'orders'"):
        view(seen).first_view()
    assert list(view(readable).first_view().logs) == [PART]

    # A query that runs keeps its position in it.
    found = view(seen).view(["orders"])
    assert (dict(found.logs), found.is_unknown("orders"), list(found.refused)) == ({}, False, ["orders"])
