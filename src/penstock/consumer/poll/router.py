"""The router: a fetched batch becomes tracked runs on lanes.

It runs on the poll thread and is most of what that thread does, so the loops are written for speed: one call a
partition to the tracker, one a lane to the scheduler, and a handful of calls into C for each message.

Users' `key=` functions are called here too: a lane cannot be chosen before the key is known. They are to be quick. The
router's `slot` shows any thread, as a worker's does, at which message one of them is and since when; one that keeps the
poll thread from its commits is logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import compress, groupby
from operator import not_

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import Assignment, Assignments, ConsumerLane, ConsumerRun, Fetch, total_size_in_bytes
from penstock.consumer.handlers.handler import Kind
from penstock.consumer.lanes.slot import ExecutionSlot
from penstock.message import Record, column
from penstock.routing import Run, Scheduler

_log = logging.getLogger(__name__)


class Router:
    """Puts batches on lanes. Belongs to the poll thread.

    Args:
        name: names its thread.
        on_dropped: called once an assignment is inactive: what waited for it goes on.
        topics: all that there will be, or nothing where that is not known.
        slow_keys_s: seconds that the keys of one fetch may take before that is logged.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        assignments: Assignments,
        scheduler: Scheduler[Fetch, Record],
        *,
        wake: Callable[[Sequence[int]], None],
        on_dropped: Callable[[], None],
        topics: Collection[str] = (),
        slow_keys_s: float,
    ) -> None:
        #: The topic of all messages, or nothing where there are several. Asking each costs a tenth of the routing.
        self._only_topic = next(iter(topics)) if len(topics) == 1 else ""
        self._assignments = assignments
        self._scheduler = scheduler
        self._wake = wake
        self._on_dropped = on_dropped
        self._clock = clock.monotonic
        self._slow_keys_s = slow_keys_s
        #: Where a key function is being called. Written by the poll thread.
        self.slot = ExecutionSlot(Kind.THREAD, f"penstock-poll-{name}")
        #: The arrival of the next message: they are counted from 1, for 0 is older than all.
        self._arrival = 1
        self._now = 0.0
        #: Numbers from 0 on, which runs of all fetches share: they would be an object for each message in flight.
        self._indexes: list[int] = []
        self._counts: dict[tuple[str, int], int] = {}
        #: Messages taken in, ever.
        self.received = 0
        #: Messages of partitions that were revoked while they were under way; their next owner gets them.
        self.stale = 0
        #: Messages of those taken in that a former owner had done.
        self.restored = 0

    def route(self, batch: Sequence[Record], now: float) -> None:
        """Track a batch of messages without errors, put them on their lanes and wake workers."""
        self._now = now
        touched: dict[int, ConsumerLane] = {}
        at = 0
        # A batch holds long stretches of one partition; their ends are found in C.
        for place, same in groupby(self._places(batch)):
            records = batch[at : at + len(list(same))]
            at += len(records)
            topic, partition = place if isinstance(place, tuple) else (self._only_topic, place)
            self._counts[topic, partition] = self._counts.get((topic, partition), 0) + len(records)
            assignment = self._assignments.get(topic, partition)
            if assignment is None:
                self.stale += len(records)
                continue
            self.received += len(records)
            for rising, offsets in _rising(records):
                self._put(self._assignments.get(topic, partition) or assignment, rising, offsets, touched)
                self._arrival += len(rising)
        # Appended before `Scheduler.ready`: see the argument in penstock.routing.scheduler.
        self._wake(self._scheduler.ready(touched.values()))

    def take_counts(self) -> dict[tuple[str, int], int]:
        """Return the messages by topic and partition since the last call; those of stretches, not asked one by one."""
        counts, self._counts = self._counts, {}
        return counts

    def _places(self, batch: Sequence[Record]) -> list[int] | list[tuple[str, int]]:
        """Return where each message comes from; its partition alone where there is one topic only."""
        if self._only_topic:
            return column(batch, "partition")
        return [(record.topic(), record.partition()) for record in batch]

    def _put(
        self,
        assignment: Assignment,
        records: Sequence[Record],
        offsets: Sequence[int],
        touched: dict[int, ConsumerLane],
    ) -> None:
        if offsets[0] < assignment.tracker.position:
            assignment = self._went_back(assignment, offsets[0])
        block = assignment.tracker.register(offsets, total_size_in_bytes(records, assignment))
        self.restored += len(offsets) - block.left
        fetch = Fetch(assignment, block, self._now)
        # Without those that a former owner had done.
        todo = None if block.left == len(offsets) else block.done
        ordering, lanes = assignment.route.ordering, assignment.route.lanes
        if ordering.calls_function:
            self._ask_keys(fetch, records)
        else:
            fetch.ask_keys(records)
        numbers = ordering.lane_numbers(assignment.topic, assignment.partition, records, fetch.keys)
        runs: dict[int, ConsumerRun] = {}
        if len(self._indexes) < len(numbers):
            self._indexes = list(range(len(numbers)))
        taken: Iterable[tuple[int, int, Record]] = zip(self._indexes, numbers, records, strict=False)
        if todo is not None:
            taken = compress(taken, map(not_, todo))
        for index, number, record in taken:
            run = runs.get(number)
            if run is None:
                runs[number] = Run(fetch, self._arrival, [record], [index])
            else:
                run.records.append(record)
                run.indexes.append(index)
        for number, run in runs.items():
            lane = lanes[number]
            lane.runs.append(run)
            touched[lane.number] = lane

    def _ask_keys(self, fetch: Fetch, records: Sequence[Record]) -> None:
        """Have a user's function say what stands for the keys of a fetch, and log that where it takes its time."""
        slot = self.slot
        slot.thread_id = threading.get_ident()
        slot.fetch, slot.started = fetch, self._clock()
        fetch.ask_keys(records, slot)  # it may never return
        took_s = self._clock() - slot.started
        slot.leave()
        if took_s > self._slow_keys_s:
            # Once more only where it is much slower.
            self._slow_keys_s = 2 * took_s
            _log.warning(
                "the key function of %s took %.1f s for %d messages of %s, and the poll thread, which calls it, cannot "
                "commit meanwhile; look nothing up in it, or have the producer send the key in a header, for "
                "key='header:name'",
                fetch.assignment.route.handler.name,
                took_s,
                len(records),
                fetch.assignment,
            )

    def _went_back(self, former: Assignment, offset: int) -> Assignment:
        """Follow a log that went back (truncated, or reset by policy): a new incarnation starts at `offset`."""
        _log.warning(
            "%s went back from offset %d to %d (log truncated, recreated or reset); handling goes on from there",
            former,
            former.tracker.position,
            offset,
        )
        return self.begin_again(former, offset)

    def begin_again(self, former: Assignment, start: int | None) -> Assignment:
        """Put a new incarnation of a partition in the place of the former, whose messages are dropped.

        `start` is the offset at which reading starts, or None where the first message will show it.
        """
        assignment = Assignment(former.topic, former.partition, former.route, start=start, owner=former.owner)
        assignment.paused, assignment.limit = former.paused, former.limit
        assignment.is_sought = start is None
        self._assignments.put(assignment)
        self._on_dropped()
        return assignment


def _rising(records: Sequence[Record]) -> Iterator[tuple[Sequence[Record], Sequence[int]]]:
    """Yield stretches whose offsets rise, with these: one, save where the log went back between two fetches."""
    offsets: list[int] = column(records, "offset")
    if offsets == sorted(offsets):  # in C; what follows is for one batch in the life of a log
        yield records, offsets
        return
    begin = 0
    for place in range(1, len(offsets)):
        if offsets[place] <= offsets[place - 1]:
            yield records[begin:place], offsets[begin:place]
            begin = place
    yield records[begin:], offsets[begin:]
