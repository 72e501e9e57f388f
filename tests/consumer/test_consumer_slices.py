"""Slices: consecutive messages that are handed over without a step of the lane processor in between."""

from __future__ import annotations

from collections.abc import Callable

from tests.consumer.stepped_engine import SteppedEngine

from penstock.consumer import Kind, handler, retry
from penstock.consumer.execution.handler_calls import call
from penstock.consumer.execution_slot import ExecutionSlot, Outcome, Slice, complete_finished
from penstock.consumer.handlers.call_guard import CallGuard
from penstock.errors import HandlerTimeLimitError
from penstock.message import Message
from penstock.outgoing import Outgoing

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


def test_messages_of_which_each_takes_its_time_are_handed_over_until_the_lanes_time_is_over() -> None:
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
                complete_finished([slot])
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
