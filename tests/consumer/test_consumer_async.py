"""`async def` handlers: limits, stop, and what one call leaves behind; the latter on the loop alone, fed by hand."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import pytest
from stepped_engine import SteppedEngine

from penstock.consumer import Handler, handler, retry
from penstock.consumer.run import event_loop
from penstock.consumer.run.event_loop import TaskPool, new_event_loop
from penstock.errors import StoppedError
from penstock.message import Message
from support.consumers import consumer_of, fed, group_of
from waiting import wait_until

USER: ContextVar[bytes | None] = ContextVar("user")


@pytest.fixture(autouse=True, params=["uvloop", "asyncio"])
def event_loop_in_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    loop.close()
    assert type(loop).__module__.partition(".")[0] == request.param


class AsyncRecorder:
    """An `async def` handler that records its messages, overlaps of a key, and the number of running calls."""

    def __init__(self, *, hold: bool = False) -> None:
        #: Key, partition and offset of each message that was done, in that order.
        self.done: list[tuple[bytes | None, int, int]] = []
        self.overlaps: list[bytes | None] = []
        self.running = self.peak = self.cancelled = 0
        #: Set by the test to let held calls go on.
        self.go = threading.Event()
        self._hold = hold
        self._running: Counter[bytes | None] = Counter()

    async def __call__(self, message: Message) -> None:
        """Take a message. Everything is on the loop's thread, so nothing needs a lock."""
        self._running[message.key] += 1
        if self._running[message.key] > 1:
            self.overlaps.append(message.key)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(0.01)
            while self._hold and not self.go.is_set():  # noqa: ASYNC110 - an event of the loop could not be set from a test
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            self._running[message.key] -= 1
        self.done.append((message.key, message.partition, message.offset))


def test_at_most_max_concurrency_calls_run_also_when_it_changes() -> None:
    seen = AsyncRecorder(hold=True)

    with consumer_of(fed(200, 200), {"t": handler(seen)}, max_concurrency=5) as consumer:
        # All are here and 5 have begun: a sixth has had its chance.
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


def test_a_drain_waits_for_async_handlers_and_a_consumer_may_be_stopped_more_than_once() -> None:
    broker, seen = fed(50, 7), AsyncRecorder(hold=True)
    consumer = consumer_of(broker, {"t": handler(seen)}, stop_timeout=1e6).start()
    wait_until(lambda: consumer.statistics().received == 50 and seen.running == 7)

    stopping = ThreadPoolExecutor().submit(consumer.stop)
    wait_until(lambda: "stopping" in {partition.paused for partition in consumer.statistics().partitions})
    is_over_early = stopping.done()
    seen.go.set()
    is_drained = stopping.result(60)
    consumer.close()

    assert (is_over_early, is_drained, consumer.stop()) == (False, True, True)
    assert len(seen.done) == 50
    assert broker.committed(group_of("t"))["t", 0].offset == 50


def test_a_second_stop_cancels_async_handlers_and_their_messages_come_again() -> None:
    broker, held, again = fed(3, 3), AsyncRecorder(hold=True), AsyncRecorder()
    consumer = consumer_of(broker, {"t": handler(held)}, stop_timeout=1e6, revoke_timeout=0.2).start()
    wait_until(lambda: held.running == 3)

    stopping = ThreadPoolExecutor().submit(consumer.stop)
    wait_until(lambda: "stopping" in {partition.paused for partition in consumer.statistics().partitions})
    consumer.request_stop(now=True)
    is_drained = stopping.result(60)
    consumer.close()
    with consumer_of(broker, {"t": handler(again)}):
        wait_until(lambda: len(again.done) == 3)

    assert not is_drained
    assert (held.cancelled, held.running, held.done) == (3, 0, [])


@contextmanager
def running(one: Handler, max_concurrency: int = 1) -> Iterator[SteppedEngine]:
    """Run a handler's messages, fed by hand, on a loop with its real thread."""
    stepped = SteppedEngine({"t": one})
    engine = stepped.engine
    pool = TaskPool("t", max_concurrency, engine.lane_plan.task_queue, engine.processor, lambda: None)
    stepped.engine.executor = pool
    pool.thread.start()
    try:
        yield stepped
    finally:
        pool.end_handlers(10)
        pool.close()


