"""The outbox of a consumer: sends during a revocation, results of a partition that is gone, and bytes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient
from stepped import Stepped, new_item
from stepped_engine import SteppedEngine

import penstock
from kafka_tools import committed, limit, produce, read_all
from penstock.clients.renewal import RENEW_AFTER_S
from penstock.consumer import handler, retry
from penstock.consumer.handlers.results import Result
from penstock.consumer.outbox.outbox import Submission
from penstock.consumer.outbox.plain_outbox import PlainOutbox
from penstock.consumer.outbox.transactional_outbox import TransactionalOutbox
from penstock.devbroker import DevBroker
from penstock.message import Message
from penstock.routing import Lane
from penstock.testing import TestBroker
from support.consumers import ONCE, NewTopic
from waiting import wait_until

#: What a broker answers to a client that may write nowhere and asks for the id of an idempotent producer.
NO_ID = KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED, "no id is given", fatal=True)


def echo(message: Message) -> penstock.Outgoing:
    if message.value == b"bad":
        raise ValueError("no good")
    return penstock.Outgoing("out", message.value, message.key)


@pytest.mark.parametrize("value", [b"good", b"bad"], ids=["a result", "a dead letter"])
def test_what_handlers_finish_in_a_revocation_is_written_and_committed(value: bytes) -> None:
    broker, handling = TestBroker(0), handler(echo, retry=ONCE, on_failure="dead_letter")
    for topic in ("out", "dlq.in"):
        broker.create_topic(topic, 1)

    def wait(seconds: float) -> None:
        broker.advance(seconds)
        # A handler returns while the revocation waits for it. What failed by then was submitted before.
        if worker.lane is not None:
            stepped.finish(worker)

    stepped = Stepped({"in": handling}, broker=broker, wait=wait, revoke_timeout=5.0, commit_interval=3600.0)
    stepped.feed("in", [(b"k", value)])
    worker = stepped.take()
    # Brokers have it at once, and say so later.
    broker.delay_answer("produce", 3.0)
    if value == b"bad":
        stepped.finish(worker)
        stepped.poll()

    # Leaving revokes.
    stepped.loop.leave()

    assert [message.value() for message in broker.records("out" if value == b"good" else "dlq.in", 0)] == [value]
    assert stepped.committed("in") == 1


@pytest.mark.parametrize("on_failure", ["stop", "drop", "hold", "dead_letter"])
def test_nothing_is_judged_for_a_partition_that_is_gone_and_its_key_goes_on_when_it_is_back(on_failure: str) -> None:
    handled: list[bytes | None] = []

    def function(message: Message) -> None:
        handled.append(message.value)
        if message.value == b"bad":
            # It runs for longer than the revocation waits.
            stepped.revoke("t")
            raise ValueError("no good")

    stepped = SteppedEngine({"t": handler(function, retry=retry(attempts=1), on_failure=on_failure)})
    stepped.feed("t", (b"k", b"bad"))
    stepped.serve()
    stepped.send_out()
    stepped.assign("t", 1)
    stepped.feed("t", (b"k", b"good"))
    stepped.serve()

    assert handled == [b"bad", b"good"]
    assert (stepped.failures, stepped.count("dropped"), stepped.deliveries.sent) == ([], 0, [])
    assert (stepped.of("t").tracker.watermark, stepped.engine.statistics(1).parked_keys) == (2, 0)


@pytest.mark.parametrize("part", ["value", "key", "headers"])
def test_what_waits_to_be_sent_counts_for_back_pressure(part: str) -> None:
    broker = TestBroker(0)
    broker.create_topic("out", 1)
    parts: dict[str, Any] = {"value": b"", part: {"h": b"x" * 100_000} if part == "headers" else b"x" * 100_000}
    large = handler(lambda _: penstock.Outgoing("out", **parts))
    stepped = Stepped({"in": large}, broker=broker, max_in_flight_bytes=1_000_000, fetch_size=1)
    # Taken by the broker, and acknowledged ten minutes later.
    broker.delay_answer("produce", 600.0, times=20)
    for number in range(100):
        broker.produce("in", b"small", key=b"%d" % number)

    def go_on(seconds: float) -> int:
        stepped.poll()
        stepped.serve()
        broker.advance(seconds)
        return stepped.consumer.statistics().handled

    for _ in range(50):
        go_on(0.1)
    held = stepped.consumer.statistics()

    assert (5 <= held.received <= 12, held.partitions[0].paused) == (True, "byte limit")
    wait_until(lambda: go_on(5.0) == 100, interval=0)


class Sending:
    """A plain outbox on a broker in memory. It records the end of each submission."""

    def __init__(self) -> None:
        self.broker = TestBroker(0)
        self.broker.create_topic("out", 1)
        self.outbox = PlainOutbox()
        self.outbox.connect(self.broker, {})
        self.ended: list[Submission] = []

    def submit(self, *values: bytes) -> None:
        for value in values:
            results = [Result("out", value, b"k", [], -1)]
            self.outbox.submit([new_item()], results, self.ended.append, Lane(0))
        self.outbox.serve()

    def wait(self, seconds: float) -> None:
        self.broker.advance(seconds)
        for _ in range(3):
            self.outbox.serve()

    @property
    def replaced(self) -> int:
        """How often the client was replaced."""
        return self.outbox._clients.replaced

    def values(self) -> list[bytes | None]:
        return [record.value() for record in self.broker.records("out")]


def test_a_client_that_failed_for_ever_is_replaced_now_and_then_and_what_it_had_is_sent_again_in_order() -> None:
    sending = Sending()
    sending.broker.fail("produce", NO_ID)
    sending.submit(b"1", b"2")
    sending.wait(RENEW_AFTER_S / 2)
    early = sending.replaced
    sending.wait(RENEW_AFTER_S)

    assert sending.broker.faults.happened.total() == 1
    assert (early, sending.replaced) == (0, 1)
    assert [submission.is_written for submission in sending.ended] == [True, True]
    assert sending.values() == [b"1", b"2"]


def test_no_new_client_is_made_before_all_of_the_failed_one_is_reported() -> None:
    sending = Sending()
    sending.broker.delay_answer("produce", 100)
    sending.broker.fail("produce", NO_ID)
    sending.submit(b"on its way", b"refused")
    sending.wait(50)
    early = sending.replaced
    sending.wait(50)

    assert (early, sending.replaced) == (0, 1)
    assert sending.values() == [b"on its way", b"refused"]


def test_what_is_refused_or_finds_no_room_replaces_no_client() -> None:
    sending = Sending()
    sending.broker.fail("produce", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    sending.broker.fail("queue", 0)
    sending.submit(b"1", b"2")
    sending.wait(RENEW_AFTER_S)

    assert [submission.is_written for submission in sending.ended] == [False, True]
    assert sending.replaced == 0


@pytest.mark.parametrize(
    "exactly_once",
    [pytest.param(False, marks=pytest.mark.thorough), True],
    ids=["at least once", "exactly once"],
)
def test_no_handler_that_ends_within_the_budget_of_a_revocation_is_called_again(
    broker: DevBroker, new_topic: NewTopic, *, exactly_once: bool
) -> None:
    servers, source, target = broker.bootstrap_servers, new_topic(partitions=4), new_topic()
    calls, release = Counter[bytes | None](), threading.Event()
    for partition in range(4):
        produce(servers, source, [(b"k%d" % partition, b"%d" % partition)], partition=partition)

    def member() -> penstock.App:
        options: dict[str, Any] = {"exactly_once": exactly_once, "config": {"heartbeat.interval.ms": 200}}
        app = penstock.App(source, bootstrap_servers=servers, revoke_timeout=200.0, **options)

        @app.handler(source)
        def copy(message: Message) -> penstock.Outgoing:
            calls[message.value] += 1
            release.wait(200)
            return penstock.Outgoing(target, message.value)

        return app

    with member().start() as first:
        wait_until(lambda: len(calls) == 4)
        engine: Any = first._consumer._engine  # type: ignore[union-attr] # it has one
        with member().start() as second:
            wait_until(lambda: not all(assignment.active for assignment in engine.assignments.all()))
            release.set()
            # Long before its budget is over.
            wait_until(lambda: first.statistics().revoked and second.statistics().partitions, timeout=100)
            wait_until(lambda: sum(point.offset for point in committed(servers, source, source, 4).values()) == 4)

    assert calls == Counter([b"0", b"1", b"2", b"3"])
    assert sorted(sent.value() or b"" for sent in read_all(servers, target)) == [b"0", b"1", b"2", b"3"]


def test_what_a_handler_ends_in_a_stop_without_a_drain_is_published(
    broker: DevBroker, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, source, target = broker.bootstrap_servers, new_topic(), new_topic()
    release = threading.Event()
    produce(servers, source, [(b"slow", b"slow"), (b"bad", b"bad")])
    flush: Callable[..., None] = TransactionalOutbox.flush

    def flush_and_release(self: TransactionalOutbox, timeout: float) -> None:
        flush(self, timeout)
        release.set()

    monkeypatch.setattr(TransactionalOutbox, "flush", flush_and_release)
    app = penstock.App(source, bootstrap_servers=servers, exactly_once=True, revoke_timeout=60.0)

    @app.handler(source, retry=ONCE)
    def copy(message: Message) -> penstock.Outgoing:
        if message.value == b"bad":
            raise ValueError("the app stops without a drain")
        release.wait(60)
        return penstock.Outgoing(target, message.value)

    running = app.start()
    wait_until(lambda: committed(servers, source, source, 1)[0].offset == 1)
    with pytest.raises(penstock.PenstockError, match="failed"):
        running.stop()

    assert [sent.value() for sent in read_all(servers, target)] == [b"slow"]


@pytest.mark.thorough
def test_a_topic_that_takes_no_markers_stops_no_other(
    broker: DevBroker, new_topic: NewTopic, admin: AdminClient
) -> None:
    servers, source, sick, well = broker.bootstrap_servers, new_topic(), new_topic(), new_topic()
    # What is so short takes not even the marker of an abort: the transactional id is never free again.
    limit(admin, sick, 10)
    produce(servers, source, [(b"sick", sick.encode()), *((b"well", well.encode()) for _ in range(10))])
    app = penstock.App(source, bootstrap_servers=servers, exactly_once=True)

    @app.handler(source, retry=ONCE, on_failure="drop")
    def copy(message: Message) -> penstock.Outgoing:
        return penstock.Outgoing((message.value or b"").decode(), b"%d" % message.offset)

    with app.start() as running:
        wait_until(lambda: committed(servers, source, source, 1)[0].offset == 11, timeout=90)
        assert running.statistics().dropped == 1

    assert [sent.value() for sent in read_all(servers, well)] == [b"%d" % offset for offset in range(1, 11)]
