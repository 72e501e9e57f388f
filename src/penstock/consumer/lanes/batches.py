"""The batch processor: it gathers messages that are not handed over by the slice, new ones and parked ones.

A handler that takes no batches is given batches of one, as the message itself.

Messages that wait come back in batches too. A batch that failed as a whole is tried again as it was, for it may have
been the database; only when the policy gives it up is each of its messages tried alone, so that none is given up for
the failure of another. A message that the handler named is tried alone at once: otherwise those behind it of its key
would be handled once more for each of its tries.

A batch has messages of one handler, of any partitions of its topics. Before it is handed over, the holder shows in its
slot what it is of, and then leaves out what is of an inactive assignment: see the argument in
`penstock.consumer.lanes.processor`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from itertools import islice

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import ConsumerAside, ConsumerLane, ConsumerParked, ConsumerRun, Item
from penstock.consumer.handlers.results import DeferredCompletion, Results
from penstock.consumer.handlers.route import Failed, RateLimited, Route, UndecodableError
from penstock.consumer.lanes.admission import AFTER_BATCH, Admission
from penstock.consumer.lanes.batch import Batch
from penstock.consumer.lanes.parking import FailedBatch, Parking
from penstock.consumer.lanes.set_aside import SetAside
from penstock.consumer.lanes.slot import ExecutionSlot, Outcome, Work
from penstock.consumer.outbox.outbox import HandlerResults, Tries
from penstock.errors import BatchError, PenstockError
from penstock.message import FetchedMessage, Message
from penstock.routing import KeyState

#: A message that waits, with its key.
Waiting = tuple[Hashable, Item]


class BatchProcessor:
    """Thread-safe: each call is for a lane that the caller holds."""

    def __init__(
        self, clock: Clock, admission: Admission, parking: Parking, set_aside: SetAside, results: HandlerResults
    ) -> None:
        self._now = clock.monotonic
        self._admission = admission
        self._parking = parking
        self._results = results
        self._name_of = set_aside.name_of

    def process(self, lane: ConsumerLane, aside: ConsumerAside, slot: ExecutionSlot) -> Generator[Work, Outcome, bool]:
        """Hand over a batch of runs that were set aside. Returns whether no token is left."""
        batch, runs = Batch(), aside.runs
        most = runs[0].owner.assignment.route.batch
        halt: RateLimited | None = None
        slot.started = self._now()
        while runs and halt is None and len(batch) < most:
            run, before = runs[0], runs[0].next
            slot.fetch = run.owner
            if run.owner.assignment.active:
                halt = self._take(lane, run, batch, slot)
            else:
                run.next = len(run.records)
            aside.count -= run.next - before
            if run.next == len(run.records):
                runs.popleft()
        if not self._claim(batch, slot):
            batch = batch.of_active()
        if batch:
            outcome = yield from self._hand_over(batch, most, slot)
            now = self._now()
            slot.note_pace(now - slot.started, len(batch))
            slot.note_latency(now - slot.started, now, len(batch))
            if outcome is None:
                batch.complete()
                slot.handled += len(batch)
            else:
                self._finish(lane, batch, outcome, slot)
        slot.fetches = ()
        return halt is not None and halt is not AFTER_BATCH

    def _take(self, lane: ConsumerLane, run: ConsumerRun, batch: Batch, slot: ExecutionSlot) -> RateLimited | None:
        """Add messages of a run to a batch until it is full; returns why the next has to wait, or None."""
        route = run.owner.assignment.route
        if not (route.gated or route.filters or lane.parked or run.owner.has_unkeyed):
            _take_stretch(run, route, batch, slot)
        # What is left is looked at by itself: all of it, or what cannot be decoded, which is said again then.
        while run.next < len(run.records) and len(batch) < route.batch:
            item = (run.owner, run.indexes[run.next], run.records[run.next])
            slot.record = item[2]
            key, message = self._admission.admit(
                lane, route, item, slot.started, slot, arrival=run.arrival, gathered=batch
            )
            if isinstance(message, RateLimited):
                return message
            run.next += 1
            if isinstance(message, Failed):
                self._parking.park_unfinished(lane, key, item, message, slot)
            elif message is not None:
                batch.add(key, item, message)
        return None

    def process_parked(
        self, lane: ConsumerLane, key: Hashable, parked: ConsumerParked, first: Message, slot: ExecutionSlot
    ) -> Generator[Work, Outcome, None]:
        """Try the head of a parked key, with what may be tried with it, given the head's message."""
        now, most, keys = self._now(), 1, [key]
        if not parked.tried_alone and (most := parked.waiting[0][0].assignment.route.batch) > 1:
            keys += self._ready_batch_keys(lane, parked, now)
        batch = self._gather_parked(lane, keys, first, most, slot)
        if not self._claim(batch, slot):
            # The caller looks at the head again, and nothing that is inactive is found any more.
            return
        heads = {mine: lane.parked[mine] for mine in keys if mine in batch}
        for head in heads.values():
            if head.attempts == 0:
                head.since = now
        outcome = yield from self._hand_over(batch, parked.waiting[0][0].assignment.route.batch, slot)
        self._finish(lane, batch, outcome, slot, heads)
        slot.fetches = ()
        for other in keys[1:]:
            waits = lane.parked[other]
            if not waits.waiting:
                self._parking.release(lane, other)
            elif other in heads and waits.attempts == 0 and waits.state is KeyState.WAITING:
                # Its head is done, and what woke it may have come before.
                lane.due.append(other)

    def _ready_batch_keys(self, lane: ConsumerLane, parked: ConsumerParked, now: float) -> list[Hashable]:
        """Return the other keys of a batch that failed as a whole which may be tried now."""
        mine = self._name_of(parked.waiting[0][0].assignment)
        batch_keys = []
        for other in parked.batch_keys:
            neighbour = lane.parked.get(other)
            if (
                neighbour is not None
                and neighbour is not parked
                and neighbour.waiting
                and not neighbour.is_blocked
                and neighbour.state is KeyState.WAITING
                and not neighbour.awaits_token
                and not neighbour.tried_alone
                and neighbour.due_at <= now
                and self._is_of(mine, neighbour.waiting[0])
            ):
                batch_keys.append(other)
        return batch_keys

    def _gather_parked(
        self, lane: ConsumerLane, keys: list[Hashable], first: Message, most: int, slot: ExecutionSlot
    ) -> Batch:
        """Return the head of the first of these keys, given its message, with what may be handed over with it now.

        The oldest come first; of each key in the order in which they wait.
        """
        batch, head, now = Batch(), lane.parked[keys[0]].waiting[0], self._now()
        lines = [self._line(key, lane.parked[key], head, most) for key in keys]
        # Keys at whose next message nothing more may be handed over: that is decided when it is the head.
        ended: set[Hashable] = set()
        room = most - 1
        for key, item in heapq.merge(*lines, key=lambda waiting: _place(waiting[1])):
            if len(batch) == most or len(ended) == len(keys):
                break
            message: object = None
            if item is head:
                message, room = first, most
            elif len(batch) < room and key not in ended:
                parked = lane.parked[key]
                tries = parked.tries if item is parked.waiting[0] else parked.tries_behind.get(item[:2], 0)
                slot.record = item[2]
                message = self._admission.readmit(item[0].assignment.route, key, item[2], now, tries)
            if isinstance(message, Message):
                batch.add(key, item, message)
            else:
                ended.add(key)
        return batch

    def _line(self, key: Hashable, parked: ConsumerParked, head: Item, limit: int) -> Iterator[Waiting]:
        """Yield what waits for a key and may be in a batch with a head."""
        name = self._name_of(head[0].assignment)
        for item in islice(parked.waiting, limit):
            if not self._is_of(name, item):
                return
            yield key, item

    def _is_of(self, name: Hashable, item: Item) -> bool:
        """Tell whether a message that waits may be in a batch with others."""
        assignment = item[0].assignment
        return assignment.active and self._name_of(assignment) is name

    @staticmethod
    def _claim(batch: Batch, slot: ExecutionSlot) -> bool:
        """Show what a batch is of in the slot; returns whether all of that is still active."""
        slot.fetches = fetches = batch.fetches
        return all(fetch.assignment.active for fetch in fetches)

    @staticmethod
    def _hand_over(batch: Batch, most: int, slot: ExecutionSlot) -> Generator[Work, Outcome, Outcome]:
        slot.fetches = batch.fetches
        slot.fetch, slot.record = slot.fetches[0], batch.records[0]
        if most == 1:
            return (yield batch.messages[0])
        outcome = yield batch.messages
        if isinstance(outcome, DeferredCompletion):
            return Failed(PenstockError("a batch handler cannot put its completion off; return when it is done"))
        return outcome

    def _finish(
        self,
        lane: ConsumerLane,
        batch: Batch,
        outcome: Outcome,
        slot: ExecutionSlot,
        heads: Mapping[Hashable, ConsumerParked] | None = None,
    ) -> None:
        """Complete what is done; of each key, what is behind the first that failed waits for it.

        `heads` are the parked keys of messages that were parked; new ones are parked now.
        """
        items = list(batch.items())
        keys = [self._admission.identity(item) for item in items]
        failed = _failures(outcome, items)
        failed_batch = _failed_batch(keys, outcome, failed)
        stuck: dict[Hashable, list[int]] = {}
        done: list[int] = []
        for place, key in enumerate(keys):
            if key in stuck:
                stuck[key].append(place)
            elif place in failed:
                stuck[key] = [place]
            else:
                done.append(place)
        tries = None
        if heads is not None:
            # Only heads have tries that count: what is behind one was handed over with it.
            attempts = {key: head.attempts for key, head in heads.items()}
            tries = [Tries(attempts.pop(keys[place], 0), heads[keys[place]].since) for place in done]
        self._done(lane, [items[place] for place in done], outcome, slot, tries)
        for head in [] if heads is None else [heads[keys[place]] for place in done]:
            # Messages of a key have the same order in the batch.
            self._parking.next_head(head, slot)
        for key, (first, *behind) in stuck.items():
            result = failed[first]
            if heads is None:
                self._parking.park_unfinished(lane, key, items[first], result, slot, failed_batch=failed_batch)
                for place in behind:
                    self._parking.append(lane, key, items[place])
            elif isinstance(result, DeferredCompletion):
                self._parking.defer_head(lane, key, heads[key], result, slot)
            else:
                self._parking.fail_head(lane, key, heads[key], result, slot, failed_batch=failed_batch)
            lane.parked[key].count_behind(items[place] for place in behind)

    def _done(
        self,
        lane: ConsumerLane,
        items: Sequence[Item],
        outcome: Outcome,
        slot: ExecutionSlot,
        tries: Sequence[Tries] | None,
    ) -> None:
        """Complete messages that a handler is done with, once what it returned is written."""
        if not isinstance(outcome, Results):
            self._admission.done(items, slot)
        elif outcome.each is None:
            self._results.submit(lane, items, outcome.messages, tries)
        else:
            # Nothing of the batch failed, so that there are results for each.
            for place, (item, results) in enumerate(zip(items, outcome.each, strict=True)):
                if results:
                    self._results.submit(lane, (item,), results, None if tries is None else (tries[place],))
                else:
                    self._admission.done((item,), slot)


