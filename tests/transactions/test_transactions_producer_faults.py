"""The producer on a real broker that fails: healing, lost answers, no room, and the end of the producer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from transaction_tools import Bench, ops_of, unknown

from kafka_proxy import PRODUCE, KafkaProxy, What
from penstock.errors import (
    BufferFullError,
    DecisionNotStoredError,
    HalfNotStoredError,
)
from penstock.transactions import HalfMessage, Submission, TransactionState
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until


@pytest.mark.thorough
def test_a_check_that_hangs_delays_no_other_and_its_late_answer_counts(bench: Bench) -> None:
    let_go = threading.Event()

    def check(half: HalfMessage) -> TransactionState:
        if half.value == b"hangs":
            let_go.wait()
        return TransactionState.COMMIT

    coordinator = bench.coordinator()
    producer = bench.producer(check=check, check_workers=1, check_timeout=0.2)
    producer.send(bench.topic, value=b"hangs", execute=unknown)
    wait_until(lambda: producer.statistics().hung_checks > 0)
    for number in range(5):
        producer.send(bench.topic, value=b"%d" % number, execute=unknown)
    assert bench.counted(coordinator, committed=5).pending == 1
    let_go.set()

    bench.settled(coordinator, committed=6)
    assert len(bench.visible()) == 6


def test_a_fatal_client_error_is_healed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = bench.producer()
    producer.send(bench.topic, value=b"before")
    sends = producer._core.store._sends  # type: ignore[attr-defined] # the store is Kafka's
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


@pytest.mark.parametrize("is_sent", [False, True])
def test_an_interrupt_while_a_decision_is_sent_blocks_no_later_decision(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_sent: bool
) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()
    producer.send(bench.topic, value=b"warm")
    store: Any = producer._core.store
    sends = store._sends
    try_post, fired = sends.try_post, list[int]()

    def interrupted(*place: Any, **record: Any) -> Any:
        if place[0].endswith(".op") and len(fired) < 3 and threading.get_ident() != sends.delivering:
            fired.append(try_post(*place, **record) if is_sent else 0)
            raise KeyboardInterrupt
        return try_post(*place, **record)

    monkeypatch.setattr(sends, "try_post", interrupted)
    for number in range(3):
        with pytest.raises(KeyboardInterrupt), producer.transaction(bench.topic, key=b"k", value=b"%d" % number):
            wait_until(lambda: not store._records.unanswered)
    producer.transaction(bench.topic, key=b"k", value=b"after").__enter__().__exit__(None, None, None)

    assert len(fired) == 3
    assert producer.statistics().in_flight == 0
    bench.settled(coordinator, committed=5)
    assert sorted(value for _, value in bench.visible()) == [b"0", b"1", b"2", b"after", b"warm"]  # type: ignore[type-var] # none is a tombstone


def test_a_transaction_whose_decision_is_lost_says_so_and_takes_no_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = bench.producer(check=lambda _: TransactionState.COMMIT)
    producer.send(bench.topic, value=b"warm")
    refused: list[int] = []
    sends = producer._core.store._sends  # type: ignore[attr-defined] # the store is Kafka's
    try_post = sends.try_post

    def refuse(topic: str, *arguments: Any, **options: Any) -> bool:
        if topic != bench.topics.op:
            return bool(try_post(topic, *arguments, **options))
        refused.append(1)
        raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "no"))

    monkeypatch.setattr(sends, "try_post", refuse)
    with pytest.raises(DecisionNotStoredError, match="will settle it"):
        producer.send(bench.topic, value=b"v")

    assert refused == [1]
    assert (producer.statistics().in_flight, producer.statistics().failed) == (0, 1)


def test_what_is_not_acknowledged_at_the_stop_is_reported_as_not_stored(bench: Bench, proxy: KafkaProxy) -> None:
    producer = bench.producer(bootstrap_servers=proxy.bootstrap_servers)
    producer.send(bench.topic, value=b"first")

    with proxy.fault(PRODUCE, What.HOLD, times=10_000) as held:
        pledges = [producer.submit(bench.topic, value=b"%d" % number) for number in range(100)]
        wait_until(lambda: held.fired)
        producer.stop(0.2)
        errors = {type(pledge.exception(60)) for pledge in pledges}

    assert errors == {HalfNotStoredError}
    assert producer.statistics().in_flight == 0


@pytest.mark.thorough
def test_a_half_that_is_not_acknowledged_in_time_does_not_run_the_local_transaction(
    bench: Bench, proxy: KafkaProxy
) -> None:
    ran: list[object] = []
    # When requests pass again there is as much time to store the rollback of a half that is stored after all.
    producer = bench.producer(bootstrap_servers=proxy.bootstrap_servers, send_timeout=10.0)
    producer.send(bench.topic, value=b"first")

    with (
        proxy.fault(PRODUCE, What.HOLD, times=10_000),
        pytest.raises(HalfNotStoredError, match="did not run"),
    ):
        producer.send(bench.topic, value=b"second", execute=ran.append)
    bench.settled(bench.coordinator(), committed=1)

    assert ran == []
    assert producer.statistics().failed == 1
    assert bench.visible() == [(None, b"first")]


def test_a_callback_that_finds_no_room_is_reported_and_does_not_wait(bench: Bench) -> None:
    producer = bench.producer(max_in_flight=1, send_timeout=60.0)
    raised: list[type[Exception]] = []

    def submit_another(_: Submission) -> None:
        # The decision of the first is handed over, but this very thread has to hear that it is stored.
        try:
            producer.submit(bench.topic, value=b"another")
        except BufferFullError as error:
            raised.append(type(error))

    producer.send(bench.topic, value=b"warm")
    prepare, held = producer._core.store.prepare, []
    producer._core.store.prepare = lambda *arguments: held.append(arguments)  # type: ignore[method-assign] # to be first
    pledge = producer.submit(bench.topic, value=b"one", wait="sent")
    pledge.add_done_callback(submit_another)
    producer._core.store.prepare = prepare  # type: ignore[method-assign] # as it was
    prepare(*held[0])
    wait_until(lambda: raised == [BufferFullError])
    wait_until(lambda: producer.statistics().in_flight == 0)
