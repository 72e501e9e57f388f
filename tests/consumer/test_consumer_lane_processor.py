"""What a visit does with a lane, step by step: no threads, no broker, and a clock that stands."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import tenacity
from stepped_engine import SteppedEngine

from penstock.consumer import DeferredCompletion, Kind, handler, retry
from penstock.consumer.execution_slot import ExecutionSlot
from penstock.consumer.inspection.causes import Causes
from penstock.consumer.inspection.explain import explain
from penstock.errors import BatchError, PenstockError
from penstock.message import FixedRecord, Message

ONCE_A_SECOND = retry(attempts=3, wait=tenacity.wait_fixed(1))


class Puts:
    """A handler that puts every completion off and keeps them by value."""

    def __init__(self) -> None:
        self.calls: list[bytes | None] = []
        self.out: dict[bytes | None, DeferredCompletion] = {}

    def __call__(self, message: Message) -> DeferredCompletion:
        """Put it off."""
        self.calls.append(message.value)
        completion = self.out[message.value] = DeferredCompletion()
        return completion


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


NO_CAUSES = Causes({}, lambda _topic: None, lambda _topic: None)


def test_a_put_off_head_holds_its_key_and_its_offset_and_no_other_key() -> None:
    puts = Puts()
    stepped = SteppedEngine({"t": handler(puts)})

    stepped.feed("t", (b"k", b"1"), (b"k", b"2"), (b"other", b"3"))
    stepped.serve()
    before = (list(puts.calls), stepped.of("t").tracker.watermark)
    puts.out[b"1"].complete()
    stepped.serve()

    assert before == ([b"1", b"3"], 0)
    assert puts.calls == [b"1", b"3", b"2"]
    assert stepped.of("t").tracker.watermark == 1
    assert stepped.count("handled") == 1


def test_a_completion_of_a_revoked_partition_never_settles_the_message_behind_it() -> None:
    # One key in two topics: what waits behind the revoked head belongs to a partition that stays.
    puts = Puts()
    one = handler(puts)
    stepped = SteppedEngine({"gone": one, "kept": one})
    stepped.feed("gone", (b"k", b"old"))
    stepped.feed("kept", (b"k", b"new"))
    stepped.serve()

    stepped.revoke("gone")
    stepped.serve()
    while_out = list(puts.calls)
    puts.out[b"old"].complete()
    stepped.serve()
    in_flight = stepped.of("kept").tracker.in_flight
    puts.out[b"new"].complete()
    stepped.serve()

    # The key waited for the old work to end, and the new message was neither skipped nor called done for it.
    assert while_out == [b"old"]
    assert puts.calls == [b"old", b"new"]
    assert in_flight == 1
    assert stepped.of("kept").tracker.in_flight == 0


def test_a_dead_letter_acknowledged_after_a_revocation_never_settles_the_message_behind_it() -> None:
    tried: list[bytes | None] = []

    def fails(message: Message) -> None:
        tried.append(message.value)
        if message.value == b"poison":
            raise ValueError

    one = handler(fails, retry_policy=retry(attempts=1), on_failure="dead_letter")
    stepped = SteppedEngine({"gone": one, "kept": one})
    stepped.feed("gone", (b"k", b"poison"))
    stepped.feed("kept", (b"k", b"poison"), (b"k", b"after"))
    stepped.serve()
    stepped.send_out()

    stepped.revoke("gone")
    stepped.serve()
    stepped.deliveries.acknowledge()
    stepped.serve()
    after_first = (list(tried), stepped.of("kept").tracker.in_flight)
    stepped.send_out()
    stepped.deliveries.acknowledge()
    stepped.serve()

    assert after_first == ([b"poison", b"poison"], 2)
    assert [topic for topic, _ in stepped.deliveries.sent] == ["dlq.gone", "dlq.kept"]
    assert tried == [b"poison", b"poison", b"after"]
    assert stepped.of("kept").tracker.in_flight == 0


def test_a_partition_that_comes_back_waits_for_the_completion_of_its_former_owner() -> None:
    puts = Puts()
    stepped = SteppedEngine({"t": handler(puts)})
    stepped.feed("t", (b"k", b"1"))
    stepped.serve()
    first = puts.out[b"1"]

    stepped.revoke("t")
    again = stepped.assign("t")
    stepped.feed("t", (b"k", b"1"))
    stepped.serve()
    while_out = list(puts.calls)
    first.complete()
    stepped.serve()

    assert while_out == [b"1"]
    assert puts.calls == [b"1", b"1"]
    assert again.tracker.in_flight == 1


def test_a_completion_that_fails_is_retried_by_the_policy_from_the_time_of_its_own_first_try() -> None:
    puts = Puts()
    policy = retry(stop=tenacity.stop_after_delay(100), wait=tenacity.wait_fixed(1))
    stepped = SteppedEngine({"t": handler(puts, retry_policy=policy, on_failure="drop")})
    stepped.feed("t", (b"k", b"1"))
    stepped.serve()

    stepped.clock.advance(50)
    puts.out[b"1"].fail(ValueError())
    # By a slot that handled nothing before: what it began at says nothing of this message.
    stepped.serve(ExecutionSlot(Kind.THREAD, "fresh"))
    stepped.pass_time(1)
    retried = list(puts.calls)
    stepped.clock.advance(50)
    puts.out[b"1"].fail(ValueError())
    stepped.serve(ExecutionSlot(Kind.THREAD, "fresh"))

    assert retried == [b"1", b"1"]
    assert stepped.count("dropped") == 1


def test_a_completion_decided_before_it_is_returned_counts_at_once() -> None:
    def decides(message: Message) -> DeferredCompletion:
        completion = DeferredCompletion()
        if message.value == b"bad":
            completion.fail(ValueError())
        else:
            completion.complete()
        return completion

    stepped = SteppedEngine({"t": handler(decides, retry_policy=retry(attempts=1), on_failure="drop")})

    stepped.feed("t", (b"k", b"good"), (b"k", b"bad"), (b"k", b"good"))
    stepped.serve()

    assert stepped.of("t").tracker.in_flight == 0
    assert (stepped.count("handled"), stepped.count("dropped")) == (2, 1)
    assert stepped.engine.processor.deferred == {}


def test_a_completion_returned_for_two_messages_is_a_failure_of_the_second_only() -> None:
    shared = DeferredCompletion()
    stepped = SteppedEngine({"t": handler(lambda _: shared, retry_policy=retry(attempts=1), on_failure="dead_letter")})

    stepped.feed("t", (b"a", b"1"), (b"b", b"2"))
    stepped.serve()
    stepped.send_out()
    stepped.deliveries.acknowledge()
    stepped.serve()
    watermark = stepped.of("t").tracker.watermark
    shared.complete()
    stepped.serve()

    assert stepped.failures == []
    assert stepped.deliveries.sent == [("dlq.t", b"2")]
    assert watermark == 0
    assert stepped.of("t").tracker.in_flight == 0


def test_the_first_of_two_calls_decides_a_completion() -> None:
    puts = Puts()
    stepped = SteppedEngine({"t": handler(puts)})
    stepped.feed("t", (b"k", b"1"))
    stepped.serve()

    answers = [puts.out[b"1"].complete(), puts.out[b"1"].complete(), puts.out[b"1"].fail(ValueError())]
    stepped.serve()

    assert answers == [True, False, False]
    assert stepped.count("failed") == 0
    assert stepped.of("t").tracker.in_flight == 0


@pytest.mark.parametrize("error", [None, "words", 7])
def test_a_completion_failed_with_what_is_no_exception_has_failed_all_the_same(error: object) -> None:
    puts = Puts()
    stepped = SteppedEngine({"t": handler(puts, retry_policy=retry(attempts=1), on_failure="drop")})
    stepped.feed("t", (b"k", b"1"), (b"k", b"2"))
    stepped.serve()

    puts.out[b"1"].fail(error)  # type: ignore[arg-type] # what a callback of some client may hold
    stepped.serve()

    assert stepped.count("dropped") == 1
    assert puts.calls == [b"1", b"2"]


def test_a_completion_that_stays_out_too_long_has_failed_and_a_late_one_changes_nothing() -> None:
    puts = Puts()
    stepped = SteppedEngine({"t": handler(puts, deferred_timeout=5, retry_policy=ONCE_A_SECOND)})
    stepped.feed("t", (b"k", b"1"))
    stepped.serve()
    late = puts.out[b"1"]

    stepped.pass_time(4.9)
    in_time = stepped.count("failed")
    stepped.pass_time(0.2)
    failed = stepped.count("failed")
    stepped.pass_time(1)
    changed = late.complete()
    stepped.serve()

    assert (in_time, failed, changed) == (0, 1, False)
    assert puts.calls == [b"1", b"1"]
    assert stepped.of("t").tracker.in_flight == 1


def test_a_completion_that_came_keeps_neither_its_timer_nor_its_message_until_the_timeout() -> None:
    class Kept(FixedRecord):
        """A record that can be watched: its class has no slots."""

    puts = Puts()
    stepped = SteppedEngine({"t": handler(puts, deferred_timeout=600)})
    records = [Kept("t", 0, place, b"k%d" % place, b"%d" % place, (), None) for place in range(5_000)]
    watched = [weakref.ref(record) for record in records]

    stepped.engine.router.route(records, stepped.clock.monotonic())
    del records
    stepped.serve()
    waiting = len(stepped.engine.timers)
    for completion in puts.out.values():
        completion.complete()
    stepped.serve()
    gc.collect()

    assert waiting == 5_000
    assert len(stepped.engine.timers) < 2_000
    assert sum(ref() is not None for ref in watched) < 10
    assert stepped.engine.timers.next_due() is None


def test_a_completion_is_still_out_until_the_lane_that_goes_on_because_of_it_is_ready() -> None:
    puts = Puts()
    stepped = SteppedEngine({"t": handler(puts)})
    stepped.feed("t", (b"k", b"1"), (b"k", b"2"))
    stepped.serve()
    out_when_woken: list[int] = []
    stepped.engine.executor.wake = lambda _: out_when_woken.append(len(stepped.engine.processor.deferred))  # type: ignore[method-assign] # heard

    puts.out[b"1"].complete()

    # A drain that looks between the two steps must see one of them.
    assert out_when_woken == [1]
    assert not stepped.engine.scheduler.idle


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


def test_a_filter_that_raises_is_asked_again_before_the_message_is_handed_over() -> None:
    seen: list[bytes | None] = []
    moods: list[RuntimeError | bool] = [RuntimeError("the filter's database is away"), False]

    def screen(message: Message) -> bool:
        if message.value == b"other":
            return True
        mood = moods.pop(0)
        if isinstance(mood, RuntimeError):
            raise mood
        return mood

    stepped = SteppedEngine(
        {"t": handler(lambda one: seen.append(one.value), filter=screen, retry_policy=ONCE_A_SECOND)}
    )
    stepped.feed("t", (b"k", b"refused"), (b"k", b"other"))
    stepped.serve()
    stepped.pass_time(1)

    assert seen == [b"other"]
    assert (stepped.count("filtered"), stepped.count("failed"), stepped.count("handled")) == (1, 1, 1)
    assert stepped.of("t").tracker.in_flight == 0


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

    stepped = SteppedEngine({"t": handler(fails, retry_policy=retry(attempts=3, wait=no_wait))})
    stepped.feed("t", (b"k", b"1"), (b"k", b"2"))
    stepped.serve()

    (stop,) = stepped.failures
    assert isinstance(stop, PenstockError)
    assert "the retry policy of" in str(stop)
    assert "t[0]@0" in str(stop)
    assert isinstance(stop.__cause__, LookupError)
    assert stepped.of("t").tracker.in_flight == 2


def test_handlers_of_two_kinds_that_share_a_key_take_turns_on_one_lane() -> None:
    order: list[tuple[str, bytes | None]] = []

    def on_thread(message: Message) -> None:
        order.append((threading.current_thread().name, message.value))

    async def on_loop(message: Message) -> None:
        order.append(("loop", message.value))
        if message.value == b"2" and order.count(("loop", b"2")) == 1:
            raise ValueError

    stepped = SteppedEngine(
        {
            "sync": handler(on_thread, key_space="k"),
            "async": handler(on_loop, key_space="k", retry_policy=ONCE_A_SECOND),
        }
    )
    stepped.feed("sync", (b"k", b"1"))
    stepped.feed("async", (b"k", b"2"))
    stepped.feed("sync", (b"k", b"3"), (b"other", b"4"))
    stepped.serve()
    before = [value for _, value in order]
    stepped.pass_time(1)

    assert before == [b"1", b"2", b"4"]
    assert [value for _, value in order] == [b"1", b"2", b"4", b"2", b"3"]


def test_a_key_that_waits_for_ever_is_free_again_once_its_partition_is_gone() -> None:
    calls: list[bytes | None] = []

    def fails(message: Message) -> None:
        calls.append(message.value)
        if message.value == b"poison":
            raise ValueError

    stepped = SteppedEngine({"t": handler(fails, retry_policy=retry(wait=tenacity.wait_fixed(float("inf"))))})
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


def test_a_key_whose_retry_policy_is_broken_goes_with_its_partition() -> None:
    calls: list[bytes | None] = []

    def fails(message: Message) -> None:
        calls.append(message.value)
        raise ValueError

    def broken(_state: tenacity.RetryCallState) -> float:
        raise KeyError

    stepped = SteppedEngine({"t": handler(fails, retry_policy=retry(wait=broken))})
    stepped.feed("t", (b"k", b"1"))
    stepped.serve()
    stopped = list(stepped.failures)

    stepped.revoke("t")
    stepped.serve()

    assert "the retry policy" in str(stopped[0])
    assert stepped.engine.scheduler.lanes[0].parked == {}
