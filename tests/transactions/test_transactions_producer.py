"""The producer's core on a real broker: many in flight from one thread, bounds, several messages."""

from __future__ import annotations

import threading
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from transaction_tools import Bench, ops_of

from penstock.errors import (
    BufferFullError,
    ConfigurationError,
    HalfNotStoredError,
    TopicNotFoundError,
    TransactionError,
)
from penstock.transactions import HalfMessage, Outgoing, Submission, TransactionResult, TransactionState
from penstock.transactions.wire.half import decode_half
from penstock.transactions.wire.ops import Author, Verdict
from waiting import wait_until


def test_thousands_of_transactions_are_in_flight_from_one_thread(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()
    bench.counted(coordinator, partitions=2)
    threads = threading.active_count()

    pledges = [producer.submit(bench.topic, key=b"%d" % (n % 50), value=b"%d" % n) for n in range(5_000)]
    most_threads = threading.active_count()
    results = [pledge.result(60) for pledge in pledges]
    bench.settled(coordinator, timeout=180, committed=5_000)

    assert most_threads < threads + 50, "a thread for each transaction?"
    assert {result.state for result in results} == {TransactionState.COMMIT}
    assert [result.transaction_id for result in results] == [pledge.transaction_id for pledge in pledges]
    assert Counter(value for _, value in bench.visible()) == Counter(b"%d" % n for n in range(5_000))
    assert (producer.statistics().committed, producer.statistics().in_flight) == (5_000, 0)


def test_decisions_of_many_transactions_share_op_records_and_keep_their_order(bench: Bench) -> None:
    producer = bench.producer()

    pledges = [producer.submit(bench.topic, key=b"k", value=b"%d" % n) for n in range(2_000)]
    for pledge in pledges:
        pledge.result(60)

    assert [op.transaction_id for op in ops_of(bench)] == [pledge.transaction_id for pledge in pledges]
    assert len(bench.messages(bench.topics.op)) < 2_000


@pytest.mark.parametrize("error", [RuntimeError("a mistake of the user's"), CancelledError()], ids=type)
def test_a_callback_gets_the_end_and_its_exception_does_no_harm(bench: Bench, error: BaseException) -> None:
    producer = bench.producer()
    heard: list[TransactionResult] = []

    def bad(_: Submission) -> None:
        raise error

    first = producer.submit(bench.topic, value=b"1")
    first.add_done_callback(bad)
    first.add_done_callback(lambda pledge: heard.append(pledge.result(0)))
    second = producer.submit(bench.topic, value=b"2")

    assert second.result(60).state is TransactionState.COMMIT
    wait_until(lambda: [result.transaction_id for result in heard] == [first.transaction_id])
    assert not first.cancel()


def test_a_full_buffer_blocks_or_raises_as_chosen(bench: Bench) -> None:
    raising = bench.producer(max_in_flight=1, when_full="raise")
    blocking = bench.producer(max_in_flight=1, send_timeout=30.0)

    with raising.transaction(bench.topic, value=b"first"):
        with pytest.raises(BufferFullError, match="max_in_flight is 1"):
            raising.submit(bench.topic, value=b"second")
        assert raising.statistics().in_flight == 1
    assert raising.submit(bench.topic, value=b"third").result(60).state is TransactionState.COMMIT

    ended: list[TransactionState] = []
    with blocking.transaction(bench.topic, value=b"first"):
        other = threading.Thread(target=lambda: ended.append(blocking.send(bench.topic, value=b"second").state))
        other.start()
        wait_until(lambda: blocking._core._waiting == 1)
        assert ended == []
    other.join(60)
    assert ended == [TransactionState.COMMIT]


def test_many_are_submitted_at_once_and_each_is_a_transaction_of_its_own(bench: Bench) -> None:
    producer = bench.producer()
    bench.coordinator()

    sent = producer.submit_many([Outgoing(bench.topic, b"%d" % number, key=b"k") for number in range(50)])

    ids = [future.result(60).transaction_id for future in sent]
    assert ids == [message.transaction_id for message in sent]
    assert len(set(ids)) == 50
    wait_until(lambda: len(bench.visible()) == 50, 60)
    assert [value for _, value in bench.visible()] == [b"%d" % number for number in range(50)]


def test_nothing_of_many_is_sent_where_one_is_wrong(bench: Bench) -> None:
    producer = bench.producer()
    right, wrong = Outgoing(bench.topic, b"v"), Outgoing("no-such-topic", b"v")

    with pytest.raises(TopicNotFoundError):
        producer.submit_many([right, wrong])
    with pytest.raises(ConfigurationError, match="value"):
        producer.submit_many([right, Outgoing(bench.topic, 7)])

    statistics = producer.statistics()
    assert (statistics.in_flight, statistics.committed) == (0, 0)


def test_of_many_those_without_room_end_with_the_error_and_the_others_commit(bench: Bench) -> None:
    producer = bench.producer(max_in_flight=3, when_full="raise")
    message = Outgoing(bench.topic, b"v")

    with producer.transaction(bench.topic, value=b"open"):
        sent = producer.submit_many([message] * 200)
        errors = [one.exception(60) for one in sent]

    full = [error for error in errors if error is not None]
    assert full
    assert all(isinstance(error, BufferFullError) for error in full)
    assert errors[:2] == [None, None]
    assert producer.statistics().committed == 1 + errors.count(None)


def test_several_messages_share_one_id_one_half_partition_and_one_decision(
    bench: Bench, new_topic: Callable[..., str]
) -> None:
    producer, other = bench.producer(), new_topic()
    messages = [
        Outgoing(bench.topic, b"1", b"a"),
        Outgoing(other, b"2", b"b"),
        Outgoing(bench.topic, "3", "c", headers={"h": b"x"}),
    ]

    with producer.transaction_of(messages) as tx:
        records = bench.messages(bench.topics.half)

    halves = [decode_half(r.key(), r.value(), r.headers()) for r in records]
    assert [(half.part, half.topic, half.value) for half in halves] == [
        ((1, 3), bench.topic, b"1"),
        ((2, 3), other, b"2"),
        ((3, 3), bench.topic, b"3"),
    ]
    assert {half.transaction_id for half in halves} == {tx.transaction_id}
    assert {record.partition() for record in records} == {bench.topics.half_partition(b"a")}
    (decision,) = ops_of(bench)
    assert (decision.transaction_id, decision.verdict) == (tx.transaction_id, Verdict.COMMIT)
    assert decision.half_offsets == tuple(record.offset() for record in records)


def test_several_messages_are_ordered_by_the_key_that_was_given_for_them(bench: Bench) -> None:
    producer = bench.producer()
    messages = [Outgoing(bench.topic, b"1", b"a"), Outgoing(bench.topic, b"2", b"b")]

    with producer.transaction_of(messages, ordering_key=b"z") as tx:
        stored = bench.messages(bench.topics.half)
        tx.rollback()
    with pytest.raises(ConfigurationError, match="1 to 1000 messages"):
        producer.transaction_of([])

    assert {record.partition() for record in stored} == {bench.topics.half_partition(b"z")}
    assert [op.verdict for op in ops_of(bench)] == [Verdict.ROLLBACK]


def test_half_order_and_delivery_time_are_written_into_the_half(bench: Bench) -> None:
    by_half, by_commit = bench.producer(order="half"), bench.producer()
    at = datetime.now(UTC) + timedelta(hours=1)

    by_half.send(bench.topic, key=b"account", value=b"1")
    by_half.send(bench.topic, value=b"2")
    by_commit.send(bench.topic, value=b"3", deliver_at=at)
    by_commit.send(bench.topic, value=b"4", deliver_at=at.timestamp())

    halves = {r.value(): decode_half(r.key(), r.value(), r.headers()) for r in bench.messages(bench.topics.half)}
    assert (halves[b"1"].order_key, halves[b"2"].order_key) == (b"account", None)
    assert halves[b"3"].deliver_at_ms == halves[b"4"].deliver_at_ms == int(at.timestamp() * 1000)


def test_many_threads_share_one_producer_and_every_message_is_visible_once(bench: Bench) -> None:
    outcomes = [TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.COMMIT, TransactionState.UNKNOWN]

    def check(half: HalfMessage) -> TransactionState:
        # A decision that takes its time may be overtaken by a check, which then has to say the same.
        return TransactionState.ROLLBACK if int(half.value or b"") % 4 == 1 else TransactionState.COMMIT

    coordinator, producer = bench.coordinator(), bench.producer(check=check)

    def send(number: int) -> None:
        state = outcomes[number % 4]
        producer.send(bench.topic, key=b"%d" % (number % 10), value=b"%d" % number, execute=lambda _: state)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(send, range(200)))
    bench.settled(coordinator, committed=150, rolled_back=50)

    seen = Counter(value for _, value in bench.visible())
    assert seen == Counter(b"%d" % number for number in range(200) if number % 4 != 1)
    assert producer.statistics().in_flight == 0


