"""Batches that are gathered from a lane, step by step: no threads, no broker, and a clock that stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tenacity
from stepped_engine import ONCE_A_SECOND, SteppedEngine

from penstock.consumer import DeferredCompletion, Kind, handler, retry
from penstock.consumer.execution_slot import ExecutionSlot
from penstock.errors import BatchError
from penstock.message import Message


class Batches:
    """A batch handler that keeps the values of its batches and fails as it is told."""

    def __init__(self, fail: Callable[[list[bytes | None]], BaseException | None] = lambda _: None) -> None:
        self.calls: list[list[bytes | None]] = []
        self._fail = fail

    def __call__(self, messages: list[Message]) -> None:
        """Take a batch."""
        values = [message.value for message in messages]
        self.calls.append(values)
        error = self._fail(values)
        if error is not None:
            raise error


def test_many_messages_of_one_key_come_in_one_list_and_in_order() -> None:
    seen = Batches()
    stepped = SteppedEngine({"t": handler(seen, batch=100)})

    stepped.feed("t", *[(b"k", b"%d" % i) for i in range(250)])
    stepped.serve()

    assert [len(values) for values in seen.calls] == [100, 100, 50]
    assert [value for values in seen.calls for value in values] == [b"%d" % i for i in range(250)]
    assert stepped.of("t").tracker.in_flight == 0


def test_a_batch_that_is_not_full_waits_for_linger_and_a_full_one_does_not() -> None:
    seen = Batches()
    stepped = SteppedEngine({"t": handler(seen, batch=3, linger=10)})

    stepped.feed("t", (b"k", b"1"), (b"k", b"2"))
    stepped.serve()
    stepped.pass_time(9)
    waiting = list(seen.calls)
    stepped.feed("t", (b"k", b"3"), (b"k", b"4"))
    stepped.serve()
    full = list(seen.calls)
    stepped.pass_time(9)
    not_yet = list(seen.calls)
    stepped.pass_time(1.1)

    assert waiting == []
    assert full == not_yet == [[b"1", b"2", b"3"]]
    assert seen.calls == [[b"1", b"2", b"3"], [b"4"]]


def test_a_batch_that_cannot_grow_does_not_wait_for_linger() -> None:
    # Behind it stand messages of another partition: those that come for this one cannot join it.
    seen = Batches()
    stepped = SteppedEngine({"a": handler(seen, batch=3, linger=10), "b": handler(seen, batch=3, linger=10)})

    stepped.feed("a", (b"k", b"a1"))
    stepped.feed("b", (b"k", b"b1"))
    stepped.serve()

    assert seen.calls == [[b"a1"]]


def test_a_drain_that_begins_while_a_batch_decides_to_wait_is_not_missed() -> None:
    seen = Batches()
    stepped = SteppedEngine({"t": handler(seen, batch=3, linger=10)})
    stepped.feed("t", (b"k", b"1"))
    lane = stepped.engine.scheduler.take(0)
    assert lane is not None
    processor = stepped.engine.processor

    with pytest.raises(StopIteration) as decided:
        processor.process(lane, ExecutionSlot(Kind.THREAD, "deciding")).send(None)
    # The drain sets its mark and finds the lane held, so it cannot wake it.
    processor.draining = True
    processor.wake_lane(lane)
    processor.give_back(lane, decided.value.value)
    stepped.serve()

    assert seen.calls == [[b"1"]]


def test_what_a_batch_error_names_comes_again_with_what_is_behind_it_and_the_rest_is_done() -> None:
    failing = {b"a2": ValueError("named")}
    seen = Batches(lambda values: BatchError({1: failing.pop(b"a2")}) if b"a2" in values and failing else None)
    stepped = SteppedEngine({"t": handler(seen, batch=10, retry_policy=ONCE_A_SECOND)})

    stepped.feed("t", (b"a", b"a1"), (b"a", b"a2"), (b"b", b"b1"), (b"a", b"a3"), (b"b", b"b2"))
    stepped.serve()
    after_first = (stepped.of("t").tracker.in_flight, stepped.count("handled"))
    stepped.feed("t", (b"a", b"a4"))
    stepped.serve()
    stepped.pass_time(1)

    assert after_first == (2, 3)
    assert seen.calls == [[b"a1", b"a2", b"b1", b"a3", b"b2"], [b"a2"], [b"a3", b"a4"]]
    assert stepped.of("t").tracker.in_flight == 0


@pytest.mark.parametrize(
    "failed",
    [{}, {7: ValueError()}, {-1: ValueError()}, {"1": ValueError()}, {0: ValueError(), 7: ValueError()}, {1.5: None}],
    ids=str,
)
def test_a_batch_error_that_names_what_is_not_there_fails_all(failed: dict[int, BaseException]) -> None:
    first = [BatchError(failed)]
    seen = Batches(lambda _: first.pop() if first else None)
    stepped = SteppedEngine({"t": handler(seen, batch=10, retry_policy=ONCE_A_SECOND)})

    stepped.feed("t", (b"a", b"a1"), (b"b", b"b1"), (b"a", b"a2"))
    stepped.serve()
    in_flight = stepped.of("t").tracker.in_flight
    stepped.pass_time(1)

    assert stepped.failures == []
    assert in_flight == 3
    assert seen.calls == [[b"a1", b"b1", b"a2"]] * 2
    assert stepped.of("t").tracker.in_flight == 0


@pytest.mark.parametrize("reason", [None, "words", 3])
def test_a_batch_error_may_name_a_message_without_an_exception(reason: object) -> None:
    first = [BatchError({0: reason})]  # type: ignore[dict-item] # what a user may write
    seen = Batches(lambda _: first.pop() if first else None)
    stepped = SteppedEngine({"t": handler(seen, batch=10, retry_policy=ONCE_A_SECOND)})

    stepped.feed("t", (b"a", b"a1"), (b"b", b"b1"))
    stepped.serve()
    stepped.pass_time(1)

    assert stepped.failures == []
    assert seen.calls == [[b"a1", b"b1"], [b"a1"]]


def test_a_batch_that_fails_keeps_the_order_of_a_key_whose_later_message_cannot_be_decoded() -> None:
    first = [ValueError("all of it")]
    seen = Batches(lambda _: first.pop() if first else None)
    stepped = SteppedEngine(
        {"t": handler(seen, batch=10, decoder="json", retry_policy=ONCE_A_SECOND, on_failure="dead_letter")}
    )

    stepped.feed("t", (b"k", b"1"), (b"k", b"not json"), (b"k", b"3"))
    stepped.serve()
    stepped.send_out()
    stepped.deliveries.acknowledge()
    stepped.serve()
    stepped.pass_time(1)
    stepped.send_out()
    stepped.deliveries.acknowledge()
    stepped.serve()

    assert seen.calls == [[b"1"], [b"1"], [b"3"]]
    assert stepped.deliveries.sent == [("dlq.t", b"not json")]
    assert stepped.of("t").tracker.in_flight == 0


def test_a_batch_that_fails_keeps_the_order_of_a_key_whose_next_message_is_not_due_by_its_rate() -> None:
    first = [ValueError("all of it")]
    seen = Batches(lambda _: first.pop() if first else None)
    stepped = SteppedEngine({"t": handler(seen, batch=10, key_rate=0.1, retry_policy=ONCE_A_SECOND)})

    stepped.feed("t", (b"k", b"1"), (b"other", b"x"), (b"k", b"2"))
    stepped.serve()
    for _ in range(60):
        stepped.pass_time(1)

    assert seen.calls == [[b"1", b"x"], [b"1", b"x"], [b"2"]]
    assert stepped.of("t").tracker.in_flight == 0


def test_a_batch_handler_that_puts_its_completion_off_fails_by_name_at_every_try() -> None:
    out: list[DeferredCompletion] = []

    def puts(_messages: list[Message]) -> DeferredCompletion:
        out.append(DeferredCompletion())
        return out[-1]

    stepped = SteppedEngine({"t": handler(puts, batch=2, retry_policy=retry(attempts=2, wait=tenacity.wait_fixed(1)))})
    stepped.feed("t", (b"k", b"1"))
    stepped.serve()
    stepped.pass_time(1)

    (stop,) = stepped.failures
    assert len(out) == 2
    assert "cannot put its completion off" in str(stop.__cause__)


def test_messages_of_a_parked_key_wait_behind_it_while_others_fill_batches() -> None:
    seen = Batches(lambda values: ValueError() if values[0] == b"bad" and len(seen.calls) < 3 else None)
    stepped = SteppedEngine({"t": handler(seen, batch=3, retry_policy=retry(attempts=9, wait=tenacity.wait_fixed(1)))})

    stepped.feed("t", (b"a", b"bad"))
    stepped.serve()
    stepped.feed("t", (b"a", b"a2"), (b"b", b"b1"), (b"a", b"a3"), (b"c", b"c1"), (b"b", b"b2"))
    stepped.serve()
    before = list(seen.calls)
    stepped.pass_time(1)

    assert before == [[b"bad"], [b"b1", b"c1", b"b2"]]
    assert seen.calls[2:] == [[b"bad"], [b"a2", b"a3"]]


def test_one_of_a_batch_becomes_a_dead_letter_and_the_others_are_done() -> None:
    def fail(values: list[bytes | None]) -> BaseException | None:
        places = {place: ValueError() for place, value in enumerate(values) if value == b"poison"}
        return BatchError(places) if places else None

    seen = Batches(fail)
    stepped = SteppedEngine({"t": handler(seen, batch=3, retry_policy=ONCE_A_SECOND, on_failure="dead_letter")})

    stepped.feed("t", (b"a", b"a1"), (b"b", b"poison"), (b"b", b"b2"))
    stepped.serve()
    for _ in range(2):
        stepped.pass_time(1)
    stepped.send_out()
    behind = [values for values in seen.calls if b"b2" in values]
    stepped.deliveries.acknowledge()
    stepped.serve()

    assert behind == [[b"a1", b"poison", b"b2"]]
    assert seen.calls[1:] == [[b"poison"], [b"poison"], [b"b2"]]
    assert stepped.deliveries.sent == [("dlq.t", b"poison")]
    assert stepped.of("t").tracker.in_flight == 0


def test_an_async_batch_is_served_by_the_same_rules() -> None:
    calls: list[list[bytes | None]] = []

    async def fails_once(messages: list[Message]) -> None:
        calls.append([message.value for message in messages])
        if len(calls) == 1:
            raise BatchError({1: ValueError()})

    stepped = SteppedEngine({"t": handler(fails_once, batch=10, retry_policy=ONCE_A_SECOND)})

    stepped.feed("t", (b"a", b"1"), (b"b", b"2"), (b"b", b"3"), (b"c", b"4"))
    stepped.serve()
    stepped.pass_time(1)

    assert calls == [[b"1", b"2", b"3", b"4"], [b"2"], [b"3"]]
