"""Every store, below the producer that users meet: what each end of a local transaction comes to."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from conformance.store_cases import BUT_SQL, StoreBench, settled

from penstock.outgoing import Outgoing
from penstock.transactions import HalfMessage, Transaction, TransactionState

pytestmark = BUT_SQL

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN


class Listener:
    """A local transaction with a given end: a state, an exception to raise, or anything else."""

    def __init__(self, check: Callable[[HalfMessage], TransactionState]) -> None:
        self.check_local_transaction = check

    def execute_local_transaction(self, message: HalfMessage, argument: object) -> TransactionState | None:
        assert message.check_count == 0
        if isinstance(argument, Exception):
            raise argument
        return argument  # type: ignore[return-value] # a wrong one is the point


def test_each_end_of_a_local_transaction_is_what_is_stored_and_what_is_unknown_is_asked_about(
    store_bench: StoreBench,
) -> None:
    topic, asked = store_bench.topic, list[bytes | None]()

    def check(half: HalfMessage) -> TransactionState:
        asked.append(half.value)
        return ROLLBACK if half.value == b"unknown, then no" else COMMIT

    def sent(value: bytes, state: TransactionState) -> TransactionState:
        return producer.send(topic, value=value, execute=lambda _: state).state

    def listened(value: bytes, argument: object) -> TransactionState:
        return producer.send_in_transaction(Outgoing(topic, value, b"k"), argument).state

    def left(value: bytes, error: type[BaseException]) -> TransactionState:
        with contextlib.suppress(error), producer.transaction(topic, value=value) as transaction:
            raise error
        return transaction.result.state

    with store_bench.producer(listener=Listener(check)) as producer:
        states = [sent(b"commit", COMMIT), sent(b"rollback", ROLLBACK), sent(b"unknown", UNKNOWN)]
        states += [listened(b"listener commits", COMMIT), listened(b"listener rolls back", ROLLBACK)]
        states += [listened(b"listener raises", RuntimeError("no stock")), listened(b"listener says nothing", None)]
        sent(b"unknown, then no", UNKNOWN)
        states += [left(b"raised", RuntimeError), left(b"interrupted", KeyboardInterrupt)]
        with producer.transaction(topic, value=b"rolled back inside") as transaction:
            transaction.rollback()
        # Not before: no check is sent while a transaction is being decided.
        statistics = settled(store_bench.coordinator(), committed=6, rolled_back=5)

    assert states == [COMMIT, ROLLBACK, UNKNOWN, COMMIT, ROLLBACK, UNKNOWN, UNKNOWN, ROLLBACK, UNKNOWN]
    unknown = [b"unknown", b"listener raises", b"listener says nothing", b"interrupted"]
    assert set(asked) == {*unknown, b"unknown, then no"}
    assert (statistics.committed, statistics.rolled_back, statistics.discarded) == (6, 5, 0)
    assert Counter(store_bench.seen()) == Counter([b"commit", b"listener commits", *unknown])
    # What rolls back was never written and then aborted.
    assert len(store_bench.messages(committed_only=False)) == 6


def test_published_is_reported_only_after_a_committed_reader_sees_it(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator()

    with store_bench.producer(wait="published", publish_timeout=120) as producer:
        for number in range(3):
            producer.send(store_bench.topic, key=b"k", value=b"%d" % number)
            assert store_bench.seen()[-1] == b"%d" % number
        with producer.transaction(store_bench.topic, key=b"k", value=b"in a block"):
            pass
        assert store_bench.seen()[-1] == b"in a block"
        for pledge in [producer.submit(store_bench.topic, value=b"submitted") for _ in range(20)]:
            pledge.result(120)
        assert len(store_bench.seen()) == 24

        def rolls_back(_: Transaction) -> TransactionState:
            return ROLLBACK

        assert producer.send(store_bench.topic, value=b"no", execute=rolls_back).state is ROLLBACK
        settled(coordinator, committed=24, rolled_back=1)


@pytest.mark.parametrize("order", ["commit", "half"])
def test_the_order_of_a_key_is_that_of_decisions_or_that_of_sending(store_bench: StoreBench, order: Any) -> None:
    coordinator = store_bench.coordinator(transaction_timeout=600.0)

    with store_bench.producer(order=order) as producer:
        with producer.transaction(store_bench.topic, key=b"k", value=b"first"):
            for number in range(5):
                producer.send(store_bench.topic, key=b"k", value=b"%d" % number)
        settled(coordinator, committed=6)

    later = [b"%d" % number for number in range(5)]
    assert store_bench.seen() == ([*later, b"first"] if order == "commit" else [b"first", *later])
