"""What is done with a lane, step by step: no threads, no broker, and a clock that stands."""

from __future__ import annotations

import tenacity
from stepped_engine import SteppedEngine

from penstock.consumer import handler, retry
from penstock.consumer.inspect.explain import Causes, explain
from penstock.errors import PenstockError
from penstock.message import Message

NO_CAUSES = Causes({}, lambda _topic: None, lambda _topic: None)


def test_what_the_filter_refuses_need_not_have_a_key() -> None:
    seen: list[bytes | None] = []

    def own_key(message: Message) -> bytes:
        if message.value == b"refused":
            raise LookupError("this kind has no key")
        return b"k"

    stepped = SteppedEngine(
        {"t": handler(lambda one: seen.append(one.value), filter=lambda one: one.value != b"refused", key=own_key)}
    )
    stepped.feed("t", (None, b"refused"), (None, b"1"))
    stepped.serve()

    assert seen == [b"1"]
    assert (stepped.count("filtered"), stepped.count("failed")) == (1, 0)
    assert stepped.of("t").tracker.in_flight == 0


def test_a_retry_policy_that_raises_stops_the_consumer_by_name_and_keeps_the_offset() -> None:
    def no_wait(_state: tenacity.RetryCallState) -> float:
        raise LookupError("a defect of the policy")

    def fails(_message: Message) -> None:
        raise ValueError

    stepped = SteppedEngine({"t": handler(fails, retry=retry(attempts=3, wait=no_wait))})
    stepped.feed("t", (b"k", b"1"), (b"k", b"2"))
    stepped.serve()

    (stop,) = stepped.failures
    assert isinstance(stop, PenstockError)
    assert "the retry policy of" in str(stop)
    assert "t[0]@0" in str(stop)
    assert isinstance(stop.__cause__, LookupError)
    assert stepped.of("t").tracker.in_flight == 2


def test_a_key_that_waits_for_ever_is_free_again_once_its_partition_is_gone() -> None:
    calls: list[bytes | None] = []

    def fails(message: Message) -> None:
        calls.append(message.value)
        if message.value == b"poison":
            raise ValueError

    stepped = SteppedEngine({"t": handler(fails, retry=retry(wait=tenacity.wait_fixed(float("inf"))))})
    stepped.feed("t", (b"k", b"poison"), (b"other", b"1"))
    stepped.serve()
    stepped.pass_time(1e9)
    while_assigned = list(calls)
    found = explain([stepped.of("t")], stepped.slots, stepped.engine.scheduler, stepped.clock.monotonic(), NO_CAUSES)

    stepped.revoke("t")
    stepped.serve()
    again = stepped.assign("t", start=2)
    stepped.feed("t", (b"k", b"2"))
    stepped.serve()

    assert while_assigned == [b"poison", b"1"]
    assert (found[0].state, found[0].due_in, found[0].attempt) == ("parked", None, 1)
    assert calls == [b"poison", b"1", b"2"]
    assert again.tracker.in_flight == 0
    assert stepped.engine.scheduler.lanes[0].parked == {}
