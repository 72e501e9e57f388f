"""Listeners, and executors of a call: thin layers with RocketMQ's own rule for a missing answer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from transaction_tools import Bench

from penstock.errors import ConfigurationError
from penstock.transactions import HalfMessage, Outgoing, TransactionalProducer, TransactionState
from penstock.transactions.wire.half import decode_half


class Orders:
    """A listener whose arguments are its answers; it records its calls."""

    def __init__(self, answer: object = TransactionState.COMMIT) -> None:
        self.answer = answer
        self.seen: list[tuple[HalfMessage, object]] = []
        self.checked: list[HalfMessage] = []

    def execute_local_transaction(self, message: HalfMessage, argument: object) -> TransactionState | None:
        self.seen.append((message, argument))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value] # a wrong one is the point of a test

    def check_local_transaction(self, half: HalfMessage) -> TransactionState:
        self.checked.append(half)
        return TransactionState.COMMIT


def test_a_listener_runs_the_local_transaction_with_the_id_and_the_argument(bench: Bench) -> None:
    listener = Orders()
    coordinator, producer = bench.coordinator(), bench.producer(listener=listener)

    result = producer.send_in_transaction(Outgoing(bench.topic, b"v", b"k", {"h": b"1"}), 42)
    bench.settled(coordinator, committed=1)

    assert listener.seen == [(HalfMessage(bench.topic, b"k", b"v", (("h", b"1"),), result.transaction_id, 0), 42)]
    assert result.state is TransactionState.COMMIT
    assert bench.visible() == [(b"k", b"v")]


def test_an_executor_may_be_a_plain_function_of_the_message_and_the_argument(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()
    seen: list[tuple[str, object]] = []

    def local(message: HalfMessage, argument: object) -> TransactionState:
        seen.append((message.transaction_id, argument))
        return TransactionState.COMMIT

    sent = producer.send_in_transaction(Outgoing(bench.topic, b"v"), "a", executor=local)
    bench.settled(coordinator, committed=1)

    assert (seen, sent.state) == ([(sent.transaction_id, "a")], TransactionState.COMMIT)


@pytest.mark.parametrize("executor", [object(), "local", 7])
def test_an_executor_that_cannot_be_called_is_refused_before_anything_is_sent(executor: Any) -> None:
    producer = TransactionalProducer("orders", bootstrap_servers="127.0.0.1:9")

    with pytest.raises(ConfigurationError, match="executor must be"):
        producer.send_in_transaction(Outgoing("orders", b"v"), executor=executor)


@pytest.mark.usefixtures("logs_are_kept")
@pytest.mark.parametrize("style", ["listener", pytest.param("executor", marks=pytest.mark.thorough)])
def test_a_send_in_transaction_takes_an_immunity_a_time_and_what_to_wait_for(bench: Bench, style: str) -> None:
    local, checks = Orders(None), Orders()
    executor = local.execute_local_transaction if style == "executor" else None
    producer = bench.producer(**({"check": checks.check_local_transaction} if executor else {"listener": local}))
    checked = checks if executor else local
    coordinator = bench.coordinator()

    immune = producer.send_in_transaction(Outgoing(bench.topic, b"immune"), executor=executor, check_immunity=600)
    other = producer.send_in_transaction(Outgoing(bench.topic, b"other"), executor=executor)
    bench.counted(coordinator, committed=1)
    # A check that is slow to be answered is sent again.
    assert {half.transaction_id for half in checked.checked} == {other.transaction_id}

    local.answer = TransactionState.COMMIT
    later = datetime.now(UTC) + timedelta(hours=1)
    producer.send_in_transaction(Outgoing(bench.topic, b"late"), executor=executor, deliver_at=later)
    producer.send_in_transaction(Outgoing(bench.topic, b"seen"), executor=executor, wait="published")
    assert {value for _, value in bench.visible()} == {b"other", b"seen"}
    halves = {m.value(): decode_half(m.key(), m.value(), m.headers()) for m in bench.messages(bench.topics.half)}
    assert halves[b"immune"].transaction_id == immune.transaction_id
    assert (halves[b"immune"].immunity_ms, halves[b"other"].immunity_ms) == (600_000, None)
    assert halves[b"late"].deliver_at_ms == int(later.timestamp() * 1000)


def test_the_immunity_of_a_transaction_of_several_messages_is_that_of_all_of_them(bench: Bench) -> None:
    producer, messages = bench.producer(), [Outgoing(bench.topic, b"1"), Outgoing(bench.topic, b"2", "k")]

    with producer.transaction_of(messages, check_immunity=600):
        pass

    stored = [decode_half(m.key(), m.value(), m.headers()) for m in bench.messages(bench.topics.half)]
    assert [half.immunity_ms for half in stored] == [600_000, 600_000]


def test_a_send_in_transaction_without_a_local_transaction_is_reported() -> None:
    producer = TransactionalProducer("orders", bootstrap_servers="127.0.0.1:9")

    with pytest.raises(ConfigurationError, match="needs a listener"):
        producer.send_in_transaction(Outgoing("orders", b"v"))
