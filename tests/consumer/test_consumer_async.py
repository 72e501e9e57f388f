"""`async def` handlers: limits and stop; `test_consumer_tasks` has what a call leaves behind."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter

import pytest

from penstock.consumer import handler
from penstock.consumer.run.event_loop import new_event_loop
from penstock.message import Message
from support.consumers import consumer_of, fed, group_of
from waiting import wait_until


@pytest.fixture(params=["uvloop", "asyncio"])
def event_loop_in_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    loop.close()
    assert type(loop).__module__.partition(".")[0] == request.param


class AsyncRecorder:
    """An `async def` handler that writes down its messages, finds overlaps of a key, and counts what is under way."""

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


def test_no_more_than_max_concurrency_are_under_way_also_when_it_changes() -> None:
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


@pytest.mark.usefixtures("event_loop_in_use")
def test_a_drain_waits_for_async_handlers_and_a_consumer_may_be_stopped_more_than_once() -> None:
    broker, seen, stopped = fed(50, 7), AsyncRecorder(hold=True), list[bool]()
    consumer = consumer_of(broker, {"t": handler(seen)}, stop_timeout=1e9).start()
    wait_until(lambda: consumer.statistics().received == 50 and seen.running == 7)
    stopping = threading.Thread(target=lambda: stopped.append(consumer.stop()))

    stopping.start()
    wait_until(lambda: "stopping" in {partition.paused for partition in consumer.statistics().partitions})
    while_held = list(stopped)
    seen.go.set()
    stopping.join()
    consumer.close()

    assert (while_held, stopped, consumer.stop()) == ([], [True], True)
    assert len(seen.done) == 50
    assert broker.committed(group_of("t"))["t", 0].offset == 50


@pytest.mark.usefixtures("event_loop_in_use")
def test_a_second_stop_cancels_async_handlers_and_their_messages_come_again() -> None:
    broker, held, again, stopped = fed(3, 3), AsyncRecorder(hold=True), AsyncRecorder(), list[bool]()
    consumer = consumer_of(broker, {"t": handler(held)}, stop_timeout=1e9, revoke_timeout=0.2).start()
    wait_until(lambda: held.running == 3)
    stopping = threading.Thread(target=lambda: stopped.append(consumer.stop()))

    stopping.start()
    wait_until(lambda: "stopping" in {partition.paused for partition in consumer.statistics().partitions})
    consumer.request_stop(now=True)
    stopping.join()
    consumer.close()
    with consumer_of(broker, {"t": handler(again)}):
        wait_until(lambda: len(again.done) == 3)

    assert stopped == [False]
    assert (held.cancelled, held.running, held.done) == (3, 0, [])
