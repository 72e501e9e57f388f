"""Batches: messages that a handler gets in one call. They were set aside or parked; new ones go in slices instead.

A handler without batches gets a batch of one, as the message itself. A batch has messages of one handler, of any
partitions of its topics. Before it is handed over, the lane's holder shows the fetches of the batch in its slot, and
then leaves out messages of inactive assignments. `penstock.consumer.lanes.processor` gives the argument.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import (
    ConsumerAside,
    ConsumerLane,
    ConsumerParked,
    ConsumerRun,
    Fetch,
    Item,
    require_key,
)
from penstock.consumer.handlers.results import DeferredCompletion, Results
from penstock.consumer.handlers.route import Answer, Failed, RateLimited, Route, failure_of
from penstock.consumer.lanes.parking import NotDue, Parking, key_of, place_of
from penstock.consumer.lanes.slot import ExecutionSlot, Outcome, Unfinished, Work
from penstock.consumer.outbox.outbox import HandlerResults, Tries
from penstock.errors import BatchError, PenstockError
from penstock.message import FetchedMessage, Message, Record

#: The message must wait for messages of its key in the batch that is being gathered.
AFTER_BATCH = RateLimited()


class Batch:
    """Messages in the order of their hand-over.

    Kept as stretches: as a rule a batch is built and completed by stretches, without a step per message.
    """

    __slots__ = ("messages", "records", "stretches")

    def __init__(self) -> None:
        #: The argument of the handler, which may change the list.
        self.messages: list[Message] = []
        self.records: list[Record] = []
        #: Consecutive messages of one fetch: the fetch, and their places in its block.
        self.stretches: list[tuple[Fetch, list[int]]] = []

    def add(self, item: Item, message: Message) -> None:
        """Add a message."""
        fetch, index, record = item
        if not self.stretches or self.stretches[-1][0] is not fetch:
            self.stretches.append((fetch, []))
        self.stretches[-1][1].append(index)
        self.messages.append(message)
        self.records.append(record)

    def items(self) -> Iterator[Item]:
        """Yield the messages as items."""
        records = iter(self.records)
        for fetch, indexes in self.stretches:
            for index in indexes:
                yield fetch, index, next(records)

    def claim(self, slot: ExecutionSlot) -> Batch:
        """Show the fetches of the batch in the slot; return the batch without messages of inactive assignments."""
        slot.fetches = fetches = [fetch for fetch, _ in self.stretches]
        if all(fetch.assignment.active for fetch in fetches):
            return self
        active = Batch()
        for item, message in zip(self.items(), self.messages, strict=True):
            if item[0].assignment.active:
                active.add(item, message)
        return active.claim(slot)


class Batches:
    """Gathers new messages, hands batches over, and applies their outcomes.

    Thread-safe: the caller of every method holds the lane.
    """

    def __init__(self, clock: Clock, parking: Parking, results: HandlerResults) -> None:
        self._now = clock.monotonic
        self._parking = parking
        self._submit = results.submit

    def process(self, lane: ConsumerLane, aside: ConsumerAside, slot: ExecutionSlot) -> Generator[Work, Outcome, bool]:
        """Hand over a batch of runs set aside. Return whether it ended because no token is left."""
        batch, runs = Batch(), aside.runs
        limit = runs[0].owner.assignment.route.batch
        halt: RateLimited | None = None
        slot.started = self._now()
        while runs and halt is None and len(batch.records) < limit:
            run, before = runs[0], runs[0].next
            slot.fetch = run.owner
            if run.owner.assignment.active:
                halt = self._take(lane, run, batch, slot)
            else:
                run.next = len(run.records)
            aside.count -= run.next - before
            if run.next == len(run.records):
                runs.popleft()
        if batch.records:
            yield from self.hand_over(lane, batch, slot)
        return halt is not None and halt is not AFTER_BATCH

    def _take(self, lane: ConsumerLane, run: ConsumerRun, batch: Batch, slot: ExecutionSlot) -> RateLimited | None:
        """Add messages of a run to a batch until it is full. Return the reason why the next one must wait, or None."""
        route = run.owner.assignment.route
        if not (route.gated or route.filters or lane.parked or run.owner.has_unkeyed):
            _take_stretch(run, route, batch, slot)
        # The rest, message by message: all of it, or from the first that cannot be decoded, whose error comes again.
        while run.next < len(run.records) and len(batch.records) < route.batch:
            item = (run.owner, run.indexes[run.next], run.records[run.next])
            slot.record = item[2]
            answer = self._admit(lane, item, batch, slot, arrival=run.arrival + item[1])
            if isinstance(answer, RateLimited):
                return answer
            run.next += 1
            if answer is not None:
                batch.add(item, answer)
        return None

    def _admit(
        self, lane: ConsumerLane, item: Item, batch: Batch, slot: ExecutionSlot, *, arrival: int
    ) -> Message | RateLimited | None:
        """Return the message to hand over, or the reason to wait, or None if the filter refused it or it is parked now.

        A key of the batch is not parked here: if its messages in the batch fail, they come before this one.
        """
        record, route, now = item[2], item[0].assignment.route, slot.started
        # Before the key: a message that the filter refuses may have no valid key.
        passes = route.screen(record)
        if not passes:
            filtered(item, slot)
            return None
        answer: Answer
        try:
            key = require_key(item)
        except PenstockError as error:
            key, answer = place_of(record), failure_of(error)
        else:
            if route.retry_headers is not None and (due_at := route.retry_headers.due_at(record)) > now:
                key, answer = NotDue(key, place_of(record)), due_at
            elif (parked := lane.parked.get(key)) is not None:
                self._parking.append(parked, item)
                return None
            else:
                answer = passes if isinstance(passes, Failed) else route.admit(key, record, now, arrival)
        if isinstance(answer, (Message, RateLimited)):
            return answer
        if any(key_of(other) == key for other in batch.items()):
            return AFTER_BATCH
        if isinstance(answer, Failed):
            self._parking.park_unfinished(lane, key, item, answer, slot)
        else:
            self._parking.wait_until(self._parking.park(lane, (key,), (item,)), answer)
        return None

    def hand_over(
        self, lane: ConsumerLane, batch: Batch, slot: ExecutionSlot, parked: ConsumerParked | None = None
    ) -> Generator[Work, Outcome, None]:
        """Hand over a batch and apply its outcome. With `parked`, its messages are the first that wait there.

        Messages of inactive assignments are left out. A parked batch with one of them is not handed over: the caller
        looks at it again.
        """
        claimed = batch.claim(slot)
        if not claimed.records or (claimed is not batch and parked is not None):
            slot.fetches = ()
            return
        fetch = slot.fetch = slot.fetches[0]
        # The time of filters and decoders does not count for the limit of the handler.
        slot.started, slot.record = self._now(), claimed.records[0]
        outcome: Outcome
        if fetch.assignment.route.batch == 1:
            outcome = yield claimed.messages[0]
        else:
            outcome = yield claimed.messages
            if isinstance(outcome, DeferredCompletion):
                outcome = Failed(
                    PenstockError("a batch handler cannot defer its completion; return when the batch is done")
                )
        if parked is None:
            now, count = self._now(), len(claimed.records)
            slot.note_pace(now - slot.started, count)
            slot.note_latency(now - slot.started, now, count)
        if isinstance(outcome, (Failed, DeferredCompletion)):
            self._unfinished(lane, list(claimed.items()), outcome, slot, parked)
        else:
            if outcome is None:
                for fetch, indexes in claimed.stretches:
                    complete(fetch, indexes, slot)
            else:
                tries = None if parked is None else Tries(parked.attempts, parked.since)
                self._submit_results(lane, list(claimed.items()), outcome, tries, slot)
            if parked is not None:
                for _ in claimed.records:
                    self._parking.next_head(parked, slot)
        slot.fetches = ()

    def _submit_results(
        self, lane: ConsumerLane, items: Sequence[Item], results: Results, tries: Tries | None, slot: ExecutionSlot
    ) -> None:
        """Submit the results of a batch, and complete its messages without results."""
        if results.each is None:
            self._submit(lane, items, results.messages, tries and [tries] * len(items))
            return
        for item, its_results in zip(items, results.each, strict=True):
            if its_results:
                self._submit(lane, (item,), its_results, tries and [tries])
            else:
                done((item,), slot)

    def _unfinished(
        self,
        lane: ConsumerLane,
        items: Sequence[Item],
        outcome: Unfinished,
        slot: ExecutionSlot,
        parked: ConsumerParked | None,
    ) -> None:
        """Complete the finished messages. The others of each key wait from its first failure on.

        A batch that failed as a whole stays together, unless all its messages are given up: its call was abandoned.
        """
        keys, failed, parking = [key_of(item) for item in items], _failures(outcome, items), self._parking
        is_whole = len(failed) == len(items) > 1 and all(error is outcome for error in failed.values())
        if is_whole and isinstance(outcome, Failed) and outcome.call is None:
            if parked is None:
                parked = parking.park(lane, keys, items)
                parked.since = slot.started
            parking.fail_head(parked, outcome, slot, together=len(items))
            return
        finished, stuck = _by_keys(keys, failed)
        done([items[place] for place in finished], slot)
        if parked is not None:
            # In each key, finished messages come before the others.
            if len(items) > 1 or len(parked.keys) > 1:
                parking.split(parked)
            for place in finished:
                parking.next_head(lane.parked[keys[place]], slot)
        for key, (first, *behind) in stuck.items():
            if parked is None:
                parking.park_unfinished(lane, key, items[first], failed[first], slot)
                for place in behind:
                    parking.append(lane.parked[key], items[place])
            else:
                parking.settle_head(lane.parked[key], failed[first], slot)
            for place in behind:
                lane.parked[key].count_behind(items[place])


def _take_stretch(run: ConsumerRun, route: Route, batch: Batch, slot: ExecutionSlot) -> None:
    """Add messages without limits or filters to a batch, up to the first that cannot be decoded."""
    prepare, first = route.prepare, run.next
    messages: list[Message] = []
    try:
        for record in run.records[first : first + route.batch - len(batch.records)]:
            if prepare is Message:  # no user code that may hang or fail
                message = FetchedMessage()
                message._record = record  # noqa: SLF001 - see there
                messages.append(message)
            else:
                slot.record = record
                messages.append(prepare(record))  # type: ignore[arg-type] # no filter refuses it
    except PenstockError:
        pass
    if messages:
        run.next = stop = first + len(messages)
        batch.stretches.append((run.owner, run.indexes[first:stop]))
        batch.messages += messages
        batch.records += run.records[first:stop]


def _failures(outcome: Unfinished, items: Sequence[Item]) -> Mapping[int, Unfinished]:
    """Return the places in the batch that are not done, each with its outcome."""
    everything: dict[int, Unfinished] = dict.fromkeys(range(len(items)), outcome)
    if isinstance(outcome, DeferredCompletion) or not isinstance(outcome.error, BatchError):
        return everything
    if items[0][0].assignment.route.batch == 1:
        return everything
    named: dict[int, Unfinished] = {
        place: failure_of(error) if isinstance(error, BaseException) else outcome
        for place, error in outcome.error.failed.items()
        if isinstance(place, int) and 0 <= place < len(items)
    }
    # If a named place does not exist, nothing is certain, so no message counts as done.
    return named if len(named) == len(outcome.error.failed) > 0 else everything


def _by_keys(keys: Sequence[Hashable], failed: Container[int]) -> tuple[list[int], dict[Hashable, list[int]]]:
    """Return the finished places; and by key, the places from its first failed message on."""
    finished: list[int] = []
    stuck: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        if key in stuck or place in failed:
            stuck.setdefault(key, []).append(place)
        else:
            finished.append(place)
    return finished, stuck


def complete(fetch: Fetch, indexes: Sequence[int], slot: ExecutionSlot) -> None:
    """Complete messages of one fetch that a handler has finished."""
    fetch.assignment.tracker.complete(fetch.block, indexes)
    slot.handled += len(indexes)


def done(items: Iterable[Item], slot: ExecutionSlot) -> None:
    """Complete messages that a handler has finished."""
    for fetch, same in groupby(items, key=itemgetter(0)):
        complete(fetch, [index for _, index, _ in same], slot)


def filtered(item: Item, slot: ExecutionSlot) -> None:
    """Complete a message that the filter refused."""
    item[0].assignment.tracker.complete(item[0].block, (item[1],))
    slot.filtered += 1
