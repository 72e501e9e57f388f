"""Parked keys: tries the head of a woken key, then the messages behind it."""

from __future__ import annotations

from collections.abc import Generator
from itertools import islice

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import ConsumerParked, Item
from penstock.consumer.handlers.route import Answer, Failed, RateLimited, Route, failure_of
from penstock.consumer.lanes.batches import Batch, Batches, filtered
from penstock.consumer.lanes.parking import NotDue, Parking, key_of, place_of
from penstock.consumer.lanes.set_aside import SetAside
from penstock.consumer.lanes.slot import ExecutionSlot, Outcome, Work
from penstock.consumer.outbox.dead_letters import NoRetryError
from penstock.errors import HandlerTimeLimitError
from penstock.message import Message
from penstock.routing.lanes import WAITING, KeyState


class ParkedKeys:
    """Processes woken keys. Thread-safe: the caller of every method holds the lane."""

    def __init__(self, clock: Clock, parking: Parking, set_aside: SetAside, batches: Batches) -> None:
        self._now = clock.monotonic
        self._parking = parking
        self._set_aside = set_aside
        self._batches = batches

    def process(self, parked: ConsumerParked, slot: ExecutionSlot) -> Generator[Work, Outcome, bool]:
        """Try the head, and on success the messages behind it. Return False if the lane must be given back."""
        while parked.waiting:
            item = fetch, _, _ = parked.waiting[0]
            slot.fetch = fetch
            if parked.state is not WAITING or parked.is_blocked or not fetch.assignment.active:
                if self._goes_on(parked, slot):
                    continue
                return True
            now = self._now()
            # A head before its first try waits for a limit. The limit may have changed.
            not_due = parked.keys[0] if isinstance(parked.keys[0], NotDue) else None
            if now < parked.due_at and (parked.attempts or not_due is not None):
                return True
            if not_due is not None and not _join_own_key(parked, not_due):
                return True
            if now >= slot.deadline:
                parked.lane.due.insert(0, parked)
                return False
            slot.started = now
            batch, why = self._gather(parked, slot)
            if batch.records:
                _note_try(parked, slot)
                slot.route = fetch.assignment.route
                yield from self._batches.hand_over(parked.lane, batch, slot, parked)
            elif why is None:
                filtered(item, slot)
                self._parking.next_head(parked, slot)
            elif not self._put_off(parked, why, slot):
                return True
        self._parking.release(parked)
        return True

    def _goes_on(self, parked: ConsumerParked, slot: ExecutionSlot) -> bool:
        """Handle a head that does not wait, or whose assignment is gone; return whether the key goes on."""
        if parked.is_out:
            # Also if its assignment is gone: the thread that resolves it must find this head, and the key must not be
            # handled twice at once.
            return False
        if parked.is_finished or not parked.waiting[0][0].assignment.active:
            slot.handled += parked.state is KeyState.HANDLED
            self._parking.next_head(parked, slot)
            return True
        if parked.state is KeyState.FAILED:
            error = parked.take_error()
            if isinstance(error, NoRetryError):
                self._parking.give_up(parked, Failed(error.failure, permanent=True), slot)
            else:
                self._parking.fail_head(parked, failure_of(error), slot)
            return True
        if parked.state is WAITING and parked.call is not None and parked.call.place == place_of(parked.waiting[0][2]):
            # The partition was revoked and assigned again. The message was given up: it is not tried again.
            self._parking.fail_head(parked, Failed(HandlerTimeLimitError(), permanent=True), slot)
            return True
        return False

    def _gather(self, parked: ConsumerParked, slot: ExecutionSlot) -> tuple[Batch, Answer | None]:
        """Return the messages to hand over, and why the next one must wait; None if the filter refuses it.

        The caller needs the reason only for an empty batch. Else it is found again when that message is the head.
        """
        batch, answer = Batch(), None
        head = parked.waiting[0][0].assignment
        most = parked.portions[0] if parked.portions else head.route.batch
        name = self._set_aside.name_of(head)
        for item in islice(parked.waiting, most):
            assignment = item[0].assignment
            # The head is always taken. Inactive messages are left out at the hand-over.
            if batch.records and (not assignment.active or self._set_aside.name_of(assignment) is not name):
                break
            slot.record = item[2]
            tries = parked.tries_behind.get(item[:2], 0) + parked.attempts
            answer = _readmit(assignment.route, item, slot.started, tries)
            if not isinstance(answer, Message):
                break
            batch.add(item, answer)
        return batch, answer

    def _put_off(self, parked: ConsumerParked, why: Answer, slot: ExecutionSlot) -> bool:
        """Handle a head that cannot be handed over now; return whether the key goes on."""
        if len(parked.keys) > 1 and (isinstance(why, Failed) or (isinstance(why, float) and not parked.portions)):
            # The reason is about one key. Only a batch that failed waits together.
            self._parking.split(parked)
            return True
        if isinstance(why, Failed):
            _note_try(parked, slot)
            self._parking.fail_head(parked, why, slot)
            return True
        if isinstance(why, RateLimited):
            parked.due_at = slot.started
            self._set_aside.await_token(parked, parked.waiting[0][0].assignment.route)
        elif isinstance(why, float) and why != parked.due_at:
            self._parking.wait_until(parked, why)
        return False


def _note_try(parked: ConsumerParked, slot: ExecutionSlot) -> None:
    if parked.attempts:
        slot.retried += 1
    else:
        parked.since = slot.started


def _join_own_key(parked: ConsumerParked, not_due: NotDue) -> bool:
    """Park a due retry-topic message under its own key; return whether it is the head there."""
    parked_keys = parked.lane.parked
    del parked_keys[not_due]
    own = parked_keys.setdefault(not_due.key, parked)
    if own is not parked:
        own.waiting.append(parked.waiting.popleft())
        return False
    parked.keys = (not_due.key,)
    return True


def _readmit(route: Route, item: Item, now: float, attempts: int) -> Answer | None:
    """Return the message to hand over from a parked key, or the reason to wait, or None if the filter refuses it.

    `attempts`: its tries since it was fetched.
    """
    record = item[2]
    if not route.gated and not route.filters:
        return route.message(record, attempts)
    # At each try: the failure may have been the filter's own, so the filter has not passed the message yet.
    passes = route.screen(record)
    if not passes:
        return None
    if isinstance(passes, Failed):
        return passes
    return route.admit(key_of(item), record, now, 0, attempts)