def test_a_result_is_what_was_stored_and_there_is_none_before(bench: Bench) -> None:
    producer = bench.producer()
    transaction = producer.transaction(bench.topic, value=b"v")

    with pytest.raises(TransactionError, match="cannot be left: its half is not stored"):
        transaction.__exit__(None, None, None)
    with pytest.raises(TransactionError, match="has no result"):
        _ = transaction.result
    with transaction, pytest.raises(TransactionError, match="not left yet"):
        _ = transaction.result
    for late in (transaction.rollback, transaction.unknown):
        with pytest.raises(TransactionError, match="its decision can no longer be changed"):
            late()

    assert transaction.result.state is TransactionState.COMMIT


@pytest.mark.usefixtures("logs_are_kept")
def test_where_a_half_is_not_stored_the_local_transaction_does_not_run_and_a_rollback_follows(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()
    ran: list[str] = []

    with pytest.raises(HalfNotStoredError, match="did not run"):
        producer.send(bench.topic, value=bytes(2_000_000), execute=lambda tx: ran.append(tx.transaction_id))
    with (
        pytest.raises(HalfNotStoredError, match="did not run"),
        producer.transaction_of([Outgoing(bench.topic, b"small"), Outgoing(bench.topic, bytes(2_000_000))]),
    ):
        ran.append("the second")
    # The first half of the second is stored; of neither is it known to the client that it is not.
    bench.settled(coordinator, rolled_back=1)

    assert ran == []
    assert {(op.verdict, op.author) for op in ops_of(bench)} == {(Verdict.ROLLBACK, Author.PRODUCER)}
    assert bench.visible() == []
