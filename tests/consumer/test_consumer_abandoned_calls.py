"""Calls that do not return though they were interrupted: given up with their thread or task, while their key waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from stepped import Stepped
from tenacity import wait_fixed, wait_none

from penstock.consumer import LitePushConsumer, handler, retry
from penstock.consumer.giving_up import GivingUp
from penstock.consumer.handlers.route import Failed
from penstock.consumer.inspect.details import lane_depths
from penstock.consumer.lanes.slot import SeenCall
from penstock.consumer.poll.watchdog import GRACE_S
from penstock.errors import NotGivenUpError, WorkersBlockedError
from penstock.message import Message
from penstock.outgoing import Outgoing
from penstock.testing import TestBroker
from support.consumers import Handled, consumer_of
from support.stepped_workers import SteppedWorker
from waiting import wait_until

LIMIT_S = 30.0


class Hangs(Handled):
    """A handler that waits, at the value `hang`, outside of Python until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.hangs = 0

    def __call__(self, message: Message) -> None:
        super().__call__(message)
        if message.value == b"hang":
            with self._lock:
                self._running[message.key] += 1
                self.hangs += 1
            try:
                self.released.wait(60)
            finally:
                with self._lock:
                    self._running[message.key] -= 1


@contextmanager
def on_threads(
    function: Callable[[Message], object], **options: Any
) -> Iterator[tuple[LitePushConsumer, Any, TestBroker]]:
    """Run worker threads, or an event loop. The poll loop steps while the test waits; the test moves the clock."""
    broker = TestBroker()
    of_app = ("workers", "max_concurrency", "lanes_per_worker", "commit_interval")
    settings = {name: options.pop(name) for name in of_app if name in options}
    consumer = consumer_of(broker, {"t": handler(function, **options)}, **settings)
    loop = consumer._loop
    loop.connect(broker)
    consumer._executor.start()
    loop.membership.join()

    def until(condition: Callable[[], Any]) -> Any:
        def step() -> Any:
            loop.step()
            return condition()

        return wait_until(step, interval=0.001)

    try:
        yield consumer, until, broker
    finally:
        consumer._executor.stop(0)


def test_a_thread_is_interrupted_in_the_middle_of_a_slice_and_goes_on_with_the_next_message() -> None:
    done: list[bytes | None] = []

    def handle(message: Message) -> None:
        if message.value == b"hangs" and message.attempt == 1:
            while True:
                with suppress(Exception):  # as in many handlers: a loop that survives all errors
                    time.sleep(0.001)
        done.append(message.value)

    options = {"time_limit": LIMIT_S, "retry": retry(2, wait=wait_none()), "workers": 1, "lanes_per_worker": 1}
    with on_threads(handle, **options) as (consumer, until, broker):
        values = [b"%d" % number for number in range(20)]
        for value in [*values[:10], b"hangs", *values[10:]]:
            broker.produce("t", value, key=b"k")
        until(lambda: len(done) == 10)
        for seconds in (0, LIMIT_S):
            broker.advance(seconds)
            until(lambda: True)
        until(lambda: len(done) == 21)

        assert done == [*values[:10], b"hangs", *values[10:]]
        assert (consumer.statistics().over_time_limit, consumer.statistics().failed) == (1, 1)


def hang_over(until: Any, broker: TestBroker, hangs: Callable[[], bool]) -> None:
    """Let a handler hang for so long that its thread is abandoned."""
    until(hangs)
    for seconds in (0, LIMIT_S, GRACE_S):
        broker.advance(seconds)
        until(lambda: True)


