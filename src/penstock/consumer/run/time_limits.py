"""The time limits: calls that take longer are interrupted, and those that do not heed that are given up.

The poll thread looks at the slots, at each of its steps, and acts through the executor: `handlers/call_guard.py` says
how a call is interrupted. A call counts from when it was first seen: it is never interrupted too early, and up to a
step of the poll loop too late. An `async def` with a limit cancels itself; here it is cancelled by request only.

A call that was interrupted and does not return, for its thread waits within C, is abandoned `GRACE_S` later. Its
message fails for good, and is given up as its handler says or as somebody has asked. Its offset is done then, so it
does not come again. Its key is blocked until the call returns (`ParkedKey.call`). Another thread takes the place of its
own. Each such thread stays, with what it holds, as long as the process: where half of the workers have gone so, the
process is to be started again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from penstock.consumer.assignments import Fetch
from penstock.consumer.handlers.call_guard import AbandonedCall
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.route import Failed
from penstock.consumer.lanes.parking import GiveUps
from penstock.consumer.lanes.slot import ExecutionSlot, SeenCall
from penstock.consumer.run.executor import Executor
from penstock.errors import HandlerTimeLimitError, WorkersBlockedError

_log = logging.getLogger(__name__)

#: Seconds that an interrupted handler has to return.
GRACE_S = 5.0


class TimeLimits:
    """On the poll thread only, save for `abandoned`.

    Args:
        group: for messages to the user.
        is_used: whether a plain handler may have a limit.
        slots: where calls may be under way.
        executor: what calls the handlers.
        give_ups: the messages that somebody wants to be given up.
        stack_of: returns the stack of a handler.
        restart: stops the consumer, after a drain, because of an error.
    """

    def __init__(
        self,
        group: str,
        *,
        is_used: bool,
        slots: Callable[[], Iterable[ExecutionSlot]],
        executor: Callable[[], Executor],
        give_ups: GiveUps,
        stack_of: Callable[[ExecutionSlot], Sequence[str]],
        restart: Callable[[BaseException], None],
    ) -> None:
        self._group = group
        self._is_used = is_used
        self._slots = slots
        self._executor = executor
        self._give_ups = give_ups
        self._stack_of = stack_of
        self._restart = restart
        self._watched: dict[ExecutionSlot, SeenCall] = {}
        #: Calls that were abandoned and have not returned. Replaced as a whole: any thread reads it.
        self.abandoned: tuple[AbandonedCall, ...] = ()

    def check(self, now: float) -> None:
        """Interrupt and abandon what is due."""
        if self.abandoned:
            self.abandoned = tuple(call for call in self.abandoned if not call.has_ended)
        if not (self._is_used or self._give_ups or self._watched):
            return
        former, self._watched = self._watched, {}
        for slot in self._slots():
            if slot.kind is Kind.TASK and not self._give_ups:
                continue
            # In this order: where `started` is that of the next message, the call is seen at the next look.
            started, record, fetch = slot.started, slot.record, slot.fetch
            if record is None or fetch is None:
                continue
            call = former.get(slot)
            if call is None or call.record is not record or call.started != started:
                call = SeenCall(slot, record, started, now)
            # A request may be taken back and come again: how long its call has had to return stays known.
            if self._is_used or self._give_ups or call.interrupted_at is not None:
                self._watched[slot] = call
                self._check_call(call, fetch, now)

    def _check_call(self, call: SeenCall, fetch: Fetch, now: float) -> None:
        route, slot = fetch.assignment.route, call.slot
        where = (fetch.assignment.topic, fetch.assignment.partition, call.record.offset())
        place, name, limit = f"{fetch.assignment}@{where[2]}", route.handler.name, route.time_limit
        # Of this incarnation of its partition or another. A copy, made in one step: others ask and take meanwhile.
        if any((wanted.topic, wanted.partition, offset) == where for wanted, offset in list(self._give_ups)):
            why = "is to be given up"
        elif limit is not None and slot.kind is Kind.THREAD and now - call.since >= limit:
            why = f"is over its time limit of {limit:g} s"
        else:
            return
        if call.interrupted_at is None:
            if self._executor().interrupt(call):
                call.interrupted_at = now
                _log.warning("%s in %s on %s %s: it is interrupted", place, name, slot.name, why)
            return
        if now - call.interrupted_at < GRACE_S or len(self.abandoned) >= self._executor().worker_count:
            return
        error = HandlerTimeLimitError(
            f"{name} did not return within {now - call.since:.1f} s, though it was interrupted {GRACE_S:g} s before "
            "that: it waits outside of Python"
        )
        abandoned = AbandonedCall(where, name, f"{slot.name} (abandoned)", slot.thread_id, call.since)
        stack = "".join(self._stack_of(slot)) or "(not available)"
        if not self._executor().abandon(call, Failed(error, permanent=True, call=abandoned)):
            return
        del self._watched[slot]
        self.abandoned += (abandoned,)
        _log.error(
            "%s is given up: %s. Its key waits until the call returns, and another thread takes the place of %s. The "
            "handler's stack:\n%s",
            place,
            error,
            slot.name,
            stack,
        )
        workers = self._executor().worker_count
        if 2 * len(self.abandoned) >= workers:
            self._restart(
                WorkersBlockedError(
                    f"{len(self.abandoned)} of {workers} worker threads of {self._group} are in handlers that do not "
                    "return: start the process again; their messages are given up and do not come again. Give what "
                    "these handlers wait for a time-out of its own"
                )
            )