def _take_stretch(run: ConsumerRun, route: Route, batch: Batch, slot: ExecutionSlot) -> None:
    """Add messages to a batch that nothing holds back or filters, up to what cannot be decoded."""
    prepare = route.prepare
    records = run.records[run.next : run.next + route.batch - len(batch)]
    messages: list[Message] = []
    try:
        for record in records:
            if prepare is Message:  # nothing of the user's that may hang or fail
                message = FetchedMessage()
                message._record = record  # noqa: SLF001 - see there
                messages.append(message)
            else:
                slot.record = record
                messages.append(prepare(record))  # type: ignore[arg-type] # no filter refuses it
    except UndecodableError:
        pass
    batch.add_stretch(run, messages)


def _failures(outcome: Outcome, items: Sequence[Item]) -> dict[int, Failed | DeferredCompletion]:
    """Return which of a batch are not done, by their places, and with what."""
    if isinstance(outcome, DeferredCompletion):
        return {0: outcome}
    if not isinstance(outcome, Failed):
        return {}
    error, count = outcome.error, len(items)
    if not isinstance(error, BatchError) or items[0][0].assignment.route.batch == 1:
        return dict.fromkeys(range(count), outcome)
    named: dict[int, Failed | DeferredCompletion] = {
        place: Failed(its) if isinstance(its, BaseException) else outcome
        for place, its in error.failed.items()
        if isinstance(place, int) and 0 <= place < count
    }
    # Names one that is not there: it is not known what it meant, nor what is done, so nothing is.
    return named if len(named) == len(error.failed) > 0 else dict.fromkeys(range(count), outcome)


def _failed_batch(
    keys: Sequence[Hashable], outcome: Outcome, failed: Mapping[int, Failed | DeferredCompletion]
) -> FailedBatch | None:
    """Return a batch of several that failed as a whole, or None."""
    whole = len(failed) == len(keys) > 1 and all(error is outcome for error in failed.values())
    if not whole:
        return None
    sizes = Counter(keys)
    return FailedBatch(sizes, tuple(sizes))


def _place(item: Item) -> tuple[int, int]:
    return item[2].partition(), item[2].offset()
