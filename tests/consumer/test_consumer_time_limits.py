"""Time limits: a handler that takes too long is interrupted at any place."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from types import FrameType
from typing import Any

import pytest
from stepped import Stepped
from tenacity import wait_fixed, wait_none

from penstock.consumer import Kind, handler, retry
from penstock.consumer.handlers import call_guard
from penstock.consumer.handlers.call_guard import CallGuard
from penstock.consumer.handlers.route import Failed
from penstock.consumer.lanes.slot import ExecutionSlot
from penstock.consumer.run import handler_calls
from penstock.consumer.run.handler_calls import call
from penstock.errors import HandlerTimeLimitError
from penstock.message import Message
from penstock.testing import TestApp
from support.consumers import app_of

# A handler that heeds the limit


def waits_in_python(_message: Message) -> None:
    while True:
        with suppress(Exception):  # as in many handlers: a loop that survives all errors
            time.sleep(0.001)


async def waits_on_the_loop(_message: Message) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("waits", [waits_in_python, waits_on_the_loop])
@pytest.mark.parametrize("batch", [1, 10])
def test_a_handler_over_its_limit_is_interrupted_and_its_message_failed(
    waits: Callable[[Message], Any], batch: int
) -> None:
    app, done = app_of(time_limit=0.5), list[bytes | None]()  # by then, other calls end on a busy machine, too
    options: dict[str, Any] = {"batch": batch, "retry": retry(2, wait=wait_none()), "on_failure": "dead_letter"}

    def first(given: Any) -> Message | None:
        values = [message.value for message in (given if isinstance(given, list) else [given])]
        if b"hangs" in values:
            return Message  # type: ignore[return-value] # anything that is not None
        done.extend(values)
        return None

    if waits is waits_in_python:
        app.handler("t", **options)(lambda given: None if first(given) is None else waits(given))
    else:

        @app.handler("t", **options)
        async def handle(given: Any) -> None:
            if first(given) is not None:
                await waits(given)

    with TestApp(app) as test:
        for key, value in [("a", "hangs"), ("a", "next"), ("b", "other")]:
            test.send("t", value, key=key)
        test.advance(2)

        (letter,) = test.dead_letters("t")
        assert (letter.value, sorted(filter(None, done))) == (b"hangs", [b"next", b"other"])
        assert dict(letter.headers)["penstock-exception-class"] == b"penstock.errors.HandlerTimeLimitError"
        assert b"waits_" in (dict(letter.headers)["penstock-exception-stack"] or b"")
        # Of a batch the whole counts, and then each of its messages alone.
        assert test.statistics().over_time_limit >= 2
        assert test.committed("t") == {0: 3}


@pytest.mark.parametrize(("app_limit", "own"), [(None, None), (0.01, inf), (0.01, 60.0)])
def test_a_handler_without_a_limit_or_with_a_longer_one_takes_its_time(
    app_limit: float | None, own: float | None
) -> None:
    app, done = app_of(time_limit=app_limit), list[bytes | None]()

    @app.handler("t", time_limit=own)
    def handle(message: Message) -> None:
        time.sleep(0.05)
        done.append(message.value)

    with TestApp(app) as test:
        test.send("t", "slow")
        test.settle()

    assert done == [b"slow"]


@pytest.mark.parametrize("where", ["decoder", "encoder"])
def test_a_limit_that_is_over_in_a_decoder_or_an_encoder_is_no_fault_of_the_value(where: str) -> None:
    app, values = app_of(), list[Any]()

    def slow_at_first(value: Any) -> bytes:
        values.append(value)
        while len(values) == 1:
            time.sleep(0.001)
        return b"x"

    options: dict[str, Any] = {where: slow_at_first, "retry": retry(2, wait=wait_none())}
    app.handler("t", to="out", time_limit=0.5, **options)(lambda _: "returned")

    with TestApp(app, topics=["out"]) as test:
        test.send("t", "x")
        test.advance(2)

        assert (test.statistics().over_time_limit, len(test.published("out"))) == (1, 1)


def test_the_time_of_a_decoder_does_not_count_for_the_limit_of_a_batch() -> None:
    stepped = Stepped({"t": handler(print, batch=2, decoder=lambda value: stepped.broker.advance(9) or value)})

    stepped.feed("t", [(b"k", b"1")])

    assert stepped.take().slot.started == stepped.broker.clock.monotonic()


def test_a_handler_that_catches_the_limit_and_returns_has_done_its_work() -> None:
    app = app_of()

    @app.handler("t", time_limit=0.05)
    def handle(message: Message) -> None:
        try:
            waits_in_python(message)
        except HandlerTimeLimitError:
            return

    with TestApp(app) as test:
        test.send("t", "x")
        test.advance(2)

        assert (test.statistics().handled, test.statistics().failed, test.committed("t")) == (1, 0, {0: 1})


def test_a_message_says_how_often_it_was_over_its_limit() -> None:
    app = app_of()
    app.handler("t", time_limit=0.02, retry=retry(9, wait=wait_fixed(60)))(waits_in_python)

    with TestApp(app) as test:
        test.send("t", "x")
        test.settle()
        once = test.explain()[0]
        test.advance(60)
        twice = test.explain()[0]
        test.crash()

    assert (once.over_time_limit, twice.over_time_limit) == (1, 2)
    assert "after 1 failed try, over its time limit, 1 time, next try in" in str(once)
    assert "over its time limit, 2 times" in str(twice)


# The race between a call that ends and its interruption


def interrupted_at(step: int, slot: ExecutionSlot, work: Message) -> tuple[object, bool]:
    """Interrupt a call at its n-th step in Python; return the result, and whether it has so many steps."""
    code = {handler_calls.call.__code__, handler_calls._call.__code__, CallGuard.settle.__code__, quick.__code__}
    count, fired = 0, False

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count, fired
        if frame.f_code not in code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == step:
                fired = True
                slot.guard.interrupt(lambda: True, threading.get_ident())
        return trace

    sys.settrace(trace)
    try:
        outcome = call(slot, work)
    finally:
        sys.settrace(None)
    return outcome, fired


def quick(_message: object) -> None:
    for _ in range(2):
        len("")


@pytest.mark.parametrize("arrives", [True, False])
def test_an_interruption_hits_the_call_it_was_meant_for_or_nothing_wherever_that_ends(
    arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not arrives:  # before the call has ended
        raise_in = call_guard._raise_in
        monkeypatch.setattr(
            call_guard, "_raise_in", lambda ident: raise_in(ident) if not slot.guard.is_calling else None
        )
    slot = ExecutionSlot(Kind.THREAD, "slot")
    slot.route = type("Route", (), {"invoke": staticmethod(quick)})  # type: ignore[assignment] # what a call needs of it
    message, outcomes = object.__new__(Message), list[object]()

    for step in range(1, 10_000):
        outcome, fired = interrupted_at(step, slot, message)
        if not fired:
            break
        outcomes.append(outcome)
        # What is still to come would come now, or in the next call.
        for _ in range(100):
            len("")
        assert call(slot, message) is None
        assert not slot.guard.is_calling

    interrupted = [outcome for outcome in outcomes if outcome is not None]
    assert len(outcomes) > 50
    assert all(isinstance(failed, Failed) and isinstance(failed.error, HandlerTimeLimitError) for failed in interrupted)
    # Before and behind the call nothing is interrupted, and within it everything.
    assert 10 < len(interrupted) < len(outcomes) if arrives else not interrupted
