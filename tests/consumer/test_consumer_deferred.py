"""Completions that handlers put off: step by step, and with other threads that complete them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import tenacity
from stepped import Stepped
from stepped_engine import ONCE_A_SECOND, SteppedEngine

from penstock.consumer import DeferredCompletion, Kind, handler, retry
from penstock.consumer.lanes.slot import ExecutionSlot
from penstock.message import Message
from penstock.testing import TestApp, TestBroker
from support.consumers import app_of, consumer_of
from waiting import wait_until


class Puts:
    """A handler that puts every completion off and keeps them by value."""

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self.calls: list[bytes | None] = []
        self.out: dict[bytes | None, DeferredCompletion] = {}

    def __call__(self, message: Message) -> DeferredCompletion:
        """Put it off."""
        self.calls.append(message.value)
        completion = self.out[message.value] = DeferredCompletion(self.timeout)
        return completion


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

    one = handler(fails, retry=retry(attempts=1), on_failure="dead_letter")
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
    stepped.write_out()

    assert after_first == ([b"poison", b"poison"], 2)
    assert [topic for topic, _ in stepped.deliveries.sent] == ["dlq.gone", "dlq.kept"]
    assert tried == [b"poison", b"poison", b"after"]
    assert stepped.of("kept").tracker.in_flight == 0


def test_a_completion_that_fails_is_retried_by_the_policy_from_the_time_of_its_own_first_try() -> None:
    puts = Puts()
    policy = retry(stop=tenacity.stop_after_delay(100), wait=tenacity.wait_fixed(1))
    stepped = SteppedEngine({"t": handler(puts, retry=policy, on_failure="drop")})
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


def test_a_completion_returned_for_two_messages_is_a_failure_of_the_second_only() -> None:
    shared = DeferredCompletion()
    stepped = SteppedEngine({"t": handler(lambda _: shared, retry=retry(attempts=1), on_failure="dead_letter")})

    stepped.feed("t", (b"a", b"1"), (b"b", b"2"))
    stepped.serve()
    stepped.write_out()
    watermark = stepped.of("t").tracker.watermark
    shared.complete()
    stepped.serve()

    assert stepped.failures == []
    assert stepped.deliveries.sent == [("dlq.t", b"2")]
    assert watermark == 0
    assert stepped.of("t").tracker.in_flight == 0


def test_a_completion_that_stays_out_too_long_has_failed_and_a_late_one_changes_nothing() -> None:
    puts = Puts(timeout=5)
    stepped = SteppedEngine({"t": handler(puts, retry=ONCE_A_SECOND)})
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


class PutsLate:
    """A handler that defers messages with the key `late` and keeps the completions; all others are done at once."""

    def __init__(self) -> None:
        self.calls: list[bytes | None] = []
        self.out: dict[bytes | None, DeferredCompletion] = {}

    def __call__(self, message: Message) -> DeferredCompletion | None:
        """Put it off, or not."""
        self.calls.append(message.value)
        if message.key != b"late":
            return None
        # Noted before it is returned: another thread may complete it before the consumer has it.
        return self.out.setdefault(message.value, DeferredCompletion())


def test_a_thousand_completions_that_race_with_their_handlers_are_all_done_in_order() -> None:
    broker, order = TestBroker(), dict[bytes | None, list[int]]()
    broker.create_topic("t", 1)
    for number in range(1000):
        broker.produce("t", b"x", key=b"k%d" % (number % 10))

    with ExitStack() as threads:

        def races(message: Message) -> DeferredCompletion:
            order.setdefault(message.key, []).append(message.offset)
            completion = DeferredCompletion()
            thread = threading.Thread(target=completion.complete)
            threads.callback(thread.join)
            thread.start()
            return completion

        with consumer_of(broker, {"t": handler(races)}) as consumer:
            now = wait_until(
                lambda: (now := consumer.statistics()).handled == 1000 and not now.in_flight + now.parked_keys and now
            )

    assert all(offsets == sorted(offsets) for offsets in order.values())
    assert sum(map(len, order.values())) == 1000
    assert (now.in_flight, now.deferred, now.parked_keys) == (0, 0, 0)


def test_a_drain_waits_for_completions_and_for_what_waits_behind_them() -> None:
    broker, puts = TestBroker(), PutsLate()
    broker.create_topic("t", 1)
    for value in (b"1", b"2", b"3"):
        broker.produce("t", value, key=b"late")
    # On the broker's clock, which goes on by itself.
    consumer = consumer_of(broker, {"t": handler(puts)}, stop_timeout=1e6).start()
    wait_until(lambda: consumer.statistics().received == 3 and b"1" in puts.out)

    stopping = ThreadPoolExecutor().submit(consumer.stop)
    wait_until(lambda: "stopping" in {partition.paused for partition in consumer.statistics().partitions})
    for value in (b"1", b"2", b"3"):
        wait_until(lambda value=value: value in puts.out)
        puts.out[value].complete()

    assert stopping.result(60)
    assert broker.committed("group-t")["t", 0].offset == 3


def test_a_restart_hands_a_message_over_again_whose_completion_was_out() -> None:
    app, puts = app_of(stop_timeout=5.0), PutsLate()
    app.handler("t")(puts)

    with TestApp(app) as test:
        test.send("t", "1", key="late")
        test.send("t", "2", key="other")
        test.settle()
        drained, late = test.stop(), puts.out.pop(b"1")
        between = test.committed("t")
        # What it says of a consumer that has ended moves nothing.
        late.complete()
        test.start()
        test.settle()
        puts.out[b"1"].complete()

    assert (drained, between) == (False, {0: 0})
    assert puts.calls == [b"1", b"2", b"1"]
    assert test.committed("t") == {0: 2}


@pytest.mark.parametrize("in_time", [True, False])
def test_a_revocation_waits_for_completions_no_longer_than_its_budget(*, in_time: bool) -> None:
    puts = PutsLate()

    def wait(seconds: float) -> None:
        stepped.broker.advance(seconds)
        if in_time:
            puts.out[b"1"].complete()

    stepped = Stepped({"t": handler(puts)}, wait=wait, revoke_timeout=5.0, commit_interval=3600.0)
    stepped.feed("t", [(b"late", b"1"), (b"other", b"2")])
    stepped.serve()
    before = stepped.broker.clock.monotonic()

    # Leaving revokes.
    stepped.loop.leave()

    # Done in time it is committed in the callback; too late, its next owner gets it, and the late word costs nothing.
    assert stepped.committed("t") == (2 if in_time else 0)
    assert stepped.broker.clock.monotonic() - before == pytest.approx(0 if in_time else 5, abs=1)
    assert puts.out[b"1"].complete() is not in_time