def test_a_call_that_does_not_return_loses_its_message_and_its_place_and_keeps_its_key() -> None:
    hangs = Hangs()
    options = {"time_limit": LIMIT_S, "on_failure": "dead_letter", "workers": 4, "lanes_per_worker": 1}
    with on_threads(hangs, **options) as (consumer, until, broker):
        broker.produce("t", b"hang", key=b"stuck")
        broker.produce("t", b"next", key=b"stuck")
        for number in range(40):
            broker.produce("t", b"x", key=b"k%d" % number)
        hang_over(until, broker, lambda: hangs.hangs == 1)

        # Every lane goes on, that of the key as well; the offset is done, and so the watermark moves to what waits.
        until(lambda: len(hangs.done) == 41)
        (said,) = until(lambda: [held for held in consumer.explain() if held.state == "behind a call"])
        (letter,) = broker.records("dlq.t")
        now = consumer.statistics()

        assert letter.value() == b"hang"
        assert "offset 1, queued behind an earlier call of the same key, in Hangs on penstock-worker-group-t-" in str(
            said
        )
        assert said.age is not None
        assert said.age >= LIMIT_S + GRACE_S
        assert said.worker is not None
        assert "self.released.wait(60)" in consumer.stacks([said.worker])[said.worker]
        assert (now.abandoned_calls, now.workers, now.oldest_call >= LIMIT_S) == (1, 4, True)

        hangs.released.set()
        until(lambda: consumer.statistics().partitions[0].watermark == 42)
        # The poll thread may hear of the end of the call later than of its key.
        until(lambda: consumer.statistics().abandoned_calls == 0)

        assert hangs.overlaps == []
        assert len({worker.thread.name for worker in consumer._executor.threads.workers}) == 4  # it has threads


def test_a_task_that_goes_on_though_it_was_cancelled_is_given_up_as_a_thread_is() -> None:
    handled, released = Handled(), threading.Event()

    async def handle(message: Message) -> None:
        while message.value == b"hang" and not released.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)
        handled(message)

    options = {"time_limit": 0.01, "on_failure": "dead_letter", "max_concurrency": 4, "lanes_per_worker": 1}
    with on_threads(handle, **options) as (consumer, until, broker):
        broker.produce("t", b"hang", key=b"stuck")
        broker.produce("t", b"next", key=b"stuck")
        for number in range(20):
            broker.produce("t", b"x", key=b"k%d" % number)
        until(lambda: len(handled.done) >= 16)
        hang_over(until, broker, lambda: True)

        # Every lane goes on, that of the key as well, at the same width; the offset is done.
        until(lambda: len(handled.done) == 20)
        (said,) = until(lambda: [held for held in consumer.explain() if held.state == "behind a call"])
        (letter,) = until(lambda: broker.records("dlq.t"))
        assert letter.value() == b"hang"
        assert said.worker is not None
        assert "await asyncio.sleep(0.001)" in consumer.stacks([said.worker])[said.worker]
        assert consumer.statistics().abandoned_calls == 1
        assert consumer._executor.tasks is not None

        released.set()
        until(lambda: consumer.statistics().partitions[0].watermark == 22)
        until(lambda: consumer.statistics().abandoned_calls == 0)

        assert handled.overlaps == []
        assert consumer._executor.tasks._abandoned == set()


def test_a_task_that_was_abandoned_and_outlives_its_event_loop_is_no_error_of_asyncio(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handle(_message: Message) -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    with on_threads(handle, time_limit=LIMIT_S, on_failure="drop", max_concurrency=8) as (consumer, until, broker):
        broker.produce("t", b"hang", key=b"k")
        hang_over(until, broker, lambda: consumer.statistics().busy_workers == 1)
        until(lambda: consumer.statistics().abandoned_calls == 1)
        assert consumer._executor.tasks is not None
        (task,) = consumer._executor.tasks._abandoned

    task.__del__()  # type: ignore[attr-defined] # as the collector does

    assert not task.done()
    assert "Task was destroyed" not in caplog.text


def test_no_task_is_abandoned_while_the_event_loop_is_blocked_nor_before_it_had_its_time_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks, blocked, released = threading.Event(), threading.Event(), threading.Event()

    async def handle(_message: Message) -> None:
        while not released.is_set():
            if blocks.is_set() and not blocked.is_set():
                blocked.set()
                blocks.clear()
                while not blocks.wait(60):
                    pass
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)

    options = {"time_limit": LIMIT_S, "on_failure": "drop", "max_concurrency": 8}
    with on_threads(handle, **options) as (consumer, until, broker):
        tasks = consumer._executor.tasks
        assert tasks is not None
        abandon, tried = tasks.abandon, list[SeenCall]()

        def tries(seen: SeenCall, failure: Failed) -> bool:
            tried.append(seen)
            return abandon(seen, failure)

        monkeypatch.setattr(tasks, "abandon", tries)
        for number in range(3):
            broker.produce("t", b"hang", key=b"k%d" % number)
        until(lambda: consumer.statistics().busy_workers == 3)
        for seconds in (1, LIMIT_S):
            broker.advance(seconds)
            until(lambda: True)
        blocks.set()
        wait_until(lambda: tasks.loop_lag().seconds > 1.0)
        broker.advance(GRACE_S)
        until(lambda: True)

        # The poll thread would wait for each of them, at each step.
        assert tried == []
        blocks.set()
        wait_until(lambda: tasks.loop_lag().seconds < 0.5)
        until(lambda: True)
        assert tried == []
        broker.advance(GRACE_S)
        until(lambda: consumer.statistics().abandoned_calls == 3)
        released.set()


