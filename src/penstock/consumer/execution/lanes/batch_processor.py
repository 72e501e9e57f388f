"""The batch processor: it gathers batches of new messages and of parked ones, and sorts out what became of each.

Messages that wait come back in batches too. A batch that failed as a whole is tried again as it was, for it may have
been the database; only when the policy gives it up is each of its messages tried alone, so that none is given up for
the failure of another. A message that the handler named is tried alone at once: otherwise those behind it of its key
would be handled once more for each of its tries.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Generator, Hashable, Iterator, Sequence
from itertools import islice

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import Assignment, ConsumerLane, ConsumerParked, ConsumerRun, Item
from penstock.consumer.execution.lanes.admission import AFTER_BATCH, Admission
from penstock.consumer.execution.lanes.batches import failures
from penstock.consumer.execution_slot import ExecutionSlot, Outcome, Work
from penstock.consumer.failures.parking import FailedBatch, Parking
from penstock.consumer.handlers.deferred import DeferredCompletion
from penstock.consumer.handlers.results import Results
from penstock.consumer.handlers.route import Failed, RateLimited, Route, UndecodableError
from penstock.consumer.publishing.result_publisher import ResultTaker, Tries
from penstock.errors import PenstockError
from penstock.message import Message, Record
from penstock.routing import KeyState

#: A message that is handed over, with its key.
Entry = tuple[Hashable, Item, Message]
#: The messages of a run from one place up to another.
Stretch = tuple[ConsumerRun, int, int]
#: What came of a batch.
BatchOutcome = Failed | Results | None


class BatchProcessor:
    """Thread-safe: each call is for a lane that the caller holds."""

    def __init__(self, clock: Clock, admission: Admission, parking: Parking, results: ResultTaker) -> None:
        self._now = clock.monotonic
        self._admission = admission
        self._parking = parking
        self._results = results

    def process(
        self, lane: ConsumerLane, runs: deque[ConsumerRun], route: Route, slot: ExecutionSlot, _deadline: float
    ) -> Generator[Work, Outcome, bool]:
        """Gather a batch of one assignment's messages and hand it over. Returns whether no token is left."""
        assignment = runs[0].owner.assignment
        slot.started = self._now()
        messages, taken = self._gather_freely(lane, runs, route, slot)
        if taken and (len(messages) == route.batch or not runs or runs[0].owner.assignment is not assignment):
            outcome = yield from self._hand_over(messages, taken[0][0].records[taken[0][1]], slot)
            took_s = self._now() - slot.started
            slot.note_latency(took_s, took_s, len(messages))
            if outcome is None:
                for run, first, stop in taken:
                    assignment.tracker.complete(run.owner.block, run.indexes[first:stop])
                slot.handled += len(messages)
            else:
                self._finish_new(lane, self._entries(messages, taken), outcome, slot)
            return False
        batch = self._entries(messages, taken)
        full = self._admit_each(lane, runs, route, batch, slot)
        if batch:
            outcome = yield from self._hand_over_entries(batch, slot)
            took_s = self._now() - slot.started
            slot.note_latency(took_s, took_s, len(batch))
            self._finish_new(lane, batch, outcome, slot)
        return full

    def _admit_each(
        self, lane: ConsumerLane, runs: deque[ConsumerRun], route: Route, batch: list[Entry], slot: ExecutionSlot
    ) -> bool:
        """Add to a batch what is admitted, message by message. Returns whether no token is left."""
        assignment, now = runs[0].owner.assignment, slot.started
        gathered = {key for key, _, _ in batch}
        while runs and len(batch) < route.batch:
            run = runs[0]
            if run.owner.assignment is not assignment:
                break
            while run.next < len(run.records) and len(batch) < route.batch:
                item = (run.owner, run.indexes[run.next], run.records[run.next])
                slot.record = item[2]
                key, message = self._admission.admit(
                    lane, route, item, now, slot, arrival=run.arrival, gathered=gathered
                )
                if isinstance(message, RateLimited):
                    return message is not AFTER_BATCH
                run.next += 1
                if isinstance(message, Failed):
                    self._parking.park_unfinished(lane, key, item, message, slot)
                elif message is not None:
                    batch.append((key, item, message))
                    gathered.add(key)
            if run.next == len(run.records):
                runs.popleft()
        return False

    @staticmethod
    def _gather_freely(
        lane: ConsumerLane, runs: deque[ConsumerRun], route: Route, slot: ExecutionSlot
    ) -> tuple[list[Message], list[Stretch]]:
        """Take what nothing holds back or filters, by stretches of runs, up to what cannot be decoded."""
        messages: list[Message] = []
        taken: list[Stretch] = []
        assignment, prepare = runs[0].owner.assignment, route.prepare
        if route.gated or route.filters or lane.parked:
            return messages, taken
        while runs and len(messages) < route.batch:
            run = runs[0]
            if run.owner.assignment is not assignment or run.owner.has_unkeyed:
                break
            first = run.next
            records = run.records[first : first + route.batch - len(messages)]
            before, undecodable = len(messages), False
            try:
                if prepare is Message:  # nothing of the user's that may hang or fail
                    messages += map(Message, records)
                else:
                    for record in records:
                        slot.record = record
                        messages.append(prepare(record))  # type: ignore[arg-type] # no filter refuses it
            except UndecodableError:
                # It is admitted by itself, which says so again, and what becomes of it.
                undecodable = True
            run.next = first + len(messages) - before
            if run.next > first:
                taken.append((run, first, run.next))
            if undecodable:
                break
            if run.next == len(run.records):
                runs.popleft()
        return messages, taken

    def _entries(self, messages: Sequence[Message], taken: Sequence[Stretch]) -> list[Entry]:
        """Return what was taken by stretches message by message."""
        items = [
            (run.owner, run.indexes[place], run.records[place])
            for run, first, stop in taken
            for place in range(first, stop)
        ]
        return [(self._admission.identity(item), item, message) for item, message in zip(items, messages, strict=True)]

    def process_parked(
        self, lane: ConsumerLane, key: Hashable, parked: ConsumerParked, first: Message, slot: ExecutionSlot
    ) -> Generator[Work, Outcome, None]:
        """Try the head of a parked key, with what may be tried with it, given the head's message."""
        now = self._now()
        keys = [key]
        batch = [(key, parked.waiting[0], first)]
        if not parked.tried_alone:
            keys += self._ready_batch_keys(lane, parked, now)
            batch += self._gather(lane, keys, now, slot)
            batch.sort(key=lambda entry: _place(entry[:2]))
        heads = {fromkey: lane.parked[fromkey] for fromkey in dict.fromkeys(fromkey for fromkey, _, _ in batch)}
        for head in heads.values():
            if head.attempts == 0:
                head.since = now
        outcome = yield from self._hand_over_entries(batch, slot)
        self._finish_parked(lane, batch, heads, outcome, slot)
        for other in keys[1:]:
            waits = lane.parked[other]
            if not waits.waiting:
                self._parking.release(lane, other)
            elif other in heads and waits.attempts == 0 and waits.state is KeyState.WAITING:
                # Its head is done, and what woke it may have come before.
                lane.due.append(other)

    @staticmethod
    def _ready_batch_keys(lane: ConsumerLane, parked: ConsumerParked, now: float) -> list[Hashable]:
        """Return the other keys of a batch that failed as a whole which may be tried now."""
        assignment = parked.waiting[0][0].assignment
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
                and neighbour.waiting[0][0].assignment is assignment
            ):
                batch_keys.append(other)
        return batch_keys

    def _gather(self, lane: ConsumerLane, keys: list[Hashable], now: float, slot: ExecutionSlot) -> list[Entry]:
        """Return what may be handed over now beside the head of the first of these keys, the oldest first."""
        assignment = lane.parked[keys[0]].waiting[0][0].assignment
        route = assignment.route
        found: list[Entry] = []
        # Of each key, the place of its next message.
        places = Counter(keys[:1])
        lines = [
            _waiting(key, lane.parked[key], assignment, 1 if place == 0 else 0, route.batch)
            for place, key in enumerate(keys)
        ]
        # Keys at whose next message nothing more may be handed over: that is decided when it is the head.
        ended: set[Hashable] = set()
        for key, item in heapq.merge(*lines, key=_place):
            if 1 + len(found) == route.batch or len(ended) == len(keys):
                break
            if key in ended:
                continue
            place, parked = places[key], lane.parked[key]
            attempts = parked.tries_behind(place) if place else parked.tries
            slot.record = item[2]
            message = self._admission.readmit(route, key, item[2], now, attempts)
            places[key] += 1
            if isinstance(message, Message):
                found.append((key, item, message))
            else:
                ended.add(key)
        return found

    def _hand_over_entries(self, batch: list[Entry], slot: ExecutionSlot) -> Generator[Work, Outcome, BatchOutcome]:
        return (yield from self._hand_over([message for _, _, message in batch], batch[0][1][2], slot))

    @staticmethod
    def _hand_over(
        messages: list[Message], first: Record, slot: ExecutionSlot
    ) -> Generator[Work, Outcome, BatchOutcome]:
        slot.record = first
        outcome = yield messages
        if isinstance(outcome, DeferredCompletion):
            return Failed(PenstockError("a batch handler cannot put its completion off; return when it is done"))
        return outcome

    def _finish_new(self, lane: ConsumerLane, batch: list[Entry], outcome: BatchOutcome, slot: ExecutionSlot) -> None:
        """Complete what is done of new messages; of each key, park the first that failed with all behind it."""
        failed = failures(outcome, len(batch)) if isinstance(outcome, Failed) else {}
        failed_batch = _failed_batch(batch, outcome, failed)
        done = []
        behind: Counter[Hashable] = Counter()
        for place, (key, item, _) in enumerate(batch):
            if key in lane.parked:
                self._parking.append(lane, key, item)
                behind[key] += 1
            elif place in failed:
                self._parking.park_unfinished(lane, key, item, failed[place], slot, failed_batch=failed_batch)
            else:
                done.append(item)
        self._done(lane, done, outcome, slot)
        for key, count in behind.items():
            lane.parked[key].count_behind(count)

    def _finish_parked(
        self,
        lane: ConsumerLane,
        batch: list[Entry],
        heads: dict[Hashable, ConsumerParked],
        outcome: BatchOutcome,
        slot: ExecutionSlot,
    ) -> None:
        """Complete what is done of parked messages; what is behind the first that failed of its key waits on."""
        failed = failures(outcome, len(batch)) if isinstance(outcome, Failed) else {}
        failed_batch = _failed_batch(batch, outcome, failed)
        stuck: dict[Hashable, Failed] = {}
        behind: Counter[Hashable] = Counter()
        done = []
        for place, (key, item, _) in enumerate(batch):
            if key not in stuck and place in failed:
                stuck[key] = failed[place]
            elif key in stuck:
                behind[key] += 1
            else:
                done.append((key, item))
        # Only heads have tries that count: what is behind one was handed over with it.
        attempts = {key: head.attempts for key, head in heads.items()}
        tries = [Tries(attempts.pop(key, 0), heads[key].since) for key, _ in done]
        self._done(lane, [item for _, item in done], outcome, slot, tries)
        for key, _ in done:
            # Those of a key have the same order in the batch.
            self._parking.next_head(heads[key], slot)
        for key, failure in stuck.items():
            heads[key].count_behind(behind[key])
            self._parking.fail_head(lane, key, heads[key], failure, slot, failed_batch=failed_batch)

    def _done(
        self,
        lane: ConsumerLane,
        items: Sequence[Item],
        outcome: BatchOutcome,
        slot: ExecutionSlot,
        tries: Sequence[Tries] | None = None,
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


def _failed_batch(batch: list[Entry], outcome: BatchOutcome, failed: dict[int, Failed]) -> FailedBatch | None:
    """Return a batch of several that failed as a whole, or None."""
    whole = len(failed) == len(batch) > 1 and all(error is outcome for error in failed.values())
    if not whole:
        return None
    sizes = Counter(key for key, _, _ in batch)
    return FailedBatch(sizes, tuple(sizes))


def _waiting(
    key: Hashable, parked: ConsumerParked, assignment: Assignment, first: int, limit: int
) -> Iterator[tuple[Hashable, Item]]:
    """Yield what waits for a key and is of an assignment, from the first so many on."""
    for item in islice(parked.waiting, first, limit):
        if item[0].assignment is not assignment:
            return
        yield key, item


def _place(entry: tuple[Hashable, Item]) -> tuple[int, int]:
    record = entry[1][2]
    return record.partition(), record.offset()
