"""The event loop of `async def` handlers without a broker: what one call leaves behind is not seen by the next."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import pytest
from stepped_engine import SteppedEngine

from penstock.consumer import Handler, handler, retry
from penstock.consumer.run import event_loop
from penstock.consumer.run.event_loop import TaskPool
from penstock.errors import StoppedError
from penstock.message import Message
from waiting import wait_until

USER: ContextVar[bytes | None] = ContextVar("user")


@pytest.fixture(autouse=True, params=["uvloop", "asyncio"])
def event_loop_in_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)


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
                try:
                    await asyncio.sleep(1)
                except asyncio.CancelledError:
                    return
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
