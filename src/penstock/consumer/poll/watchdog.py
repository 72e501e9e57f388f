"""The watchdog: it looks at the calls of handlers under way, reports those that take long, and ends those that may not.

It runs on the poll thread. Calls that do not come back are reported with their stacks, once a second at most, and so is
an event loop that is blocked. Where handlers have a time limit, or somebody wants a message to be given up, it looks at
each step: a call over its limit is interrupted through the executor (`handlers/call_guard.py` says how). It counts from
when the call was first seen, so it is never interrupted too early, and up to a step of the poll loop too late. An
`async def` with a limit cancels itself; here it is cancelled by request only.

A call that was interrupted and does not return, for its thread waits within C, or its task goes on where it was
cancelled, is abandoned `GRACE_S` later. Its message fails for good, and is given up as its handler says or as somebody
has asked. Its offset is done then, so it does not come again. Its key is blocked until the call returns
(`ParkedKey.call`). Another thread or task takes the place of its own. Each of those stays, with what it holds, as long
as the process: where half of the places have gone so, the process is to be started again.
"""

from __future__ import annotations

import logging
import sys
import traceback
from asyncio import Task
from collections.abc import Sequence
from functools import partial

from penstock.consumer.assignments import Fetch
from penstock.consumer.engine import Engine
from penstock.consumer.handlers.call_guard import AbandonedCall
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.route import Failed
from penstock.consumer.inspect.statistics import in_handler, under_way
from penstock.consumer.lanes.slot import ExecutionSlot, SeenCall, complete_finished
from penstock.errors import HandlerTimeLimitError, WorkersBlockedError

_log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_MAX_FRAMES = 12
#: Seconds that an interrupted handler has to return.
GRACE_S = 5.0
#: Seconds for which an event loop has not come round, and counts as blocked.
_LOOP_BLOCKED_S = 1.0


