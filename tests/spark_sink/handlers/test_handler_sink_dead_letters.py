"""A task without Spark: what it gives up, as dead letters or as its own failure."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError
from handler_rows import ONCE, Row, failing, quickly, run_task

from penstock.clients.rights import MissingRightError
from penstock.consumer import DeadLetterLimit, handler
from penstock.errors import SinkError
from penstock.spark_sink.sinks.handlers import task as task_module


class FakeProducer:
    """Takes what is produced; refuses what it is told to."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.sent: list[tuple[str, bytes | None, bytes | None, dict[str, Any]]] = []
        self.error: KafkaError | None = None
        self._told: list[Callable[..., None]] = []

    def produce(self, topic: str, value: bytes, key: bytes, *, headers: Any, on_delivery: Callable[..., None]) -> None:
        self.sent.append((topic, key, value, dict(headers)))
        self._told.append(on_delivery)

    def poll(self, _timeout: float = 0) -> int:
        return 0

    def flush(self, _timeout: float) -> int:
        while self._told:
            self._told.pop()(self.error, None)
        return 0


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> FakeProducer:
    one = FakeProducer()

    def connect(config: dict[str, Any]) -> FakeProducer:
        one.config = config
        return one

    monkeypatch.setattr(task_module, "_producer", connect)
    return one


def test_dead_letters_are_on_the_broker_before_the_task_reports_and_tell_where_they_come_from(
    producer: FakeProducer,
) -> None:
    report = run_task(
        [Row(b"a", 5, headers=[("trace", b"1")], value=b"body"), Row(b"a", 6)],
        {"orders": handler(failing, retry_policy=quickly(2), on_failure="dead_letter")},
        producer={"bootstrap.servers": "there"},
    )

    (topic, key, value, headers), second = producer.sent
    assert report.dead_letters == 2
    assert (topic, key, value) == ("dlq.orders", b"a", b"body")
    assert headers["trace"] == b"1"
    assert [
        headers[f"__dlq.errors.{name}"] for name in ("topic", "partition", "offset", "group", "delivery.count")
    ] == [*(b"orders", b"0", b"5", b"billing", b"2")]
    assert headers["__dlq.errors.message"] == b"no use for 5"
    assert headers["penstock-exception-class"] == b"builtins.ValueError"
    assert second[3]["__dlq.errors.offset"] == b"6"
    assert producer.config == {"bootstrap.servers": "there"}


@pytest.mark.parametrize(
    ("code", "kind", "sentence"),
    [
        (
            KafkaError._MSG_TIMED_OUT,
            SinkError,
            "dead letters could not be written: dlq.orders: .*the batch comes again",
        ),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, MissingRightError, "dlq.orders.*--operation Write"),
        # Once it was written with less.
        (KafkaError.MSG_SIZE_TOO_LARGE, SinkError, "dlq.orders does not take it.*the batch comes again: raise max"),
    ],
)
def test_a_dead_letter_that_the_broker_refuses_fails_the_task_so_that_nothing_is_lost(
    producer: FakeProducer, code: int, kind: type[Exception], sentence: str
) -> None:
    producer.error = KafkaError(code)

    with pytest.raises(kind, match=sentence):
        run_task([Row(b"a", 5)], {"orders": handler(failing, retry_policy=ONCE, on_failure="dead_letter")})


def test_what_a_handler_raised_is_told_by_its_kind_and_place_without_its_text() -> None:
    with pytest.raises(SinkError, match=r"last with ValueError \(handler_rows.py line \d+, failing\)") as told:
        run_task([Row(b"a", 5)], {"orders": handler(failing, retry_policy=ONCE)})

    # What Spark writes down: the error with all that is chained to it and shown.
    assert "no use for 5" not in "".join(traceback.format_exception(told.value))


def test_a_task_that_loses_everything_is_stopped_by_the_limit(producer: FakeProducer) -> None:
    with pytest.raises(SinkError, match=r"3 messages were given up in a row .* orders\[0\]@3 is not given up"):
        run_task(
            [Row(b"k%d" % n, n) for n in range(9)],
            {"orders": handler(failing, retry_policy=ONCE, on_failure="dead_letter")},
            dead_letter_limit=DeadLetterLimit(consecutive=3),
        )

    assert len(producer.sent) == 3
