"""Reports of a consumer on itself: stuck handlers with stacks, why a partition stands still, counts that add up."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import tenacity

from penstock.consumer import ConsumerStatistics, DeferredCompletion, Explanation, LitePushConsumer, handler, retry
from penstock.message import Message
from penstock.testing import TestApp, TestBroker
from support.consumers import PoisonError, app_of, consumer_of
from waiting import wait_until


class Stuck:
    """Where something waits until a test ends."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def waits_for_what_never_comes(self) -> None:
        self.released.wait()

    async def waits_on_the_loop(self) -> None:
        await asyncio.to_thread(self.released.wait)


@contextmanager
def running(
    function: Callable[..., object],
    stuck: Stuck,
    values: tuple[bytes, ...],
    stall_after: float = 5.0,
    **options: object,
) -> Iterator[LitePushConsumer]:
    """Run a consumer with a running clock, and release stuck handlers at the end."""
    broker = TestBroker()
    broker.create_topic("t", 1)
    for value in values:
        broker.produce("t", value, key=b"secret-key")
    one = handler(function, **options)  # type: ignore[arg-type] # options of several types
    with consumer_of(broker, {"t": one}, stall_after=stall_after) as consumer:
        try:
            yield consumer
        finally:
            stuck.released.set()


def test_a_handler_that_is_stuck_is_named_with_its_stack_and_what_it_holds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    stuck = Stuck()

    def function(_message: Message) -> None:
        stuck.waits_for_what_never_comes()

    with running(function, stuck, (b"secret-value",) * 2) as consumer:
        wait_until(lambda: consumer.statistics().stalls >= 3 and "in waits_for_what_never_comes" in caplog.text)

    said = [record.getMessage() for record in caplog.records if "has been in" in record.getMessage()]
    assert "t:0@0 has been in" in said[0]
    assert "the watermark of t:0 is 0, held by this message" in said[0]
    assert "in waits_for_what_never_comes" in said[-1]
    assert "penstock-worker-" in said[0]
    # Again only when the time has doubled, and never with what the message holds.
    ages = [float(text.split(" for ")[1].split(" s on")[0]) for text in said]
    assert all(later >= 2 * former - 0.15 for former, later in pairwise(ages))  # they are rounded to tenths
    assert "secret" not in caplog.text


def test_a_handler_that_waits_on_the_loop_shows_where_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    stuck = Stuck()

    async def function(_message: Message) -> None:
        await stuck.waits_on_the_loop()

    with running(function, stuck, (b"x",)) as consumer:
        # The clock goes on by itself: the first report may come before the handler has reached where it waits.
        wait_until(lambda: "in waits_on_the_loop" in caplog.text)
        (said,) = consumer.explain()

    assert "in function" in caplog.text
    assert (said.state, said.key) == ("in handler", b"secret-key")
    assert (said.worker or "").startswith("penstock-task-")


