"""The executor: what calls the handlers of a consumer. This one leaves that to whoever drives the engine by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.route import Failed
from penstock.consumer.lanes.slot import ExecutionSlot, SeenCall


class LoopLag(NamedTuple):
    """For how long an event loop has not come round; 0 where there is none. Its thread, for a look at the stack."""

    seconds: float
    thread_id: int | None


class Executor:
    """Takes ready lanes from the scheduler and calls handlers for what `LaneProcessor.process` yields. Thread-safe."""

    #: Where messages may be in a handler: all slots there ever were, so that no count falls.
    slots: Sequence[ExecutionSlot] = ()

    def wake(self, queues: Sequence[int]) -> None:
        """Have ready lanes served, given the ready queue of each lane that became ready."""

    def wake_idle(self) -> bool:
        """Wake idle workers where lanes wait and busy ones are stuck; return whether lanes wait and some are idle.

        Called at each step of the poll thread: it is where slices that take too long are cut, too.
        """
        return False

    def room(self, _kind: Kind) -> int:
        """Return how many calls may be under way at once, in threads or in tasks."""
        return 0

    def interrupt(self, _seen: SeenCall) -> bool:
        """Raise `HandlerTimeLimitError` in a call, or cancel its task; return whether that can be, and it goes on.

        On the poll thread, as `abandon`.
        """
        return False

    def abandon(self, _seen: SeenCall, _failure: Failed) -> bool:
        """Go on without a call that does not return, as if it had failed so; return whether that can be.

        `failure.call` is notified when it returns.
        """
        return False

    def loop_lag(self) -> LoopLag:
        """Return for how long the event loop has not come round."""
        return LoopLag(0.0, None)
