"""Calls of plain handlers, in the thread that serves a lane: for a message, a batch, or a slice of messages.

Whatever a handler raises is a failure of its message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import Context
from typing import Any

from penstock.consumer.assignments import ConsumerLane
from penstock.consumer.handlers.call_guard import CallAbandonedError
from penstock.consumer.handlers.results import DeferredCompletion
from penstock.consumer.handlers.route import Failed, failure_of
from penstock.consumer.lanes.processor import LaneProcessor
from penstock.consumer.lanes.slot import ExecutionSlot, LaneProcessing, Outcome, Slice
from penstock.errors import HandlerTimeLimitError, raised
from penstock.message import FetchedMessage, Message, Record

#: The generator of a lane, and the outcome of its running call.
Handover = tuple[LaneProcessing, Outcome]


#: A handler has finished its message, and left a context variable behind.
_LEFT_BEHIND = object()


def call(slot: ExecutionSlot, work: object) -> Outcome:
    """Call a slot's handler for a message, a batch or the records of a slice; return the last outcome.

    Raises `CallAbandonedError` if the thread no longer has a slot.

    A message does not see the context variables of the one before, as with tasks. A context per message would cost a
    tenth of an empty handler. So the records of a slice share an empty context until one of them has changed it.
    """
    guard = slot.guard
    outcome: Any = _LEFT_BEHIND
    try:
        guard.is_calling = True
        if isinstance(work, Slice):
            left = iter(work)
            while outcome is _LEFT_BEHIND:
                context = Context()
                outcome = context.run(_call_each, slot, work, left, context)
        else:
            outcome = Context().run(_call, slot, work)
        guard.is_calling = False
        if guard.is_interrupted:
            guard.settle()
    except HandlerTimeLimitError as error:
        # It arrived after the handler had returned. Only once: the rest is not interrupted.
        guard.is_calling = False
        guard.settle()
        outcome = Failed(error)
    result: Outcome = outcome
    return result


def _call(slot: ExecutionSlot, work: object) -> Outcome:
    try:
        route = slot.route
        returned = route.invoke(work)
        if returned is None or isinstance(returned, DeferredCompletion):
            return returned
        return route.make_results(returned, work)
    except:  # noqa: E722 - see `raised`; whatever a handler raises is its message's failure
        return failure_of(raised())


def _call_each(slot: ExecutionSlot, records: Slice, left: Iterator[Record], context: Context) -> object:  # noqa: C901 - in one piece, for speed
    route, results, refused = slot.route, slot.results, slot.refused
    invoke, prepare = route.invoke, route.prepare
    assignment, is_plain, is_slow = records.assignment, prepare is Message, slot.slice_size == 1
    message: Message | None
    try:
        for record in left:
            slot.record = record
            if is_plain:
                message = FetchedMessage()
                message._record = record  # noqa: SLF001 - see there
            else:
                message = prepare(record)
            if message is None:
                refused.append(record.offset())
            # `_call`, inlined: it is most of the cost of an empty handler.
            elif (returned := invoke(message)) is not None:
                if isinstance(returned, DeferredCompletion):
                    return returned
                if (made := route.make_results(returned, message)) is not None:
                    results.append((record, made))
            if not assignment.active:
                return None
            # A slice that was cut ends here, and the thread may no longer have a slot.
            if is_slow and len(records) > 1:
                time = slot.now()
                if results or time >= slot.deadline:
                    return None
                slot.started = time
            if context:
                return _LEFT_BEHIND
    except:  # noqa: E722 - see `raised`; whatever a handler raises is its message's failure
        return failure_of(raised())
    return None


def serve(
    lane: ConsumerLane,
    slot: ExecutionSlot,
    processor: LaneProcessor,
    handover: Handover | None = None,
) -> None:
    """Process a lane that the caller holds, with handler calls in this thread, and give it back.

    With `handover` it continues the generator of another thread, with an outcome for the call that runs there.
    Raises `CallAbandonedError` if the thread no longer has the lane.
    """
    processing, outcome = handover or (processor.process(lane, slot), None)
    slot.processing = processing
    send = processing.send
    is_holder = True
    try:
        while True:
            outcome = call(slot, send(outcome))
    except StopIteration:
        pass
    except CallAbandonedError:
        is_holder = False
        raise
    finally:
        if is_holder:
            slot.leave()
            processor.scheduler.give_back(lane)
