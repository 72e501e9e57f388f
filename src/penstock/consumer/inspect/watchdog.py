"""The watchdog: it reports handlers that do not come back, with their stacks, and an event loop that is blocked.

It runs on the poll thread, at most once a second, and only reads.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.consumer.handlers.handler import Kind
from penstock.consumer.inspect.statistics import in_handler, under_way
from penstock.consumer.lanes.slot import ExecutionSlot, complete_finished
from penstock.consumer.run.executor import LoopLag
from penstock.message import Record

_log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_MAX_FRAMES = 12


@dataclass(slots=True, eq=False, repr=False)
class Watchdog:
    """Watches the slots of a consumer. On the poll thread only."""

    stall_after: float
    slots: Callable[[], Iterable[ExecutionSlot]]
    loop_lag: Callable[[], LoopLag]
    #: How many messages were reported as stalled.
    stalls: int = field(default=0, init=False)
    #: When the poll thread last came by, on the engine's clock; None before its first turn. Any thread reads it.
    turned_at: float | None = field(default=None, init=False)
    _next: float = field(default=0.0, init=False)
    _reported: dict[str, tuple[Record, float]] = field(default_factory=dict, init=False)
    _loop_reported: bool = field(default=False, init=False)

    def check(self, now: float) -> None:
        """Report what has been in a handler for too long."""
        self.turned_at = now
        if now < self._next:
            return
        self._next = now + min(_INTERVAL_S, self.stall_after / 2)
        self._check_loop()
        reported, self._reported = self._reported, {}
        for slot, fetch, record in under_way(self.slots()):
            age, said = now - slot.started, reported.get(slot.name)
            if age < self.stall_after:
                continue
            if said is not None and said[0] is record and age < 2 * said[1]:
                self._reported[slot.name] = said
                continue
            self._reported[slot.name] = (record, age)
            self.stalls += 1
            assignment = fetch.assignment
            complete_finished((slot,))
            watermark = assignment.tracker.watermark
            _log.warning(
                "%s; the watermark of %s is %d%s; the handler's stack:\n%s",
                in_handler(slot, fetch, record, now),
                assignment,
                watermark,
                ", held by this message" if watermark == record.offset() else "",
                "".join(stack_of(slot)) or "(not available)",
            )

    def _check_loop(self) -> None:
        lag = self.loop_lag()
        blocked = lag.seconds >= self.stall_after
        if blocked and not self._loop_reported:
            _log.warning(
                "the event loop has been blocked for %.1f s: a handler calls something that waits without `await`, and "
                "every other handler on the loop waits with it; its stack:\n%s",
                lag.seconds,
                "".join(stack_of_thread(lag.thread_id)),
            )
        self._loop_reported = blocked


def stack_of(slot: ExecutionSlot) -> Sequence[str]:
    """Return the stack of a handler as it is now, the call last; empty where it cannot be had."""
    if slot.kind is Kind.THREAD:
        return stack_of_thread(slot.thread_id)
    task = slot.task
    if task is None:
        return ()
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
