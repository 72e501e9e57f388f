"""The executor: calls the handlers of a consumer. This base class calls none; the engine's driver does it by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.consumer.handlers.handler import Kind
from penstock.consumer.handlers.route import Failed
from penstock.consumer.lanes.slot import ExecutionSlot, SeenCall


class LoopLag(NamedTuple):
    """How long an event loop has been silent, 0 without one; and its thread, needed for its stack."""

    seconds: float
    thread_id: int | None


class Executor:
    """Takes ready lanes from the scheduler and calls handlers for what `LaneProcessor.process` yields. Thread-safe."""

    #: All slots there ever were, so that no count falls.
    slots: Sequence[ExecutionSlot] = ()

    def wake(self, queues: Sequence[int]) -> None:
        """Serve ready lanes, given the ready queue of each lane that became ready."""

    def wake_idle(self) -> bool:
        """Wake idle workers if lanes wait and busy workers are stuck; return whether lanes wait and workers sleep.

        The poll thread calls it in each of its steps. It also cuts slices that take too long.
        """
        return False

    def room(self, _kind: Kind) -> int:
        """Return how many calls may run at once, in threads or in tasks."""
        return 0

    def interrupt(self, _seen: SeenCall) -> bool:
        """Raise `HandlerTimeLimitError` in a call, or cancel its task; return whether that is possible.

        On the poll thread, as `abandon`.
        """
        return False

    def abandon(self, _seen: SeenCall, _failure: Failed) -> bool:
        """Continue without a call that does not return, as if it had failed; return whether that is possible.

        `failure.call` is notified when the call returns.
        """
        return False

    def loop_lag(self) -> LoopLag:
        """Return how long the event loop has been silent."""
        return LoopLag(0.0, None)
