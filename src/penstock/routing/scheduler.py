"""The scheduler: chooses the lane that a free worker takes next.

Ready lanes are served oldest head first, not round robin, and each message of a fetch has its own age. The message that
has waited longest holds the watermark and, if a key is hot, decides when all is done. So the lanes of one fetch advance
side by side, and none is left with many messages when the others are finished.

Woken entries, mostly retries, have a queue of their own, in the order in which they were woken. Queued by age among the
runs, failing messages, which only get older, would always go before healthy ones. The worker decides which queue goes
first: it gives runs as much time as it gave to woken entries. So does the holder of a lane that has both. So neither
starves the other.

Workers of one kind share a *ready queue*; in pinned mode each worker has a queue of its own. A lane stays in one queue
for life.

Thread-safe without waiting. A lane is *claimed* from the moment it is queued until its holder gives it back. So it is
in at most one heap and held by at most one worker: invariant I1. The claim is a lock that is only ever tried, so
testing and setting are one step. Heaps change only through `heapq`, whose calls on numbers run in C and are one step to
other threads. A thread that is interrupted here holds nothing that another thread waits for.

No run is left in an unclaimed lane. A thread that appends does so before it tries the claim. A thread that gives a lane
back releases the claim before it looks for work. The later of the two finds the lane free and the run in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Generic, TypeVar

from penstock.routing.lanes import Lane

OwnerT = TypeVar("OwnerT")
RecordT = TypeVar("RecordT")


class Scheduler(Generic[OwnerT, RecordT]):
    """The lanes of one consumer and the order in which they are served, in a ready queue for each group of workers.

    Args:
        queues: the ready queue of each lane, by the lane's number.
    """

    def __init__(self, queues: Sequence[int]) -> None:
        self.lanes: tuple[Lane[OwnerT, RecordT], ...] = tuple(Lane(*place) for place in enumerate(queues))
        self.queues = max(queues) + 1
        #: A heap for each queue. Entries are: arrival of the head x number of lanes + lane number. One number compares
        #: faster than two.
        self._ready: list[list[int]] = [[] for _ in range(self.queues)]
        #: The same for lanes that serve woken entries, with a running count instead of the arrival.
        self._due: list[list[int]] = [[] for _ in range(self.queues)]
        self._woken = count()

    def ready(self, lanes: Iterable[Lane[OwnerT, RecordT]]) -> list[int]:
        """Queue these lanes after runs were appended; return the ready queue of each lane that became ready.

        The caller may wake one worker for each entry.
        """
        queues = []
        for lane in lanes:
            # The common case of `_enqueue`, inlined: this runs for every lane of every fetch.
            if lane.claim.acquire(False):  # noqa: FBT003 - a keyword costs as much as the call
                if lane.runs or lane.due:
                    queues.append(self._push(lane))
                    continue
                lane.claim.release()
                if (queue := self._enqueue(lane)) is not None:
                    queues.append(queue)
        return queues

    def wake(self, lane: Lane[OwnerT, RecordT], what: object) -> list[int]:
        """Wake a parked key, or runs set aside, in a lane. Returns queues as `ready` does."""
        lane.due.append(what)
        return self.ready((lane,))

    def take(self, queue: int, owed_s: float = 0.0) -> Lane[OwnerT, RecordT] | None:
        """Return a ready lane of a queue, or None. The caller must give the lane back.

        If the caller owes seconds to runs, lanes with runs come first; otherwise lanes with woken entries.
        """
        ready, due = self._ready[queue], self._due[queue]
        try:
            if due and (not owed_s or not ready):
                return self.lanes[heapq.heappop(due) % len(self.lanes)]
            return self.lanes[heapq.heappop(ready) % len(self.lanes)] if ready else None
        except IndexError:  # another thread took the last one meanwhile
            # The other heap may still have one.
            return self.take(queue, owed_s) if ready or due else None

    def give_back(self, lane: Lane[OwnerT, RecordT]) -> int | None:
        """Release a lane. Returns its queue if it is ready again: the caller takes it, or wakes a worker."""
        lane.claim.release()
        return self._enqueue(lane) if lane.runs or lane.due else None

    def _enqueue(self, lane: Lane[OwnerT, RecordT]) -> int | None:
        """Claim a lane that has work and is free, and put it on its heap."""
        while (lane.runs or lane.due) and lane.claim.acquire(False):  # noqa: FBT003 - as above
            # Only the holder removes work, and that is this thread now: work seen here stays.
            if lane.runs or lane.due:
                return self._push(lane)
            # A former holder emptied it before the claim. Look again after the release: a thread that appended
            # meanwhile found the lane claimed and relies on this.
            lane.claim.release()
        return None

    def _push(self, lane: Lane[OwnerT, RecordT]) -> int:
        """Put a claimed lane with work on its heap and return its queue."""
        queue = lane.queue
        if lane.due and lane.serves_due:
            heapq.heappush(self._due[queue], next(self._woken) * len(self.lanes) + lane.number)
        else:
            run = lane.runs[0]
            arrival = run.arrival + run.indexes[run.next]
            heapq.heappush(self._ready[queue], arrival * len(self.lanes) + lane.number)
        return queue

    def waiting(self, queue: int) -> int:
        """Return how many lanes of a queue are ready and not taken."""
        return len(self._ready[queue]) + len(self._due[queue])

    @property
    def idle(self) -> bool:
        """Whether no lane is ready or held. Parked keys and runs set aside do not count."""
        return not any(lane.claim.locked() for lane in self.lanes)
