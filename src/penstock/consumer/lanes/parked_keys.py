"""The parked key processor: it tries the head of a parked key that was woken, and goes on with what waits behind it."""

from __future__ import annotations

from collections.abc import Generator, Hashable

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import ConsumerLane, ConsumerParked, Item
from penstock.consumer.handlers.route import Failed, RateLimited
from penstock.consumer.lanes.admission import Admission, place_of
from penstock.consumer.lanes.batches import BatchProcessor
from penstock.consumer.lanes.parking import NotDue, Parking
from penstock.consumer.lanes.set_aside import SetAside
from penstock.consumer.lanes.slot import ExecutionSlot, Outcome, Work
from penstock.errors import HandlerTimeLimitError
from penstock.message import Message
from penstock.routing.lanes import WAITING, KeyState


class ParkedKeyProcessor:
    """Thread-safe: each call is for a lane that the caller holds."""

    def __init__(
        self,
        clock: Clock,
        admission: Admission,
        parking: Parking,
        set_aside: SetAside,
        batches: BatchProcessor,
    ) -> None:
        self._now = clock.monotonic
        self._admission = admission
        self._parking = parking
        self._set_aside = set_aside
        self._batches = batches

    def process(
        self, lane: ConsumerLane, key: Hashable, parked: ConsumerParked, slot: ExecutionSlot
    ) -> Generator[Work, Outcome, bool]:
        """Try the head, and on success what waits behind it. Returns False when the lane is to be given back."""
        while parked.waiting:
            item = fetch, _, record = parked.waiting[0]
            slot.fetch = fetch
            if parked.state is not WAITING or parked.is_blocked or not fetch.assignment.active:
                if self._goes_on(lane, key, parked, slot):
                    continue
                return True
            now, route = self._now(), fetch.assignment.route
            # A head that waits for its first try waits for a limit, which may have changed.
            if now < parked.due_at and (parked.attempts or isinstance(key, NotDue)):
                return True
            if isinstance(key, NotDue):
                not_due, key = key, key.key
                if not _join_own_key(lane, not_due, parked, item):
                    return True
            if now >= slot.deadline:
                lane.due.insert(0, key)
                return False
            slot.started, slot.record = now, record
            answer = self._admission.readmit(route, key, record, now, parked.tries)
            if isinstance(answer, (float, RateLimited)):
                self._wait_for_limit(lane, key, parked, answer, now)
                return True
            if answer is None:
                self._admission.filtered(item, slot)
                self._parking.next_head(parked, slot)
                continue
            slot.enter(route)
            yield from self._try_head(lane, key, parked, answer, slot)
        self._parking.release(lane, key)
        return True

    def _goes_on(self, lane: ConsumerLane, key: Hashable, parked: ConsumerParked, slot: ExecutionSlot) -> bool:
        """Act on a head that does not wait, or whose assignment is gone; return whether the key goes on."""
        if parked.is_out:
            # Also where its assignment is gone: who resolves it must find this head, and the key is not handled twice
            # at once.
            return False
        if parked.is_finished or not parked.waiting[0][0].assignment.active:
            slot.handled += parked.state is KeyState.HANDLED
            self._parking.next_head(parked, slot)
            return True
        if parked.state is KeyState.FAILED:
            self._parking.fail_head(lane, key, parked, Failed(parked.take_error()), slot)
            return True
        if parked.state is WAITING and parked.call is not None and parked.call.place == place_of(parked.waiting[0][2]):
            # Its partition went and came back: what was given up is not tried once more.
            self._parking.fail_head(lane, key, parked, Failed(HandlerTimeLimitError(), permanent=True), slot)
            return True
        return False

    def _wait_for_limit(
        self, lane: ConsumerLane, key: Hashable, parked: ConsumerParked, limit: float | RateLimited, now: float
    ) -> None:
        """Let the head wait for the time at which its key is free, or for a token."""
        if isinstance(limit, RateLimited):
            parked.due_at = now
            self._set_aside.await_token_for_key(lane, key, parked)
        elif limit != parked.due_at:
            parked.due_at = limit
            self._parking.wake_at(limit, lane, key)

    def _try_head(
        self, lane: ConsumerLane, key: Hashable, parked: ConsumerParked, answer: Message | Failed, slot: ExecutionSlot
    ) -> Generator[Work, Outcome, None]:
        """Give the head to its handler, alone or in a batch."""
        slot.retried += parked.attempts > 0
        if parked.attempts == 0:
            parked.since = slot.started
        if isinstance(answer, Failed):
            self._parking.fail_head(lane, key, parked, answer, slot)
        else:
            yield from self._batches.process_parked(lane, key, parked, answer, slot)


def _join_own_key(lane: ConsumerLane, not_due: NotDue, parked: ConsumerParked, item: Item) -> bool:
    """Park a message of a retry topic under its own key, now that it is due; return whether it is the head there."""
    del lane.parked[not_due]
    own = lane.parked.setdefault(not_due.key, parked)
    if own is not parked:
        own.waiting.append(item)
    return own is parked
