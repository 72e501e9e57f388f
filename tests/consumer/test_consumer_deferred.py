"""Completions that handlers put off, with other threads that complete them: stop, restart and revocation.

`test_consumer_lane_completions` has what becomes of them step by step.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from stepped import Stepped

from penstock.consumer import DeferredCompletion, handler
from penstock.message import Message
from penstock.testing import TestApp, TestBroker
from support.consumers import app_of, consumer_of
from waiting import wait_until


class Puts:
    """A handler that puts off what has the key `late` and keeps the completions; everything else is done at once."""

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
    broker, puts, stopped = TestBroker(), Puts(), list[bool]()
    broker.create_topic("t", 1)
    for value in (b"1", b"2", b"3"):
        broker.produce("t", value, key=b"late")
    # On the broker's clock, which goes on by itself.
    consumer = consumer_of(broker, {"t": handler(puts)}, stop_timeout=1e9).start()
    wait_until(lambda: consumer.statistics().received == 3 and b"1" in puts.out)
    stopping = threading.Thread(target=lambda: stopped.append(consumer.stop()))

    stopping.start()
    wait_until(lambda: "stopping" in {partition.paused for partition in consumer.statistics().partitions})
    for value in (b"1", b"2", b"3"):
        wait_until(lambda value=value: value in puts.out)
        puts.out[value].complete()
    stopping.join()

    assert stopped == [True]
    assert broker.committed("group-t")["t", 0].offset == 3


def test_a_restart_hands_a_message_over_again_whose_completion_was_out() -> None:
    app, puts = app_of(stop_timeout=5.0), Puts()
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
    puts = Puts()

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