class Watchdog:
    """Watches the slots of an engine. On the poll thread only, save where it says otherwise."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stall_after = engine.settings.stall_after
        # Whether a plain handler may have a time limit.
        limits = (engine.settings.time_limit, *(handler.time_limit for handler in engine.all_handlers))
        self._has_limits = engine.lane_plan.has_threads and any(limit is not None for limit in limits)
        #: When the poll thread last came by, on the engine's clock; None before its first turn. Any thread reads it.
        self.turned_at: float | None = None
        self._next = 0.0
        self._watched: dict[ExecutionSlot, SeenCall] = {}
        self._has_interrupted = False
        self._loop_reported = False

    def check(self, now: float) -> None:
        """Report, interrupt and abandon what is due."""
        self.turned_at = now
        engine = self._engine
        if engine.abandoned:
            engine.abandoned = tuple(call for call in engine.abandoned if not call.has_ended)
        is_time = now >= self._next
        if is_time:
            self._next = now + min(_INTERVAL_S, self._stall_after / 2)
            self._check_loop()
        # A request may be taken back and come again: how long its call has had to return stays known.
        looks_at_all = is_time or bool(engine.processor.give_ups) or self._has_interrupted
        if not (looks_at_all or self._has_limits):
            return
        former = self._watched
        if looks_at_all:
            self._watched = {}
        # Tasks may be thousands, and their limits are their own.
        slots = (slot for slot in engine.slots() if looks_at_all or slot.kind is Kind.THREAD)
        for slot, fetch, record in under_way(slots):
            call = former.get(slot)
            if call is None or call.record is not record or call.started != slot.started:
                call = SeenCall(slot, record, slot.started, now)
            self._watched[slot] = call
            if is_time:
                self._report_stall(call, fetch, now)
            self._check_call(call, fetch, now)
        self._has_interrupted = any(call.interrupted_at is not None for call in self._watched.values())

    def _report_stall(self, call: SeenCall, fetch: Fetch, now: float) -> None:
        """Report a call that takes long, and again each time that has doubled."""
        age = now - call.started
        if age < max(self._stall_after, 2 * call.reported_s):
            return
        call.reported_s = age
        self._engine.counts.stalls += 1
        complete_finished((call.slot,))
        watermark = fetch.assignment.tracker.watermark
        _log.warning(
            "%s; the watermark of %s is %d%s; the handler's stack:\n%s",
            in_handler(call.slot, fetch, call.record, now),
            fetch.assignment,
            watermark,
            ", held by this message" if watermark == call.record.offset() else "",
            _stack_text(call.slot),
        )

    def _check_loop(self) -> None:
        lag = self._engine.executor.loop_lag()
        blocked = lag.seconds >= self._stall_after
        if blocked and not self._loop_reported:
            _log.warning(
                "the event loop has been blocked for %.1f s: a handler calls something that waits without `await`, and "
                "every other handler on the loop waits with it; its stack:\n%s",
                lag.seconds,
                "".join(stack_of_thread(lag.thread_id)),
            )
        self._loop_reported = blocked

    def _check_call(self, call: SeenCall, fetch: Fetch, now: float) -> None:
        """Interrupt a call that is over its limit, or whose message is to be given up; later abandon it."""
        engine, route, slot = self._engine, fetch.assignment.route, call.slot
        where = (fetch.assignment.topic, fetch.assignment.partition, call.record.offset())
        place, name, limit = f"{fetch.assignment}@{where[2]}", route.handler.name, route.time_limit
        # Of this incarnation of its partition or another. A copy, made in one step: others ask and take meanwhile.
        if any((wanted.topic, wanted.partition, offset) == where for wanted, offset in list(engine.processor.give_ups)):
            why = "is to be given up"
        elif limit is not None and now - call.since >= limit:
            why = f"is over its time limit of {limit:g} s"
            if slot.kind is Kind.TASK and call.interrupted_at is None:
                call.interrupted_at = now  # by itself
        else:
            return
        if call.interrupted_at is None:
            if engine.executor.interrupt(call):
                call.interrupted_at = now
                _log.warning("%s in %s on %s %s: it is interrupted", place, name, slot.name, why)
            return
        if slot.kind is Kind.TASK and engine.executor.loop_lag().seconds > _LOOP_BLOCKED_S:
            # No task could end meanwhile, nor could one be abandoned: each try of that would hold the poll thread up.
            call.interrupted_at = now
            return
        room, left = engine.executor.room(slot.kind), sum(other.kind is slot.kind for other in engine.abandoned)
        if now - call.interrupted_at < GRACE_S or left >= room:
            return
        goes_on = "it waits outside of Python" if slot.kind is Kind.THREAD else "it has caught that and goes on"
        error = HandlerTimeLimitError(
            f"{name} did not return within {now - call.since:.1f} s, though it was interrupted {GRACE_S:g} s before "
            f"that: {goes_on}"
        )
        shows = partial(stack_of_thread, slot.thread_id) if slot.task is None else partial(stack_of_task, slot.task)
        abandoned = AbandonedCall(where, name, slot.kind, f"{slot.name} (abandoned)", shows, call.since)
        stack = _stack_text(slot)
        if not engine.executor.abandon(call, Failed(error, permanent=True, call=abandoned)):
            return
        del self._watched[slot]
        engine.abandoned += (abandoned,)
        _log.error(
            "%s is given up: %s. Its key waits until the call returns, and another %s takes the place of %s. The "
            "handler's stack:\n%s",
            place,
            error,
            slot.kind.value,
            slot.name,
            stack,
        )
        if 2 * (left + 1) >= room:
            what = "worker threads" if slot.kind is Kind.THREAD else "tasks"
            blocked = WorkersBlockedError(
                f"{left + 1} of {room} {what} of {engine.group} are in "
                "handlers that do not return: start the process again; their messages are given up and do not come "
                "again. Give what these handlers wait for a time-out of its own"
            )
            engine.stop_request.fail(blocked, drains=True)


def _stack_text(slot: ExecutionSlot) -> str:
    return "".join(stack_of(slot)) or "(not available)"


def stack_of(slot: ExecutionSlot) -> Sequence[str]:
    """Return the stack of a handler as it is now, the call last; empty where it cannot be had."""
    if slot.kind is Kind.THREAD:
        return stack_of_thread(slot.thread_id)
    return () if slot.task is None else stack_of_task(slot.task)


def stack_of_task(task: Task[None]) -> list[str]:
    """Return the stack of a task as it is now, the call last."""
    frames = task.get_stack(limit=_MAX_FRAMES)
    inner: object = task.get_coro()
    # A suspended task shows its outermost frame only; what it awaits hangs on the coroutine.
    while (inner := getattr(inner, "cr_await", None)) is not None:
        frame = getattr(inner, "cr_frame", None)
        if frame is not None:
            frames.append(frame)
    return traceback.format_list([summary for frame in frames for summary in traceback.extract_stack(frame, limit=1)])


def stack_of_thread(thread: int | None) -> list[str]:
    """Return the stack of a thread as it is now, the call last; empty where there is none."""
    frame = None if thread is None else sys._current_frames().get(thread)  # noqa: SLF001 - the documented way to a stack
    return [] if frame is None else traceback.format_stack(frame, limit=_MAX_FRAMES)
