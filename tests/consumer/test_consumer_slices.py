"""Slices: messages that are handed over in one step, and their completion if a handler hangs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from stepped import Stepped
from stepped_engine import SteppedEngine

from penstock.consumer import Kind, handler, retry
from penstock.consumer.handlers.call_guard import CallGuard
from penstock.consumer.handlers.results import Results
from penstock.consumer.lanes.slot import ExecutionSlot, Outcome, Slice
from penstock.consumer.run.handler_calls import call
from penstock.errors import BatchError, HandlerTimeLimitError
from penstock.message import Message
from penstock.outgoing import Outgoing
from support.consumers import nothing

_TEN = [(b"k%d" % number, b"%d" % number) for number in range(10)]


def _serve(stepped: SteppedEngine, slot: ExecutionSlot) -> list[int]:
    """Serve the lane as a worker thread does; return how long its slices were."""
    processor, lane = stepped.engine.processor, stepped.engine.scheduler.take(0)
    assert lane is not None
    stepped.slots.append(slot)
    processing, lengths = processor.process(lane, slot), []
    outcome: Outcome = None
    try:
        while True:
            work = processing.send(outcome)
            assert isinstance(work, Slice)
            lengths.append(len(work))
            outcome = call(slot, work)
    except StopIteration:
        slot.leave()
        stepped.engine.scheduler.give_back(lane)
    return lengths


class Handled:
    """A handler that keeps the values it was given, and does something at one of them."""

    def __init__(self, at: bytes = b"", act: Callable[[], object] = lambda: None) -> None:
        self.values: list[bytes | None] = []
        self.act = act
        self._at = at

    def __call__(self, message: Message) -> None:
        self.values.append(message.value)
        if message.value == self._at:
            self.act()


def test_slow_messages_are_handed_over_until_the_lanes_time_is_over() -> None:
    slot = ExecutionSlot(Kind.THREAD, "slot")
    stepped = SteppedEngine({"t": handler(lambda _message: stepped.clock.advance(0.004))}, run_seconds=0.01)
    stepped.feed("t", *_TEN)

    lengths, handled = [], []
    while stepped.engine.scheduler.waiting(0):
        lengths += _serve(stepped, slot)
        handled.append(slot.handled)

    # Each slice has all that is there, and ends with the message at which the time is over.
    assert lengths == [10, 7, 4, 1]
    assert handled == [3, 6, 9, 10]
    assert stepped.of("t").tracker.watermark == 10


def test_a_slice_that_is_cut_ends_with_the_message_under_way_and_the_rest_comes_next() -> None:
    slot = ExecutionSlot(Kind.THREAD, "slot")
    slot.slice_size = 10
    handled = Handled(b"3")
    stepped = SteppedEngine({"t": handler(handled)})

    def become_slow() -> None:
        stepped.clock.advance(0.1)
        slot.cut_slice(stepped.clock.monotonic() - 0.01)

    handled.act = become_slow
    stepped.feed("t", *_TEN)

    lengths = _serve(stepped, slot)

    assert lengths == [10, 6]
    assert handled.values == [value for _, value in _TEN]
    assert stepped.of("t").tracker.watermark == slot.handled == 10


def test_nothing_of_a_slice_begins_once_its_partition_is_revoked() -> None:
    slot = ExecutionSlot(Kind.THREAD, "slot")
    slot.slice_size = 10
    handled = Handled(b"3")
    stepped = SteppedEngine({"t": handler(handled)})
    handled.act = lambda: stepped.revoke("t")
    stepped.feed("t", *_TEN)

    _serve(stepped, slot)

    assert handled.values == [b"0", b"1", b"2", b"3"]


def test_a_failure_in_a_slice_parks_its_key_alone() -> None:
    slot = ExecutionSlot(Kind.THREAD, "slot")
    slot.slice_size = 10

    def fail() -> None:
        raise ValueError

    handled = Handled(b"3", fail)
    stepped = SteppedEngine({"t": handler(handled)})
    stepped.feed("t", *_TEN, (b"k3", b"behind"), (b"k4", b"on"))

    _serve(stepped, slot)

    assert handled.values == [value for _, value in _TEN] + [b"on"]
    assert slot.failed == 1
    assert stepped.of("t").tracker.gaps() == [range(4, 10), range(11, 12)]


def test_what_a_slice_has_done_counts_and_is_sent_while_a_handler_behind_it_hangs() -> None:
    slot = ExecutionSlot(Kind.THREAD, "slot")
    slot.slice_size = 10
    seen: list[tuple[int, int, int, int]] = []

    def handle(message: Message) -> Outgoing | None:
        if message.value == b"6":
            for _ in range(2):
                slot.complete_finished()
                counts = (slot.handled, slot.filtered, stepped.engine.outbox.waiting)
                seen.append((*counts, stepped.of("t").tracker.watermark))
        return Outgoing("results", message.value) if message.value in (b"2", b"8") else None

    stepped = SteppedEngine({"t": handler(handle, filter=lambda message: int(message.value or 0) % 2 == 0)})
    stepped.feed("t", *_TEN)

    _serve(stepped, slot)
    stepped.send_out()
    in_flight = stepped.of("t").tracker.in_flight
    stepped.deliveries.acknowledge()

    # 0 and 4 are handled, 1, 3 and 5 refused, and the result of 2 is on its way: each once, however often one looks.
    assert seen == [(2, 3, 1, 2)] * 2
    assert (slot.handled, slot.filtered, in_flight) == (3, 5, 2)
    assert stepped.deliveries.sent == [("results", b"2"), ("results", b"8")]
    assert stepped.of("t").tracker.watermark == 10


def test_a_look_during_which_the_slot_was_at_another_run_completes_nothing() -> None:
    here, elsewhere = (SimpleNamespace(records=[object() for _ in range(3)], next=0) for _ in range(2))
    at = [here, elsewhere, here]

    class Changing(ExecutionSlot):
        run = property(lambda _self: at.pop(0), lambda _self, _run: None)  # type: ignore[assignment] # in steps

    slot = Changing(Kind.THREAD, "slot")
    slot.record = elsewhere.records[2]  # type: ignore[assignment] # compared by identity

    slot.complete_finished()

    assert here.next == 0


def test_what_has_results_is_not_done_by_a_look_at_a_slot_that_is_left_without_an_end() -> None:
    completed = list[int]()
    tracker = SimpleNamespace(complete=lambda _block, done: completed.extend(done))
    owner = SimpleNamespace(assignment=SimpleNamespace(tracker=tracker), block=None)
    run: Any = SimpleNamespace(records=[object() for _ in range(3)], indexes=[0, 1, 2], next=0, owner=owner)
    slot = ExecutionSlot(Kind.THREAD, "slot")
    slot.run, slot.results = run, [(run.records[0], Results([]))]

    slot.complete(run, 2, is_over=False)

    assert completed == []


class Late(CallGuard):
    """A guard of a call in which the time limit arrives once the handler has returned."""

    def settle(self) -> None:
        """Raise it the first time."""
        if self.is_interrupted:
            self.is_interrupted = False
            raise HandlerTimeLimitError


def test_a_message_whose_time_limit_comes_when_its_handler_has_returned_results_publishes_none_of_them() -> None:
    slot = ExecutionSlot(Kind.THREAD, "slot")
    slot.slice_size, slot.guard = 10, Late()

    def handle(message: Message) -> Outgoing:
        if message.value == b"3":
            assert slot.slice is not None
            slot.slice.cut()
            slot.guard.is_interrupted = True
        return Outgoing("results", message.value)

    stepped = SteppedEngine({"t": handler(handle, retry=retry(attempts=1), on_failure="drop")})
    stepped.feed("t", *_TEN)

    _serve(stepped, slot)
    stepped.send_out()

    assert [value for _, value in stepped.deliveries.sent] == [value for _, value in _TEN if value != b"3"]
    assert (slot.failed, slot.dropped, slot.results) == (1, 1, [])


def stuck_at_3(**settings: object) -> Stepped:
    """Return a consumer of five messages of one key whose handler is at offset 3."""
    stepped = Stepped({"t": handler(nothing)}, **settings)
    stepped.feed("t", [(b"k", b"%d" % i) for i in range(5)])
    worker = stepped.take()
    for _ in range(3):
        stepped.finish(worker)
    stepped.broker.advance(7)
    return stepped


def test_the_message_in_the_handler_is_named_and_not_its_finished_predecessors() -> None:
    stepped = stuck_at_3()

    (found,) = stepped.consumer.explain()
    counts = stepped.consumer.statistics()

    assert (found.blocking_offset, found.state, found.key) == (3, "in handler", b"k")
    assert found.worker == stepped.consumer.workers[0].slot.name
    assert found.age == pytest.approx(7)
    assert (found.watermark, found.in_flight, counts.handled, counts.in_flight) == (3, 2, 3, 2)


def test_work_finished_before_a_handler_that_hangs_is_in_the_next_commit_and_counted_once() -> None:
    stepped = stuck_at_3(commit_interval=1.0)

    stepped.poll(2)
    while_stuck = stepped.committed("t")
    stepped.serve()
    stepped.broker.advance(2)
    stepped.poll(2)
    counts = stepped.consumer.statistics()

    assert while_stuck == 3
    assert stepped.committed("t") == 5
    assert (counts.handled, counts.in_flight) == (5, 0)


def test_a_revocation_that_overruns_commits_what_its_handlers_finished() -> None:
    stepped = stuck_at_3(commit_interval=3600.0, revoke_timeout=1.0)

    # Leaving revokes, and waits for the handler as long as it may.
    stepped.loop.leave()

    assert stepped.committed("t") == 3


def test_a_message_that_failed_before_a_handler_that_hangs_is_not_taken_for_done() -> None:
    stepped = Stepped({"t": handler(nothing)}, lanes_per_worker=1)
    stepped.feed("t", [(b"a", b"0"), (b"b", b"1"), (b"c", b"2"), (b"a", b"3"), (b"c", b"4")])
    worker = stepped.take()

    stepped.finish(worker)
    stepped.finish(worker, ValueError())
    stepped.finish(worker)
    stepped.finish(worker)
    (found,) = stepped.consumer.explain()
    stepped.broker.advance(1)
    stepped.poll(2)
    committed = stepped.committed("t")

    assert (found.blocking_offset, found.state, found.key, found.in_flight) == (1, "parked", b"b", 2)
    assert committed == 1
    assert stepped.consumer.statistics().handled == 3


def test_a_batch_in_the_handler_is_done_as_a_whole_or_not_at_all() -> None:
    stepped = Stepped({"t": handler(nothing, batch=2)})
    stepped.feed("t", [(b"k", b"%d" % i) for i in range(6)])
    worker = stepped.take()

    stepped.finish(worker)
    (second,) = stepped.consumer.explain()
    stepped.finish(worker, BatchError({1: ValueError()}))
    (third,) = stepped.consumer.explain()

    assert (second.blocking_offset, second.state, second.in_flight) == (2, "in handler", 4)
    assert (third.blocking_offset, third.state) == (3, "parked")
