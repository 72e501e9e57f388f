"""Listeners, and RocketMQ 3.x's two interfaces: thin layers with RocketMQ's own rule for what is no answer."""

from __future__ import annotations

from typing import Any

import pytest
from transaction_tools import Bench

from penstock.errors import ConfigurationError
from penstock.transactions import HalfMessage, Outgoing, TransactionalProducer, TransactionState


class Orders:
    """A listener that answers by what is asked of it, and notes what it saw."""

    def __init__(self, answer: object = TransactionState.COMMIT) -> None:
        self.answer = answer
        self.seen: list[tuple[HalfMessage, object]] = []
        self.checked: list[HalfMessage] = []

    def execute_local_transaction(self, message: HalfMessage, argument: object) -> TransactionState | None:
        self.seen.append((message, argument))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value] # a wrong one is the point of a test

    execute_local_transaction_branch = execute_local_transaction

    def check_local_transaction(self, half: HalfMessage) -> TransactionState:
        self.checked.append(half)
        return TransactionState.COMMIT

    check_local_transaction_state = check_local_transaction


def test_a_listener_runs_the_local_transaction_with_the_id_and_the_argument(bench: Bench) -> None:
    listener = Orders()
    coordinator, producer = bench.coordinator(), bench.producer(listener=listener)

    result = producer.send_in_transaction(Outgoing(bench.topic, b"v", b"k", {"h": b"1"}), 42)
    bench.settled(coordinator, committed=1)

    assert listener.seen == [(HalfMessage(bench.topic, b"k", b"v", (("h", b"1"),), result.transaction_id, 0), 42)]
    assert result.state is TransactionState.COMMIT
    assert bench.visible() == [(b"k", b"v")]


def test_a_listener_that_rolls_back_shows_nothing(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer(listener=Orders(TransactionState.ROLLBACK))

    result = producer.send_in_transaction(Outgoing(bench.topic, b"v"))
    bench.settled(coordinator, rolled_back=1)

    assert result.state is TransactionState.ROLLBACK
    assert bench.visible() == []


@pytest.mark.parametrize("answer", [RuntimeError("no database"), None, "commit"], ids=["raises", "none", "nonsense"])
def test_a_listener_that_raises_or_gives_no_answer_is_unknown(bench: Bench, answer: object) -> None:
    listener = Orders(answer)
    coordinator, producer = bench.coordinator(), bench.producer(listener=listener)

    result = producer.send_in_transaction(Outgoing(bench.topic, b"v"))
    bench.settled(coordinator, committed=1)

    assert result.state is TransactionState.UNKNOWN
    assert {half.transaction_id for half in listener.checked} == {result.transaction_id}
    assert bench.visible() == [(None, b"v")]


def test_rocketmq_3_style_takes_an_executor_per_call_and_a_check_listener(bench: Bench) -> None:
    checks, commits, undecided = Orders(), Orders(), Orders(None)
    coordinator, producer = bench.coordinator(), bench.producer(check_listener=checks)

    first = producer.send_in_transaction(Outgoing(bench.topic, b"1"), "a", executor=commits)
    second = producer.send_in_transaction(Outgoing(bench.topic, b"2"), "b", executor=undecided)
    bench.settled(coordinator, committed=2)

    assert [argument for _, argument in commits.seen + undecided.seen] == ["a", "b"]
    assert (first.state, second.state) == (TransactionState.COMMIT, TransactionState.UNKNOWN)
    assert {half.transaction_id for half in checks.checked} == {second.transaction_id}
    assert sorted(value or b"" for _, value in bench.visible()) == [b"1", b"2"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"check": lambda _: TransactionState.COMMIT, "listener": Orders()}, "one of check"),
        ({"listener": Orders(), "check_listener": Orders()}, "one of check"),
        ({"order": "key"}, "order"),
        ({"wait": "forever"}, "wait"),
        ({"when_full": "drop"}, "when_full"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"publish_timeout": 0}, "publish_timeout"),
        ({"bootstrap_servers": None}, "bootstrap_servers or a store"),
    ],
)
def test_options_that_cannot_be_are_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        TransactionalProducer("orders", **{"bootstrap_servers": "127.0.0.1:9", **options})


def test_a_send_in_transaction_without_a_local_transaction_is_told() -> None:
    producer = TransactionalProducer("orders", bootstrap_servers="127.0.0.1:9")

    with pytest.raises(ConfigurationError, match="needs a listener"):
        producer.send_in_transaction(Outgoing("orders", b"v"))