def test_results_of_the_slice_in_which_a_call_hangs_are_published_by_the_thread_that_takes_over() -> None:
    hangs = Hangs()

    def handle(message: Message) -> Outgoing:
        hangs(message)
        return Outgoing("results", message.value)

    # Nothing is committed meanwhile: that would publish them before.
    options = {"time_limit": LIMIT_S, "on_failure": "drop", "workers": 4, "commit_interval": 1e6}
    with on_threads(handle, **options) as (consumer, until, broker):
        broker.create_topic("results", 1)
        for slot in consumer._executor.slots:
            slot.slice_size = 10  # as behind quick messages
        for value in (b"last", b"hang"):
            broker.produce("t", value, key=b"k")
        until(lambda: consumer._engine.counts.received == 2)  # `statistics` would publish the result
        wait_until(lambda: hangs.hangs == 1)  # the slice lasts, because the clock stands
        waiting = [len(slot.results) for slot in consumer._executor.slots if slot.record is not None]
        hang_over(until, broker, lambda: True)
        until(lambda: broker.records("results"))
        hangs.released.set()

        assert waiting == [1]
        assert [record.value() for record in broker.records("results")] == [b"last"]


def test_where_half_of_the_workers_are_left_behind_the_app_ends_and_asks_for_a_new_process() -> None:
    hangs = Hangs()
    with on_threads(hangs, time_limit=LIMIT_S, on_failure="drop", workers=2) as (consumer, until, broker):
        broker.produce("t", b"hang", key=b"a")
        broker.produce("t", b"x", key=b"b")
        hang_over(until, broker, lambda: hangs.hangs == 1)
        request = consumer._engine.stop_request

        assert isinstance(request.failure, WorkersBlockedError)
        assert "1 of 2 worker threads of group-t are in handlers that do not return" in str(request.failure)
        # What is in flight is finished, and the offset of what hangs is done: it does not come again.
        assert (request.is_requested, request.leaves_now) == (True, False)
        until(lambda: consumer.statistics().partitions[0].watermark == 2)
        hangs.released.set()


def test_a_handler_that_runs_is_given_up_by_request_without_a_limit_of_its_own() -> None:
    hangs = Hangs()
    with on_threads(hangs, workers=4) as (consumer, until, broker):
        broker.produce("t", b"hang", key=b"a")
        until(lambda: hangs.hangs == 1)
        giving_up = GivingUp(consumer._engine, broker, consumer.explain)
        asked = giving_up.ask("t", 0, 0)
        until(lambda: True)
        with pytest.raises(NotGivenUpError, match="it is still in its handler, although that was interrupted"):
            giving_up.wait(asked)
        asked = giving_up.ask("t", 0, 0)
        broker.advance(GRACE_S)
        until(asked.outcome.done)

        assert giving_up.wait(asked) == "dlq.t"
        assert [letter.value() for letter in broker.records("dlq.t")] == [b"hang"]
        hangs.released.set()


def hang(stepped: Stepped) -> SteppedWorker:
    """Let the handler that was begun hang until it is abandoned; return the worker that is abandoned."""
    (worker,) = [worker for worker in stepped.consumer.workers if worker.work is not None]
    for seconds in (0, LIMIT_S, GRACE_S):
        stepped.broker.advance(seconds)
        stepped.poll()
    return worker


def end(worker: SteppedWorker) -> None:
    """Let an abandoned call return."""
    assert worker.abandoned is not None
    worker.abandoned.ended.set_result(None)


