"""A consumer on its threads and its event loop, on a broker in memory: their effects on handlers and back."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import tenacity

from penstock.consumer import handler, retry
from penstock.message import Message
from support.consumers import consumer_of, fed, group_of
from waiting import wait_until


class OddError(BaseException):
    """What no handler should raise."""


@pytest.mark.parametrize(
    "kind", [ValueError, SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit, asyncio.CancelledError, OddError]
)
@pytest.mark.parametrize("on", ["a thread", "the loop"])
def test_whatever_a_handler_raises_fails_its_message_and_ends_nothing_else(on: str, kind: type[BaseException]) -> None:
    broker = fed(0, 1)
    for key, value in ((b"bad", b"poison"), (b"good", b"x"), (b"bad", b"after")):
        broker.produce("t", value, key=key)
    tried: list[bytes | None] = []

    def fails(message: Message) -> None:
        tried.append(message.value)
        if message.value == b"poison":
            raise kind

    async def fails_on_the_loop(message: Message) -> None:
        await asyncio.sleep(0)
        fails(message)

    policy = retry(attempts=3, wait=tenacity.wait_fixed(0.05))
    one = handler(fails if on == "a thread" else fails_on_the_loop, retry=policy, on_failure="drop")
    with consumer_of(broker, {"t": one}, workers=1) as consumer:
        wait_until(lambda: consumer.statistics().dropped == 1 and consumer.statistics().handled == 2)
        now = consumer.statistics()

    assert tried.count(b"poison") == 3
    assert tried[-1] == b"after"
    assert (now.failed, now.retried, now.in_flight) == (3, 2, 0)


TENANT: ContextVar[str] = ContextVar("tenant", default="nobody")


def noting_tenants(found: list[str]) -> Callable[[Message], None]:
    """Return a handler that notes the tenant that it finds, and leaves another behind; not for every message."""

    def handle(message: Message) -> None:
        found.append(TENANT.get())
        if message.offset % 2:
            TENANT.set("somebody")

    return handle


@pytest.mark.parametrize(
    ("on", "options"),
    [("a thread", {}), ("a thread", {"filter": lambda _: True}), ("a thread", {"key_rate": 1e6}), ("the loop", {})],
    ids=["", "filter", "gated", "the loop"],
)
def test_a_context_variable_that_one_message_sets_is_not_seen_by_the_next(on: str, options: Any) -> None:
    broker, found = fed(50, 3), list[str]()
    notes = noting_tenants(found)

    async def notes_on_the_loop(message: Message) -> None:
        notes(message)
        await asyncio.sleep(0)

    one = handler(notes if on == "a thread" else notes_on_the_loop, **options)
    with consumer_of(broker, {"t": one}, workers=1, max_concurrency=1) as consumer:
        wait_until(lambda: consumer.statistics().handled == 50)

    assert found == ["nobody"] * 50


def test_a_pinned_consumer_keeps_each_key_on_one_thread() -> None:
    broker = fed(600, 30, partitions=2)
    threads: dict[bytes | None, set[str]] = defaultdict(set)
    together = threading.Barrier(4)

    def notes(message: Message) -> None:
        name = threading.current_thread().name
        if name not in set().union(*threads.values()):
            # Each worker has lanes of its own: without all of them this would never end.
            together.wait()
        threads[message.key].add(name)

    with consumer_of(broker, {"t": handler(notes)}, pinned=True, workers=4) as consumer:
        wait_until(lambda: consumer.statistics().handled == 600)

    assert {len(names) for names in threads.values()} == {1}
    assert len(set().union(*threads.values())) == 4


def test_the_poll_thread_keeps_its_membership_while_a_handler_hangs() -> None:
    broker = fed(1, 1)
    begun, released = threading.Event(), threading.Event()

    def hangs(_message: Message) -> None:
        begun.set()
        released.wait()

    config = {"max.poll.interval.ms": 6000, "session.timeout.ms": 6000}
    with consumer_of(broker, {"t": handler(hangs)}, config=config) as consumer:
        wait_until(begun.is_set)
        since = broker.clock.monotonic()
        # The poll thread alone moves the clock, and only when it polls.
        wait_until(lambda: broker.clock.monotonic() > since + 60)
        now, members = consumer.statistics(), broker.members(group_of("t"))
        released.set()

    assert (now.lost, len(now.partitions), len(members)) == (0, 1, 1)


def test_what_ends_the_event_loop_stops_the_consumer_with_it() -> None:
    broker, ended = fed(1, 1), list[str]()
    kept: list[asyncio.Task[None]] = []

    async def exits() -> None:
        raise SystemExit(3)

    async def spawns(_message: Message) -> None:
        # What a task of its own raises is no failure of the handler: asyncio ends the loop with it.
        kept.append(asyncio.create_task(exits()))
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(threading.current_thread().name)

    consumer = consumer_of(broker, {"t": handler(spawns)}, revoke_timeout=0.2).start()
    with pytest.raises(SystemExit):
        wait_until(lambda: consumer.wait(0.1))
    with pytest.raises(SystemExit):
        consumer.stop()
    consumer.close()

    # Its handler was cancelled, where it ran.
    assert (ended, type(kept[0].exception())) == (["penstock-loop-group-t"], SystemExit)
    assert [point.offset for point in broker.committed(group_of("t")).values()] in ([], [0])
