"""The producer's core on a real broker: many in flight from one thread, bounds, several messages, healing."""

from __future__ import annotations

import threading
import time
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from transaction_tools import Bench, unknown

from kafka_tools import STEADY
from penstock.devbroker import DevBroker
from penstock.errors import (
    BufferFullError,
    ConfigurationError,
    DecisionNotStoredError,
    HalfNotStoredError,
    TopicNotFoundError,
    TransactionError,
)
from penstock.transactions import HalfMessage, Outgoing, TransactionResult, TransactionState
from penstock.transactions.producer.flight.futures import ResultFuture
from penstock.transactions.producer.flight.in_flight import InFlightLimit
from penstock.transactions.wire.half import decode_half
from penstock.transactions.wire.ops import Op, Verdict, decode_ops
from waiting import wait_until


def ops_of(bench: Bench) -> list[Op]:
    """Return the decisions in the op log, in their order within each half partition."""
    records = sorted(bench.messages(bench.topics.op), key=lambda record: (record.partition(), record.offset()))
    return [op for record in records for op in decode_ops(record.value()) if op.verdict is not Verdict.TICK]


@pytest.fixture(scope="module")
def suspendable() -> Iterator[DevBroker]:
    """A broker that the tests of this file may suspend."""
    with DevBroker(config=STEADY, start_timeout=150) as broker:
        yield broker


@pytest.fixture
def its_bench(suspendable: DevBroker, topic_numbers: Iterator[int]) -> Iterator[Bench]:
    """A store on that broker."""
    topic = f"orders-{next(topic_numbers)}"
    suspendable.create_topic(topic)
    made = Bench(suspendable.bootstrap_servers, topic, 1)
    yield made
    made.close()