def test_a_handler_that_blocks_the_loop_is_reported_with_the_loops_stack(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    stuck = Stuck()

    async def function(_message: Message) -> None:
        stuck.waits_for_what_never_comes()

    # The loop's own clock does not go on by itself.
    with running(function, stuck, (b"x",), stall_after=0.3):
        wait_until(lambda: "the event loop has been blocked" in caplog.text)

    report = next(text for record in caplog.records if "event loop" in (text := record.getMessage()))
    assert "in waits_for_what_never_comes" in report


@pytest.mark.parametrize(("option", "batch"), [("filter", 1), ("decoder", 1), ("filter", 5)])
def test_what_is_asked_before_the_handler_and_never_answers_is_named_like_a_handler(
    option: str, batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    stuck = Stuck()

    def asked(given: Message | bytes) -> bool:
        if (given.value if isinstance(given, Message) else given) == b"hangs":
            stuck.waits_for_what_never_comes()
        return True

    with running(lambda _: None, stuck, (b"passes", b"hangs"), batch=batch, **{option: asked}) as consumer:
        wait_until(lambda: "in waits_for_what_never_comes" in caplog.text)
        (said,) = consumer.explain()

    # Of a batch nothing is done before it was handed over.
    assert said.blocking_offset == (1 if batch == 1 else 0)
    assert said.state == "in handler" or batch > 1
    assert "t:0@1 has been in" in caplog.text


def test_every_state_of_the_message_that_holds_the_watermark_is_reported() -> None:
    app, said, completion = app_of(workers=1), dict[str, Explanation](), DeferredCompletion()

    @app.handler("t", retry=retry(attempts=2, wait=tenacity.wait_fixed(30)), on_failure="drop")
    def handle(message: Message) -> DeferredCompletion | None:
        if message.value == b"handler":
            said["in handler"] = next(explanation for explanation in test.explain() if explanation.partition == 0)
            said["queued"] = next(explanation for explanation in test.explain() if explanation.partition == 1)
        if message.value == b"poison":
            raise PoisonError
        return completion if message.value == b"deferred" else None

    with TestApp(app, partitions=2) as test:

        def of_first() -> Explanation:
            return next(explanation for explanation in test.explain() if explanation.partition == 0)

        def send(key: str, *values: str) -> Explanation:
            for value in values:
                test.send("t", value, key=key, partition=0)
            test.settle()
            return of_first()

        def set_rate(rate: float | None) -> None:
            engine = test._running().engine
            engine.routes["t"].change(retry=None, rate=rate, key_rate=None)
            engine.processor.wake_all()

        test.settle()
        idle = of_first()
        test.send("t", "x", key="q", partition=1)
        send("a", "handler")
        parked = send("b", "poison", "behind")
        test.advance(40)
        put_off = send("c", "deferred", "behind")
        test.send("t", "above", key="d", partition=0)
        test.settle()
        gaps = of_first().gaps
        completion.complete()
        test.settle()
        set_rate(0)
        held = send("e", "held")
        test.advance(2)
        lag = of_first().lag
        set_rate(None)

    assert (idle.state, idle.blocking_offset, idle.in_flight) == ("position not known yet", None, 0)
    assert (said["in handler"].state, said["in handler"].key, said["in handler"].blocking_offset) == (
        "in handler",
        b"a",
        0,
    )
    assert (said["queued"].state, said["queued"].blocking_offset) == ("queued", 0)
    assert (parked.state, parked.key, parked.blocking_offset, parked.parked) == ("parked", b"b", 1, 2)
    assert (parked.due_in, parked.attempt) == (pytest.approx(30), 1)
    assert f"held by offset 1, parked ({parked.handler}) for" in str(parked)
    assert (put_off.state, put_off.key, put_off.blocking_offset, put_off.due_in) == ("put off", b"c", 3, None)
    assert (gaps, lag) == (1, 1)
    assert (held.state, held.blocking_offset, held.rate, held.worker) == ("held by rate", 6, 0, None)
    assert f"1 in flight ({held.bytes_in_flight} bytes), " in str(held)
    assert f"held by offset 6, held by rate 0/s ({held.handler})" in str(held)


def unaccounted(now: ConsumerStatistics) -> int:
    """Return by how much the counts miss each other."""
    ended = now.restored + now.handled + now.filtered + now.dropped + now.dead_letters + now.retry_topic
    return now.received - ended - now.in_flight


@pytest.mark.parametrize("fate", ["drop", "dead_letter"])
def test_the_counts_add_up(fate: str) -> None:
    app, put_off = app_of(), list[DeferredCompletion]()
    twice = retry(attempts=2, wait=tenacity.wait_fixed(1))

    @app.handler("t", filter=lambda m: m.value != b"refused", retry=twice, retry_delays=(5,), on_failure=fate)
    def handle(message: Message) -> DeferredCompletion | None:
        if message.value == b"poison":
            raise PoisonError
        if message.value == b"later":
            put_off.append(DeferredCompletion())
            return put_off[-1]
        return None

    with TestApp(app, partitions=2) as test:
        for number in range(100):
            test.send("t", ("fine", "poison", "refused", "fine", "later")[number % 5], key=str(number % 50))
        seen = []
        for _ in range(10):
            test.advance(1)
            seen.append(unaccounted(test.statistics()))
        for _ in range(3):
            for completion in put_off:
                completion.complete()
            test.advance(20)
        end = test.statistics()

    assert (set(seen), unaccounted(end), end.in_flight) == ({0}, 0, 0)
    # The poisoned ones come a second time, by the retry topic.
    assert (end.received, end.filtered, end.retry_topic, end.handled, end.failed) == (120, 20, 20, 60, 80)
    assert (end.dropped, end.dead_letters) == ((20, 0) if fate == "drop" else (0, 20))