def messages(count: int) -> list[tuple[bytes | None, bytes | None]]:
    return [(b"k%d" % number, b"%d" % number) for number in range(count)]


def done(stepped: SteppedEngine) -> bool:
    return stepped.of("t").tracker.in_flight == 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_cancel_that_a_handler_swallowed_does_not_poison_a_task_group_of_a_later_message(waits: bool) -> None:
    asked: list[int] = []
    grouped: list[bytes | None] = []

    async def handles(message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        if message.value == b"0":
            asked.append(task.cancelling())
            task.cancel()
            if waits:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(1)
            return
        asked.append(task.cancelling())
        # A group whose parent was asked to cancel before raises at its end, though nothing in it failed.
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fails())
        except* ValueError:
            pass
        await asyncio.sleep(0)
        grouped.append(message.value)

    async def fails() -> None:
        raise ValueError

    with running(handler(handles, retry=retry(attempts=1), on_failure="drop")) as stepped:
        stepped.feed("t", *messages(5))
        wait_until(lambda: done(stepped))

    assert asked == [0] * 5
    assert grouped == [b"1", b"2", b"3", b"4"]


def test_messages_of_one_run_whose_handler_leaves_something_behind_stay_in_order_and_are_done_once() -> None:
    order: list[bytes | None] = []
    at_once = 0
    most = 0

    async def leaves(message: Message) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        USER.set(message.value)
        await asyncio.sleep(0)
        order.append(message.value)
        at_once -= 1
        if message.value == b"7":
            raise ValueError

    with running(handler(leaves, retry=retry(attempts=1), on_failure="drop"), max_concurrency=3) as stepped:
        stepped.feed("t", *((b"k", b"%d" % number) for number in range(30)))
        wait_until(lambda: done(stepped))
        counts = [(slot.handled, slot.dropped) for slot in stepped.engine.slots()]

    assert order == [b"%d" % number for number in range(30)]
    assert most == 1
    assert (sum(handled for handled, _ in counts), sum(dropped for _, dropped in counts)) == (29, 1)


def test_a_task_that_a_handler_cancels_before_it_ran_keeps_no_lane() -> None:
    handled, cancelled = list[bytes | None](), []

    async def cancels_others(message: Message) -> None:
        handled.append(message.key)
        if len(handled) == 1:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            cancelled.extend(task.cancel() for task in others)

    with consumer_of(fed(40, 40), {"t": handler(cancels_others)}):
        wait_until(lambda: len(handled) == 40)

    assert cancelled, "no task was cancelled"
    assert len(set(handled)) == 40


def test_a_handler_that_stops_the_event_loop_stops_the_consumer_with_an_error() -> None:
    async def stops_the_loop(_message: Message) -> None:
        asyncio.get_running_loop().stop()

    consumer = consumer_of(fed(1, 1), {"t": handler(stops_the_loop)}).start()
    with pytest.raises(StoppedError, match="stopped by a handler"):
        consumer.wait(60)
    consumer.run_async(asyncio.sleep(0))  # as the end of a lifespan does
    consumer.close()


def test_a_hook_of_the_end_does_not_wait_for_a_handler_that_keeps_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "_JOIN_S", 0.1)
    begun, go = threading.Event(), threading.Event()

    async def blocks(_message: Message) -> None:
        begun.set()
        go.wait(60)

    async def hook() -> str:
        return "done"

    with running(handler(blocks)) as stepped:
        pool = stepped.engine.executor
        assert isinstance(pool, TaskPool)
        assert pool.run_hook(hook()) == "done"
        stepped.feed("t", *messages(1))
        assert begun.wait(60)
        pool.end_handlers(0.1)

        with pytest.raises(StoppedError, match="a handler keeps the event loop"):
            pool.run_hook(hook())

        go.set()
