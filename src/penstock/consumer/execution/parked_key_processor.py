"""Parked calls: what a visit does with a parked key that was woken: it tries the head again, and goes on behind it."""

from __future__ import annotations

from collections.abc import Generator, Hashable

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import ConsumerLane, ConsumerParked
from penstock.consumer.execution.admission import Admission
from penstock.consumer.execution.batch_processor import BatchProcessor
from penstock.consumer.execution.throttling import Throttling
from penstock.consumer.execution_slot import ExecutionSlot, Outcome, Work
from penstock.consumer.failures.parking import HANDLED, NotDue, Parking
from penstock.consumer.handlers.route import Failed, RateLimited
from penstock.message import Message
from penstock.routing import DONE, HOLD, KeyState


class ParkedKeyProcessor:
    """Serves parked keys. Thread-safe: each call is for a lane that the caller holds.

    Args:
        clock: the engine's clock.
        admission: says what may be handed over.
        parking: where keys are parked.
        throttling: where keys wait for a rate.
        batches: gathers batches of what waits.
    """

    def __init__(
        self, clock: Clock, admission: Admission, parking: Parking, throttling: Throttling, batches: BatchProcessor
    ) -> None:
        self._now = clock.monotonic
        self._admission = admission
        self._parking = parking
        self._throttling = throttling
        self._batches = batches

    def serve(  # noqa: C901, PLR0911, PLR0912, PLR0915 - one step for each state of a parked key's head
        self, lane: ConsumerLane, key: Hashable, parked: ConsumerParked, slot: ExecutionSlot, deadline: float
    ) -> Generator[Work, Outcome, bool]:
        """Try the head of a parked key, and on success what waits behind it. Returns False when the visit is over."""
        while parked.waiting:
            item = fetch, _, record = parked.waiting[0]
            slot.fetch = fetch
            assignment = fetch.assignment
            route = assignment.route
            # Read once: who has the head may write it meanwhile.
            settled = parked.settled
            if settled is None and parked.state in (KeyState.DEFERRED, KeyState.SENDING):
                # Also where its assignment is gone: what settles it later must find this head, and the key is not
                # handled twice at once.
                return True
            if settled is DONE or settled is HANDLED or not assignment.active:
                slot.handled += settled is HANDLED
                self._parking.next_head(parked, slot)
                continue
            if settled is HOLD:
                parked.settled = None
                parked.state = KeyState.HELD
            if isinstance(settled, BaseException):
                parked.settled = None
                parked.state = KeyState.WAITING
                self._parking.failed(lane, key, parked, Failed(settled), slot)
                continue
            now = self._now()
            # A head that waits for its first try waits for a limit, which may have changed.
            if parked.state in (KeyState.HELD, KeyState.STOPPING) or (
                now < parked.due_at and (parked.attempts or isinstance(key, NotDue))
            ):
                return True
            if isinstance(key, NotDue):
                del lane.parked[key]
                key = key.key
                if key in lane.parked:
                    lane.parked[key].waiting.append(item)
                    return True
                lane.parked[key] = parked
            if now >= deadline or route.kind is not slot.kind:
                lane.due.insert(0, key)
                return False
            answer = self._admission.answer(route, key, record, now, parked.tries)
            if isinstance(answer, float):
                if answer != parked.due_at:
                    parked.due_at = answer
                    self._parking.wake_at(answer, lane, key)
                return True
            if isinstance(answer, RateLimited):
                parked.due_at = now
                self._throttling.line_up_key(lane, route.token_bucket, key, parked)
                return True
            if answer is None:
                self._admission.filtered(item, slot)
                self._parking.next_head(parked, slot)
                continue
            slot.retried += parked.attempts > 0
            slot.started, slot.record, slot.batch_count = now, record, 1
            if parked.attempts == 0:
                parked.since = now
            slot.invoke = route.invoke
            if isinstance(answer, Message) and route.batch > 1:
                yield from self._batches.serve_parked(lane, key, parked, answer, slot)
                continue
            outcome = answer if isinstance(answer, Failed) else (yield answer)
            if isinstance(outcome, Failed):
                self._parking.failed(lane, key, parked, outcome, slot)
            elif outcome is not None:
                self._parking.put_off(lane, key, parked, outcome, slot)
            else:
                self._admission.done((item,), slot)
                self._parking.next_head(parked, slot)
        del lane.parked[key]
        return True


__all__ = ["ParkedKeyProcessor"]
