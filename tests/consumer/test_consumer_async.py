"""`async def` handlers on a real broker: order, limits, failures, stop and revocation."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable

import pytest
import tenacity
from consuming import AsyncRecorder, consumer_of, event_set

from kafka_tools import Recorder, committed, ends, produce
from penstock.consumer import handler, retry
from penstock.consumer.execution.event_loop import new_event_loop
from penstock.devbroker import DevBroker
from penstock.message import Message
from waiting import wait_until

NewTopic = Callable[..., str]

QUICK = retry(attempts=3, wait=tenacity.wait_fixed(0.05))


@pytest.fixture(autouse=True, params=["uvloop", "asyncio"])
def event_loop_in_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    loop.close()
    assert type(loop).__module__.partition(".")[0] == request.param


def test_async_handlers_keep_each_key_in_order_and_never_at_once_while_hundreds_are_under_way(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=3)
    produce(broker.bootstrap_servers, topic, ((b"k%d" % (i % 300), b"x") for i in range(3000)))
    seen = AsyncRecorder(seconds=0.02)

    with consumer_of(broker, {topic: handler(seen)}, max_concurrency=1000):
        wait_until(lambda: len(seen.done) == 3000)

    assert seen.overlaps == []
    assert all(offsets == sorted(offsets) for offsets in seen.by_key().values())
    assert len(set(seen.done)) == 3000
    # 300 keys in flight would be best; a machine that is busy brings them in slices.
    assert 50 < seen.peak <= 300
    assert {
        p: one.offset for p, one in committed(broker.bootstrap_servers, f"group-{topic}", topic, 3).items()
    } == ends(broker.bootstrap_servers, topic, 3)


def test_no_more_than_max_concurrency_are_under_way_also_when_it_changes(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x") for i in range(200)))
    seen = AsyncRecorder(hold=True)

    with consumer_of(broker, {topic: handler(seen)}, max_concurrency=5) as consumer:
        # All are here and 5 have begun: who would begin a sixth has had his chance.
        wait_until(lambda: consumer.statistics().received == 200 and seen.running == 5)
        wait_until(lambda: consumer.statistics().ready_lanes > 100)
        at_five = seen.peak
        consumer.change(max_concurrency=9)
        wait_until(lambda: seen.running == 9)
        at_nine = seen.peak
        consumer.change(max_concurrency=2)
        seen.go.set()
        wait_until(lambda: len(seen.done) == 200)

    assert (at_five, at_nine, seen.peak) == (5, 9, 9)
    assert seen.overlaps == []


class OddError(BaseException):
    """What no handler should raise."""


@pytest.mark.parametrize("kind", [ValueError, asyncio.CancelledError, SystemExit, OddError, StopIteration])
def test_whatever_an_async_handler_raises_parks_its_key_and_no_other(
    broker: DevBroker, new_topic: NewTopic, kind: type[BaseException]
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"bad", b"poison"), (b"good", b"x"), (b"bad", b"after")])
    tried: list[bytes | None] = []

    async def fails(message: Message) -> None:
        tried.append(message.value)
        await asyncio.sleep(0)
        if message.value == b"poison":
            raise kind

    with consumer_of(broker, {topic: handler(fails, retry_policy=QUICK, on_failure="drop")}) as consumer:
        wait_until(lambda: consumer.statistics().dropped == 1 and consumer.statistics().handled == 2)
        statistics = consumer.statistics()

    assert tried.count(b"poison") == 3
    assert tried[-1] == b"after"
    assert (statistics.failed, statistics.retried, statistics.in_flight) == (3, 2, 0)


def test_a_handler_that_cancels_its_own_task_costs_no_message(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"%d" % i) for i in range(300)))
    seen: set[bytes | None] = set()
    cancelled: set[bytes | None] = set()

    async def cancels(message: Message) -> None:
        if len(cancelled) < 50 and message.value not in cancelled:
            cancelled.add(message.value)
            task = asyncio.current_task()
            assert task is not None
            # It tells at the next wait, wherever that is.
            task.cancel()
            return
        await asyncio.sleep(0.001)
        seen.add(message.value)

    policy = retry(attempts=100, wait=tenacity.wait_fixed(0.02))
    with consumer_of(broker, {topic: handler(cancels, retry_policy=policy)}, max_concurrency=3) as consumer:
        wait_until(lambda: len(seen | cancelled) == 300 and consumer.statistics().in_flight == 0)

    assert len(cancelled) == 50
    assert committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset == 300


def test_a_drain_waits_for_async_handlers(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, ((b"k%d" % (i % 7), b"x") for i in range(50)))
    seen = AsyncRecorder(hold=True)
    consumer = consumer_of(broker, {topic: handler(seen)}, stop_timeout=60).start()
    wait_until(lambda: consumer.statistics().received == 50 and seen.running == 7)
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(consumer.stop()))

    stopping.start()
    wait_until(lambda: "stopping" in {one.paused for one in consumer.statistics().partitions})
    while_held = list(stopped)
    seen.go.set()
    stopping.join(60)
    consumer.close()

    assert while_held == []
    assert stopped == [True]
    assert len(seen.done) == 50
    assert committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset == 50


def test_a_second_stop_cancels_async_handlers_and_their_messages_come_again(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x") for i in range(3)))
    held, again = AsyncRecorder(hold=True), AsyncRecorder()
    consumer = consumer_of(broker, {topic: handler(held)}, stop_timeout=600, revoke_timeout=0.2).start()
    wait_until(lambda: held.running == 3)
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(consumer.stop()))

    stopping.start()
    wait_until(lambda: "stopping" in {one.paused for one in consumer.statistics().partitions})
    consumer.request_stop(now=True)
    stopping.join(60)
    consumer.close()
    with consumer_of(broker, {topic: handler(again)}):
        wait_until(lambda: len(again.done) == 3)

    assert stopped == [False]
    assert (held.cancelled, held.running, held.done) == (3, 0, [])


def test_a_consumer_with_async_handlers_may_be_stopped_more_than_once(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")])
    seen = AsyncRecorder()

    with consumer_of(broker, {topic: handler(seen)}) as consumer:
        wait_until(lambda: len(seen.done) == 1)
        first = consumer.stop()
        consumer.close()
        second = consumer.stop()

    assert (first, second) == (True, True)


def test_what_ends_the_event_loop_stops_the_consumer_with_it(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")])
    kept: list[asyncio.Task[None]] = []
    ended: list[str] = []

    async def exits() -> None:
        raise SystemExit(3)

    async def spawns(_message: Message) -> None:
        # What a task of its own raises is no failure of the handler: asyncio ends the loop with it.
        kept.append(asyncio.create_task(exits()))
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(threading.current_thread().name)

    consumer = consumer_of(broker, {topic: handler(spawns)}, revoke_timeout=0.2).start()
    with pytest.raises(SystemExit):
        wait_until(lambda: consumer.wait(0.1))
    with pytest.raises(SystemExit):
        consumer.stop()
    consumer.close()

    # Its handler was cancelled, where it ran.
    assert ended == [f"penstock-loop-group-{topic}"]
    assert committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset <= 0


def test_a_key_that_two_handlers_share_is_never_on_a_thread_and_on_the_loop_at_once(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    on_thread, on_loop = new_topic(), new_topic()
    for topic in (on_thread, on_loop):
        produce(broker.bootstrap_servers, topic, ((b"k%d" % (i % 5), b"x") for i in range(200)))
    # It watches its keys over both kinds, under a lock.
    seen = Recorder(seconds=0.001)
    loop_offsets: dict[bytes | None, list[int]] = {}

    async def awaits(message: Message) -> None:
        loop_offsets.setdefault(message.key, []).append(message.offset)
        await asyncio.to_thread(seen, message)

    handlers = {on_thread: handler(seen, key_space="k"), on_loop: handler(awaits, key_space="k")}
    with consumer_of(broker, handlers):
        wait_until(lambda: len(seen.calls) == 400)

    assert seen.overlaps == []
    assert all(offsets == sorted(offsets) for offsets in loop_offsets.values())
    assert sum(map(len, loop_offsets.values())) == 200


def test_a_revocation_waits_for_async_handlers_no_longer_than_its_budget(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    for partition in (0, 1):
        produce(broker.bootstrap_servers, topic, [(b"k%d" % partition, b"x")], partition=partition)
    held, second = AsyncRecorder(hold=True), AsyncRecorder()
    options = {"revoke_timeout": 0.5, "stop_timeout": 30, "config": {"heartbeat.interval.ms": 200}}

    with consumer_of(broker, {topic: handler(held)}, **options) as one:
        wait_until(lambda: held.running == 2)
        with consumer_of(broker, {topic: handler(second)}, **options) as other:
            wait_until(lambda: len(second.done) == 1, timeout=60)
            # Its next owner has handled the message, and the first is still at it.
            still = held.running
            held.go.set()
            wait_until(lambda: len(held.done) == 2)
            assert len(other.statistics().partitions) == 1
            revoked = one.statistics().revoked

    assert still == 2
    assert revoked == 1


def test_handlers_that_wait_for_nothing_leave_the_loop_to_those_that_do(broker: DevBroker, new_topic: NewTopic) -> None:
    busy, polite = new_topic(), new_topic()
    produce(broker.bootstrap_servers, polite, [(b"p", b"x")])
    spun, go = 0, threading.Event()
    polite_begun, first_spun = threading.Event(), threading.Event()
    spun_before_its_turn: list[int] = []

    async def spins(_message: Message) -> None:
        nonlocal spun
        if not go.is_set():
            await event_set(go)
        spun += 1
        first_spun.set()
        until = time.perf_counter() + 0.0005
        while time.perf_counter() < until:
            pass

    async def waits(_message: Message) -> None:
        polite_begun.set()
        await event_set(first_spun)
        spun_before_its_turn.append(spun)

    with consumer_of(broker, {busy: handler(spins), polite: handler(waits)}, max_concurrency=10) as consumer:
        assert polite_begun.wait(60)
        produce(broker.bootstrap_servers, busy, ((b"b%d" % i, b"x") for i in range(4000)))
        wait_until(lambda: consumer.statistics().received == 4001)
        go.set()
        wait_until(lambda: spun_before_its_turn)
        wait_until(lambda: spun == 4000)

    # A slice of each of ten tasks, not all there is.
    assert spun_before_its_turn[0] < 2000
