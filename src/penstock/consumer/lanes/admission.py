"""Admission: whether a message may be handed over now, by filter, decoder, key function and rates."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable
from itertools import groupby
from operator import itemgetter

from penstock.consumer.assignments import ConsumerLane, Item
from penstock.consumer.handlers.route import Answer, Failed, RateLimited, Route
from penstock.consumer.lanes.parking import NotDue, Parking
from penstock.consumer.lanes.slot import ExecutionSlot
from penstock.errors import PenstockError
from penstock.message import Message, Record

#: A message must wait for those of its key that are in the batch being gathered.
AFTER_BATCH = RateLimited()


class Admission:
    """Thread-safe: each call is for a lane that the caller holds."""

    def __init__(self, parking: Parking) -> None:
        self._parking = parking

    def admit(  # noqa: PLR0911 - one for each way that a message can go
        self,
        lane: ConsumerLane,
        route: Route,
        item: Item,
        now: float,
        slot: ExecutionSlot,
        *,
        arrival: int,
        gathered: Container[Hashable] = (),
    ) -> tuple[Hashable, Message | Failed | RateLimited | None]:
        """Return a message's identity, and what to hand over; None when it was refused, or is parked now.

        `arrival` is that of the run. A key of those `gathered` is not parked: should its messages in the batch fail,
        they come before this one.
        """
        record = item[2]
        # Before its key: of what the filter refuses nothing is expected.
        passes = route.screen(record)
        if not passes:
            self.filtered(item, slot)
            return None, None
        try:
            key = _identity(item)
        except PenstockError as error:
            return place_of(record), Failed(error, permanent=True)
        if route.not_before is not None and (at := route.not_before(record)) > now:
            alone = NotDue(key, place_of(record))
            self._parking.park(lane, alone, item).due_at = at
            self._parking.wake_at(at, lane, alone)
            return alone, None
        if key in lane.parked:
            self._parking.append(lane, key, item)
            return key, None
        answer = passes if isinstance(passes, Failed) else route.admit(key, record, now, arrival + item[1])
        if isinstance(answer, (Failed, float)) and key in gathered:
            return key, AFTER_BATCH
        if isinstance(answer, float):
            self._parking.park(lane, key, item).due_at = answer
            self._parking.wake_at(answer, lane, key)
            return key, None
        return key, answer

    @staticmethod
    def identity(item: Item) -> Hashable:
        """Return the key of a message that was admitted before."""
        try:
            return _identity(item)
        except PenstockError:
            return place_of(item[2])

    @staticmethod
    def readmit(route: Route, key: Hashable, record: Record, now: float, attempts: int) -> Answer | None:
        """Return what to hand over for a message of a parked key, why not now, or None where it is refused.

        `attempts` is how often it was tried since it was fetched.
        """
        if not route.gated and not route.filters:
            return route.message(record, attempts)
        # At each try: the failure may have been the filter's own, and then nothing has let the message pass yet.
        passes = route.screen(record)
        if not passes:
            return None
        if isinstance(passes, Failed):
            return passes
        return route.admit(key, record, now, 0, attempts)

    @staticmethod
    def done(items: Iterable[Item], slot: ExecutionSlot) -> None:
        """Complete messages that a handler is done with."""
        for fetch, same in groupby(items, key=itemgetter(0)):
            indexes = [index for _, index, _ in same]
            fetch.assignment.tracker.complete(fetch.block, indexes)
            slot.handled += len(indexes)

    @staticmethod
    def filtered(item: Item, slot: ExecutionSlot) -> None:
        """Complete a message that the filter refused."""
        item[0].assignment.tracker.complete(item[0].block, (item[1],))
        slot.filtered += 1


def _identity(item: Item) -> Hashable:
    fetch, index, record = item
    keys = fetch.keys
    return fetch.assignment.route.ordering.identity_by(record.key() if keys is None else keys[index], record)


def place_of(record: Record) -> tuple[str, int, int]:
    """Return topic, partition and offset of a record."""
    return record.topic(), record.partition(), record.offset()
