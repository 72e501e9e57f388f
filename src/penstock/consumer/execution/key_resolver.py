"""The key resolver: it calls the users' `key=` functions, on a thread of its own, and puts messages on their lanes.

A lane cannot be chosen before the key is known, and a function that looks a key up may take its time, or hang: on the
poll thread that would cost the membership of the group. All fetches of handlers with such a function go through
one queue, so the messages of a partition come to their lanes in order. What is here is in flight, and counts for
back-pressure as anything else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import ConsumerRun, Fetch
from penstock.consumer.execution_slot import ExecutionSlot
from penstock.consumer.handlers.handler import Kind
from penstock.errors import MessageFormatError, raised
from penstock.message import Record
from penstock.routing import Run, Scheduler

#: Seconds for which messages are collected before they are put on their lanes, about.
_FLUSH_S = 0.005

#: A fetch, the arrival of its first message, the messages that are not done, and their places in the fetch.
Unkeyed = tuple[Fetch, int, Sequence[Record], Sequence[int]]


class KeyResolver:
    """Puts messages on lanes by keys that users' functions give.

    Until `start` is called, `put` itself puts each fetch on its lanes: so it is where an engine is driven by hand.
    Afterwards `put` never waits, and a thread does it, whose `slot` says what it is at. A revocation waits for that
    slot as for a worker's: it sets `fetch` before it reads whether the assignment is active.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        scheduler: Scheduler[Fetch, Record],
        *,
        wake: Callable[[Sequence[int]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._now = clock.monotonic
        self._scheduler = scheduler
        self._wake = wake
        self._fail = fail
        self._queue: SimpleQueue[Unkeyed | None] = SimpleQueue()
        #: Where keys are asked for. Written by the thread alone.
        self.slot = ExecutionSlot(Kind.THREAD, f"penstock-keys-{name}")
        self._thread = threading.Thread(target=self._main, name=self.slot.name, daemon=True)
        self._threaded = self._retired = False
        # What has a lane but is not on it yet, of one fetch, and when it is to be. Under the lock, which is never held
        # while a user's function is called.
        self._lock = threading.Lock()
        self._runs: dict[int, ConsumerRun] = {}
        self._flush_at = 0.0
        # Fetches that were put here, written by the poll thread, and those that are on their lanes, by its own.
        self._put = self._done = 0

    @property
    def idle(self) -> bool:
        """Whether all that was put here is on its lanes. On the poll thread: nothing is put meanwhile."""
        return self._done == self._put

    def start(self) -> None:
        """Have a thread call the functions from now on."""
        self._threaded = True
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the message it is at. It is not waited for: the user's function may never return."""
        self._retired = True
        self._queue.put(None)

    def put(self, fetch: Fetch, arrival: int, records: Sequence[Record], indexes: Sequence[int]) -> None:
        """Take messages of a fetch that are to be put on their lanes. On the poll thread."""
        if not self._threaded:
            try:
                self._assign_lanes(fetch, arrival, records, indexes)
            finally:
                self.slot.leave()
            return
        self._put += 1
        self._queue.put((fetch, arrival, records, indexes))

    def _main(self) -> None:
        self.slot.thread_id = threading.get_ident()
        try:
            while (unkeyed := self._queue.get()) is not None:
                try:
                    self._assign_lanes(*unkeyed)
                finally:
                    self.slot.leave()
                # After its lanes are ready: who sees this finds them claimed, or their messages done.
                self._done += 1
        except:  # noqa: E722 - see `raised`; a defect must stop the consumer, not one thread in silence
            self._fail(raised())

    def _assign_lanes(self, fetch: Fetch, arrival: int, records: Sequence[Record], indexes: Sequence[int]) -> None:
        slot, assignment, runs = self.slot, fetch.assignment, self._runs
        slot.fetch = fetch
        ordering = assignment.route.ordering
        identities = fetch.identities = {}
        for record, index in zip(records, indexes, strict=True):
            if not assignment.active or self._retired:
                break
            slot.started = self._now()
            slot.record = record
            try:
                # Kept, so that the function is called once: what it says may change, or take its time again.
                number, identities[index] = ordering.keyed(record)
            except MessageFormatError:
                # The message fails with it when it is its turn.
                fetch.has_unkeyed = True
                number = ordering.keyless_lane(record)
            with self._lock:
                if (run := runs.get(number)) is None:
                    runs[number] = Run(fetch, arrival, [record], [index])
                else:
                    run.records.append(record)
                    run.indexes.append(index)
            self.flush_due()
        with self._lock:
            self._flush()

    def flush_due(self) -> None:
        """Put what has been collected for long enough on its lanes. Also by the poll thread, for this one may hang."""
        if self._runs and self._now() >= self._flush_at:
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        """Put what was collected on its lanes; called with the lock held, so that it comes there in order."""
        runs = self._runs
        lanes = [self._scheduler.lanes[number] for number in runs]
        for lane, run in zip(lanes, runs.values(), strict=True):
            lane.append(run)
        runs.clear()
        self._flush_at = self._now() + _FLUSH_S
        # Appended before `Scheduler.ready`: see the argument in penstock.routing.scheduler.
        self._wake(self._scheduler.ready(lanes))