def test_thousands_of_transactions_are_in_flight_from_one_thread(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()
    bench.counted(coordinator, partitions=2)
    threads = threading.active_count()

    pledges = [producer.submit(bench.topic, key=b"%d" % (n % 50), value=b"%d" % n) for n in range(5_000)]
    most_threads = threading.active_count()
    results = [pledge.result(60) for pledge in pledges]
    bench.settled(coordinator, committed=5_000)

    assert most_threads <= threads + 1
    assert {result.state for result in results} == {TransactionState.COMMIT}
    assert [result.transaction_id for result in results] == [pledge.transaction_id for pledge in pledges]
    assert Counter(value for _, value in bench.visible()) == Counter(b"%d" % n for n in range(5_000))
    assert (producer.statistics().committed, producer.statistics().in_flight) == (5_000, 0)


def test_a_check_that_hangs_is_given_up_after_the_producers_own_time_and_its_late_answer_counts(bench: Bench) -> None:
    let_go = threading.Event()

    def check(_: HalfMessage) -> TransactionState:
        let_go.wait()
        return TransactionState.COMMIT

    coordinator = bench.coordinator()
    producer = bench.producer(check=check, check_workers=1, check_timeout=0.2)
    producer.send(bench.topic, value=b"v", execute=unknown)

    wait_until(lambda: producer.statistics().hung_checks > 0)
    let_go.set()

    bench.settled(coordinator, committed=1)
    assert bench.visible() == [(None, b"v")]


def test_decisions_of_many_transactions_share_op_records_and_keep_their_order(bench: Bench) -> None:
    producer = bench.producer()

    pledges = [producer.submit(bench.topic, key=b"k", value=b"%d" % n) for n in range(2_000)]
    for pledge in pledges:
        pledge.result(60)

    assert [op.transaction_id for op in ops_of(bench)] == [pledge.transaction_id for pledge in pledges]
    assert len(bench.messages(bench.topics.op)) < 2_000


@pytest.mark.parametrize("error", [RuntimeError("a mistake of the user's"), CancelledError()], ids=type)
def test_a_callback_hears_of_the_end_and_what_it_raises_harms_nobody(bench: Bench, error: BaseException) -> None:
    producer = bench.producer()
    heard: list[TransactionResult] = []

    def bad(_: ResultFuture[TransactionResult]) -> None:
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
        wait_until(lambda: blocking._core.in_flight._waiting == 1)
        assert ended == []
    other.join(60)
    assert ended == [TransactionState.COMMIT]


def test_the_bytes_in_flight_are_bounded_and_one_alone_may_have_more() -> None:
    room = InFlightLimit(10, 100, timeout_s=0)

    room.enter(500)
    with pytest.raises(BufferFullError, match="500 bytes"):
        room.enter(1)
    room.leave(500)
    room.enter(60)
    with pytest.raises(BufferFullError, match="max_in_flight_bytes 100"):
        room.enter(41)
    room.enter(40)

    assert (room.count, room.bytes) == (2, 100)


def test_room_that_never_comes_is_told_after_the_time_to_wait() -> None:
    room = InFlightLimit(1, 100, timeout_s=0.05)
    room.enter(1)

    with pytest.raises(BufferFullError, match="1 transactions"):
        room.enter(1)

    room.leave(1)
    room.enter(1)


def test_many_are_submitted_at_once_and_each_is_a_transaction_of_its_own(bench: Bench) -> None:
    producer = bench.producer()
    bench.coordinator()

    sent = producer.submit_many([Outgoing(bench.topic, b"%d" % number, key=b"k") for number in range(50)])

    ids = [one.result(60).transaction_id for one in sent]
    assert ids == [one.transaction_id for one in sent]
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

    with producer.transaction_of() as tx:
        tx.add(bench.topic, key=b"a", value=b"1")
        tx.add(other, key=b"b", value=b"2")
        tx.add(bench.topic, key="c", value="3", headers={"h": b"x"})
        tx.prepare()
        with pytest.raises(TransactionError, match="is prepared"):
            tx.add(bench.topic, value=b"4")

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


def test_messages_given_beforehand_are_stored_on_entering_under_the_ordering_key(bench: Bench) -> None:
    producer = bench.producer()
    messages = [Outgoing(bench.topic, b"1", b"a"), Outgoing(bench.topic, b"2", b"b")]

    with producer.transaction_of(messages, ordering_key=b"z") as tx:
        stored = bench.messages(bench.topics.half)
        tx.rollback()

    assert [record.value() for record in stored] == [b"1", b"2"]
    assert {record.partition() for record in stored} == {bench.topics.half_partition(b"z")}
    assert [op.verdict for op in ops_of(bench)] == [Verdict.ROLLBACK]


def test_a_block_that_never_prepares_its_messages_is_told_so(bench: Bench) -> None:
    producer = bench.producer()

    with pytest.raises(TransactionError, match="never prepared"), producer.transaction_of() as tx:
        tx.add(bench.topic, value=b"1")
    with pytest.raises(RuntimeError, match="own"), producer.transaction_of() as tx:
        raise RuntimeError("its own error")
    with pytest.raises(ConfigurationError, match="1 to 1000 messages"), producer.transaction_of() as tx:
        tx.prepare()

    assert bench.messages(bench.topics.half) == []


def test_one_of_three_halves_not_stored_rolls_back_all(bench: Bench) -> None:
    producer, ran = bench.producer(), []
    sizes = (10, 2_000_000, 10)

    with (
        pytest.raises(HalfNotStoredError, match="did not run"),
        producer.transaction_of([Outgoing(bench.topic, bytes(size), b"k") for size in sizes]),
    ):
        ran.append(1)

    assert ran == []
    wait_until(lambda: ops_of(bench))
    (rollback,) = ops_of(bench)
    assert (rollback.verdict, rollback.half_offsets) == (Verdict.ROLLBACK, ())
    assert (producer.statistics().failed, producer.statistics().in_flight) == (1, 0)


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


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"check_immunity": float("inf")}, "check_immunity"),
        ({"check_immunity": float("nan")}, "check_immunity"),
        ({"partition": "a"}, "partition"),
        ({"partition": True}, "partition"),
        ({"key": "\ud800"}, "key"),
        ({"value": "\udfff"}, "value"),
        ({"headers": {"\ud800": b""}}, "header"),
        ({"deliver_at": "tomorrow"}, "deliver_at"),
        ({"deliver_at": datetime(2030, 1, 1)}, "time zone"),  # noqa: DTZ001 - that is the point
        ({"deliver_at": float("inf")}, "deliver_at"),
        ({"wait": "long"}, "wait"),
    ],
)
def test_arguments_that_cannot_be_are_told_as_such(bench: Bench, wrong: dict[str, Any], told: str) -> None:
    producer = bench.producer()

    with pytest.raises(ConfigurationError, match=told):
        producer.send(bench.topic, **{"value": b"v", **wrong})


def test_a_delayed_message_cannot_hold_a_key(bench: Bench) -> None:
    with pytest.raises(ConfigurationError, match='order="half"'):
        bench.producer(order="half").send(bench.topic, key=b"k", value=b"v", deliver_at=time.time() + 60)