@pytest.mark.parametrize(
    ("on_failure", "watermark", "state"),
    [("drop", 1, "behind a call"), ("dead_letter", 1, "behind a call"), ("hold", 0, "held"), ("stop", 0, "parked")],
)
def test_what_is_abandoned_is_given_up_at_once_as_its_handler_chose(
    on_failure: str, watermark: int, state: str
) -> None:
    handled = Handled()
    policy = retry(attempts=9, wait=wait_fixed(60))
    stepped = Stepped({"t": handler(handled, time_limit=LIMIT_S, on_failure=on_failure, retry=policy)}, workers=3)
    stepped.feed("t", [(b"a", b"1"), (b"a", b"2"), (b"b", b"3")])
    stepped.take()
    worker = hang(stepped)
    stepped.serve()
    stepped.poll(3)
    stepped.serve()

    (said,) = stepped.consumer.explain()
    assert (said.blocking_offset, said.state, handled.calls) == (watermark, state, ["3"])
    assert (stepped.consumer.engine.stop_request.failure is not None) == (on_failure == "stop")

    end(worker)
    stepped.serve()
    assert handled.calls == (["3", "2"] if watermark else ["3"])


def test_a_batch_that_is_abandoned_loses_the_first_message_of_a_key_and_blocks_the_rest_until_it_returns() -> None:
    batches: list[list[bytes | None]] = []
    batched = handler(
        lambda messages: batches.append([message.value for message in messages]),
        batch=2,
        time_limit=LIMIT_S,
        on_failure="drop",
    )
    stepped = Stepped({"t": batched}, workers=3, lanes_per_worker=1, pinned=False)
    stepped.feed("t", [(b"a", b"1"), (b"a", b"2"), (b"a", b"3")])
    stepped.take()
    worker = hang(stepped)
    stepped.serve()

    assert batches == []
    assert stepped.consumer.statistics().partitions[0].watermark == 1
    end(worker)
    stepped.serve()
    assert batches == [[b"2", b"3"]]


# A partition that goes and comes back while a handler hangs


def rejoined(**options: Any) -> tuple[Stepped, SteppedWorker, Handled]:
    """Return a member that lost its partition while a handler hangs, and got it back."""
    handled = Handled()
    stepped = Stepped({"t": handler(handled, **options)}, workers=16)
    stepped.feed("t", [(b"a", b"1"), (b"b", b"2")])
    worker = stepped.take()
    client = stepped.consumer.client
    client.cut_off()
    stepped.broker.advance(20)
    stepped.poll(3)
    client.heal()
    for _ in range(20):
        stepped.broker.advance(0.5)
        stepped.poll()
    assert [assignment.active for assignment in worker.assignments] == [False]
    assert stepped.consumer.engine.assignments.all()
    return stepped, worker, handled


def test_after_a_rejoin_a_message_says_behind_which_call_it_is_queued() -> None:
    stepped, worker, _ = rejoined()

    (said,) = stepped.consumer.explain()

    assert (said.blocking_offset, said.state, said.worker) == (0, "behind a call", worker.slot.name)
    assert said.age is not None
    assert said.age >= 20
    assert f"offset 0, queued behind an earlier call of the same key, in Handled on {worker.slot.name} for " in str(
        said
    )
    with pytest.raises(NotGivenUpError, match="it does not hold"):
        GivingUp(stepped.consumer.engine, stepped.broker, stepped.consumer.explain).ask("t", 0, 1)
    # The lanes no longer count abandoned messages.
    depths = lane_depths(stepped.consumer.engine.scheduler, stepped.broker.clock.monotonic())
    assert sum(depths["Handled"]["depth"]) == 2


@pytest.mark.parametrize("limit", [None, LIMIT_S])
def test_after_a_rejoin_what_hangs_is_given_up_by_request_or_by_its_limit(limit: float | None) -> None:
    stepped, worker, handled = rejoined(time_limit=limit, on_failure="dead_letter")
    giving_up = GivingUp(stepped.consumer.engine, stepped.broker, stepped.consumer.explain)
    asked = giving_up.ask("t", 0, 0) if limit is None else None
    while worker.abandoned is None:
        stepped.broker.advance(1)
        stepped.poll()
    stepped.serve()
    stepped.poll(3)
    stepped.serve()

    assert [letter.value() for letter in stepped.broker.records("dlq.t")] == [b"1"]
    assert asked is None or giving_up.wait(asked) == "dlq.t"
    assert handled.calls == ["2"]
    assert stepped.consumer.statistics().partitions[0].watermark == 2
    end(worker)
    stepped.serve()
    assert handled.calls == ["2"]
