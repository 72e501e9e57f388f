"""The watchdog: reports handler calls that take long, and interrupts or abandons those that take too long.

It runs on the poll thread. Stuck calls are logged with their stacks, at most once a second, and so is a blocked event
loop. If handlers have a time limit, or an operator wants a message given up, it checks in every step of the poll loop.
It interrupts a call over its limit through the executor (`handlers/call_guard.py` explains how). The limit counts from
the time when the call was first seen: an interrupt is never too early, and at most a step of the poll loop too late. An
`async def` handler with a limit cancels itself; the watchdog cancels it only on request.

An interrupted call may not return, because its thread waits in C or its task catches the cancellation. The watchdog
abandons it `GRACE_S` later. Its message fails for good, and is given up as its handler says or as the operator has
asked. Its offset is done then, so the message does not come again. Its key is blocked until the call returns
(`ParkedKey.call`). Another thread or task replaces the one of the call. An abandoned one stays, with everything that it
holds, as long as the process. If half of them are abandoned, the process must be started again.
"""

from __future__ import annotations

import logging
import sys
import traceback
from asyncio import Task
from functools import partial

from penstock.consumer.assignments import Fetch
from penstock.consumer.engine import Engine
from penstock.consumer.handlers.call_guard import AbandonedCall
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.route import Failed
from penstock.consumer.inspect.statistics import in_handler, under_way
from penstock.consumer.lanes.slot import ExecutionSlot, SeenCall
from penstock.errors import HandlerTimeLimitError, WorkersBlockedError

_log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_MAX_FRAMES = 12
#: Seconds that an interrupted handler has to return.
GRACE_S = 5.0
#: Seconds of silence after which the event loop counts as blocked.
_LOOP_BLOCKED_S = 1.0


class Watchdog:
    """Watches the slots of an engine. On the poll thread only, except where stated."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stall_after = engine.settings.stall_after
        # Whether a plain handler may have a time limit.
        limits = (engine.settings.time_limit, *(handler.time_limit for handler in engine.all_handlers))
        self._has_limits = engine.lane_plan.has_threads and any(limit is not None for limit in limits)
        #: Last step of the poll thread, on the engine's clock; None before the first. Any thread reads it.
        self.turned_at: float | None = None
        self._next_at = 0.0
        self._watched: dict[ExecutionSlot, SeenCall] = {}
        self._has_interrupted = False
        self._loop_reported = False

    def check(self, now: float) -> None:
        """Report, interrupt and abandon the calls that are due."""
        self.turned_at = now
        engine = self._engine
        if engine.abandoned:
            engine.abandoned = tuple(call for call in engine.abandoned if not call.has_ended)
        is_time = now >= self._next_at
        if is_time:
            self._next_at = now + min(_INTERVAL_S, self._stall_after / 2)
            self._check_loop()
        # A request may be withdrawn and repeated: the time since the interrupt stays known.
        looks_at_all = is_time or bool(engine.processor.give_ups) or self._has_interrupted
        if not (looks_at_all or self._has_limits):
            return
        former = self._watched
        if looks_at_all:
            self._watched = {}
        # Tasks may be thousands, and they have their own time limits.
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
        """Report a call that takes long, and again each time its age has doubled."""
        age = now - call.started
        if age < max(self._stall_after, 2 * call.reported_s):
            return
        call.reported_s = age
        self._engine.counts.stalls += 1
        call.slot.complete_finished()
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
                "".join(stack_of(lag.thread_id)),
            )
        self._loop_reported = blocked

    def _check_call(self, call: SeenCall, fetch: Fetch, now: float) -> None:
        """Interrupt a call that is over its limit or whose message is to be given up; abandon it later."""
        engine, route, slot = self._engine, fetch.assignment.route, call.slot
        where = (fetch.assignment.topic, fetch.assignment.partition, call.record.offset())
        place, name, limit = f"{fetch.assignment}@{where[2]}", route.handler.name, route.time_limit
        # Any incarnation of the partition counts. A copy, made in one step: other threads add and remove requests.
        if any((wanted.topic, wanted.partition, offset) == where for wanted, offset in list(engine.processor.give_ups)):
            why = "is to be given up"
        elif limit is not None and now - call.since >= limit:
            why = f"is over its time limit of {limit:g} s"
            if slot.kind is Kind.TASK and call.interrupted_at is None:
                call.interrupted_at = now  # the task cancels itself
        else:
            return
        if call.interrupted_at is None:
            if engine.executor.interrupt(call):
                call.interrupted_at = now
                _log.warning("%s in %s on %s %s: it is interrupted", place, name, slot.name, why)
            return
        if slot.kind is Kind.TASK and engine.executor.loop_lag().seconds > _LOOP_BLOCKED_S:
            # On a blocked loop no task can end or be abandoned, and each try would hold up the poll thread.
            call.interrupted_at = now
            return
        room, left = engine.executor.room(slot.kind), sum(other.kind is slot.kind for other in engine.abandoned)
        if now - call.interrupted_at < GRACE_S or left >= room:
            return
        waits = "it waits outside of Python, or " if slot.kind is Kind.THREAD else ""
        error = HandlerTimeLimitError(
            f"{name} did not return within {now - call.since:.1f} s, though it was interrupted {GRACE_S:g} s before "
            f"that: {waits}it has caught that and goes on"
        )
        show_stack = partial(stack_of, slot.thread_id, slot.task)
        abandoned = AbandonedCall(where, name, slot.kind, f"{slot.name} (abandoned)", show_stack, call.since)
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
                "again. Set a time-out on each call that these handlers wait for"
            )
            engine.stop_request.fail(blocked, drains=True)


def _stack_text(slot: ExecutionSlot) -> str:
    return "".join(stack_of(slot.thread_id, slot.task)) or "(not available)"


def stack_of(thread_id: int | None, task: Task[None] | None = None) -> list[str]:
    """Return the current stack of a task, or of a thread if there is none; the call is last. Empty if it has ended."""
    if task is None:
        frame = None if thread_id is None else sys._current_frames().get(thread_id)  # noqa: SLF001 - the documented way
        return [] if frame is None else traceback.format_stack(frame, limit=_MAX_FRAMES)
    frames = task.get_stack(limit=_MAX_FRAMES)
    inner: object = task.get_coro()
    # A suspended task shows its outermost frame only; the awaited frames hang on the coroutine.
    while (inner := getattr(inner, "cr_await", None)) is not None:
        frame = getattr(inner, "cr_frame", None)
        if frame is not None:
            frames.append(frame)
    return traceback.format_list([summary for frame in frames for summary in traceback.extract_stack(frame, limit=1)])