def test_a_fatal_client_error_is_healed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = bench.producer()
    producer.send(bench.topic, value=b"before")
    sends = producer._store._sends  # type: ignore[attr-defined] # the store is Kafka's
    broken = sends._clients.client

    class Broken:
        """A client that a fatal error ended: it refuses all, for good."""

        def __getattr__(self, name: str) -> Any:
            return getattr(broken, name)

        def produce(self, *_: Any, **__: Any) -> None:
            fired.append(1)
            raise KafkaException(KafkaError(KafkaError._FATAL, "out of order", fatal=True))

    fired: list[int] = []
    monkeypatch.setattr(sends._clients, "client", Broken())

    producer.send(bench.topic, value=b"after")

    assert fired == [1]
    assert sends._clients.client is not broken
    assert [op.verdict for op in ops_of(bench)] == [Verdict.COMMIT] * 2


def test_a_transaction_whose_decision_is_lost_says_so_and_takes_no_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = bench.producer(check=lambda _: TransactionState.COMMIT)
    producer.send(bench.topic, value=b"warm")
    refused: list[int] = []

    def refuse(*_: Any) -> bool:
        refused.append(1)
        raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "no"))

    monkeypatch.setattr(producer._store._sends, "try_post", refuse)  # type: ignore[attr-defined] # the store is Kafka's
    with pytest.raises(DecisionNotStoredError, match="will settle it"):
        producer.send(bench.topic, value=b"v")

    assert refused == [1]
    assert (producer.statistics().in_flight, producer.statistics().failed) == (0, 1)


def test_a_transaction_that_is_open_at_the_stop_is_left_to_a_check_and_does_not_hang(bench: Bench) -> None:
    producer = bench.producer()

    with (
        pytest.raises(DecisionNotStoredError, match="was stopped"),
        producer.transaction(bench.topic, value=b"v"),
    ):
        producer.stop()

    assert (producer.statistics().in_flight, producer.statistics().failed) == (0, 1)
    coordinator = bench.coordinator()
    bench.producer(check=lambda _: TransactionState.COMMIT)
    bench.settled(coordinator, committed=1)


def test_what_is_not_acknowledged_at_the_stop_is_told_as_not_stored(suspendable: DevBroker, its_bench: Bench) -> None:
    producer = its_bench.producer()
    producer.send(its_bench.topic, value=b"first")

    suspendable.suspend()
    try:
        pledges = [producer.submit(its_bench.topic, value=b"%d" % number) for number in range(100)]
        producer.stop(0.2)
        errors = {type(pledge.exception(60)) for pledge in pledges}
    finally:
        suspendable.resume()

    assert errors == {HalfNotStoredError}
    assert producer.statistics().in_flight == 0


def test_a_half_that_is_not_acknowledged_in_time_does_not_run_the_local_transaction(
    suspendable: DevBroker, its_bench: Bench
) -> None:
    ran: list[object] = []
    # After the broker goes on there is as much time to store the rollback of a half that was stored after all.
    producer = its_bench.producer(send_timeout=10.0)
    producer.send(its_bench.topic, value=b"first")

    suspendable.suspend()
    try:
        with pytest.raises(HalfNotStoredError, match="did not run"):
            producer.send(its_bench.topic, value=b"second", execute=ran.append)
    finally:
        suspendable.resume()
    coordinator = its_bench.coordinator()
    its_bench.settled(coordinator, committed=1)

    assert ran == []
    assert producer.statistics().failed == 1
    assert its_bench.visible() == [(None, b"first")]


def test_a_callback_that_finds_no_room_is_told_and_does_not_wait(bench: Bench) -> None:
    producer = bench.producer(max_in_flight=1, send_timeout=60.0)
    told: list[type[Exception]] = []

    def submit_another(_: ResultFuture[TransactionResult]) -> None:
        # The decision of the first is handed over, but this very thread has to hear that it is stored.
        try:
            producer.submit(bench.topic, value=b"another")
        except BufferFullError as error:
            told.append(type(error))

    producer.send(bench.topic, value=b"warm")
    prepare, held = producer._store.prepare, []
    producer._store.prepare = lambda *arguments: held.append(arguments)  # type: ignore[method-assign] # to be first
    pledge = producer.submit(bench.topic, value=b"one", wait="sent")
    pledge.add_done_callback(submit_another)
    producer._store.prepare = prepare  # type: ignore[method-assign] # as it was
    prepare(*held[0])
    wait_until(lambda: told == [BufferFullError])
    wait_until(lambda: producer.statistics().in_flight == 0)
