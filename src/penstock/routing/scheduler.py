"""The scheduler: which lane a free worker takes next.

Ready lanes are served oldest head first, not round robin, and each message of a fetch has its own age: the one that
has waited longest holds the watermark and, when a key is hot, decides when all is done. So lanes of one fetch advance
side by side, and none is left with many messages when the others are through.

What was woken, retries above all, has a queue of its own, in the order in which it was woken: were it queued by age
among the others, failing messages, which only get older, would go before all that is healthy for ever, and the oldest
of them before all others. The worker says which goes first: it gives runs as much of its time as it gave to what was
woken, and so does the holder of a lane that has both. So neither starves the other.

Workers of one kind share a *ready queue*; in pinned mode each worker has a queue of its own. A lane is in one queue for
life.

Thread-safe without waiting. A lane is *claimed* from the moment it is queued until its holder gives it back, so it
stands in at most one heap and is held by at most one worker: that is invariant I1. The claim is a lock that is only
ever tried, so testing and setting are one step; heaps change only through `heapq`, whose calls on numbers run in C
from end to end, each as one step to other threads. A thread interrupted anywhere in here holds nothing that
another waits for.

No run is left without a claim: whoever appends, does so before it tries the claim; whoever gives back, releases the
claim before it looks for work. Whichever of the two is later finds the lane free and the run there.
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
        #: One heap a queue of arrival of the head x number of lanes + lane number: one number compares faster than two.
        self._ready: list[list[int]] = [[] for _ in range(self.queues)]
        #: The same of lanes that serve what was woken, by the count of those before them instead of an arrival.
        self._due: list[list[int]] = [[] for _ in range(self.queues)]
        self._woken = count()

    def ready(self, lanes: Iterable[Lane[OwnerT, RecordT]]) -> list[int]:
        """Queue these lanes, to which runs were appended; return the ready queue of each that became ready by it.

        So many workers of these queues may be needed.
        """
        queues = []
        for lane in lanes:
            # `_enqueue`, written out for the common case: this is done for every lane of every fetch.
            if lane.claim.acquire(False):  # noqa: FBT003 - a keyword costs as much as the call
                if lane.runs or lane.due:
                    queues.append(self._push(lane))
                    continue
                lane.claim.release()
                if (queue := self._enqueue(lane)) is not None:
                    queues.append(queue)
        return queues

    def wake(self, lane: Lane[OwnerT, RecordT], what: object) -> list[int]:
        """Wake a parked key, or runs that were set aside, in a lane. Returns queues as `ready` does."""
        lane.due.append(what)
        return self.ready((lane,))

    def take(self, queue: int, owed_s: float = 0.0) -> Lane[OwnerT, RecordT] | None:
        """Give the caller a ready lane of its queue, or None. It must give it back.

        Where it owes seconds to runs, a lane whose runs are served comes first; else one in which something was woken.
        """
        ready, due = self._ready[queue], self._due[queue]
        try:
            if due and (not owed_s or not ready):
                return self.lanes[heapq.heappop(due) % len(self.lanes)]
            return self.lanes[heapq.heappop(ready) % len(self.lanes)] if ready else None
        except IndexError:  # another took the last one meanwhile
            # There may be one in the other heap; where both are empty, nothing is left.
            return self.take(queue, owed_s) if ready or due else None

    def give_back(self, lane: Lane[OwnerT, RecordT]) -> int | None:
        """Take a lane back. Returns its queue when it is ready again: the caller looks there again, or wakes one."""
        lane.claim.release()
        return self._enqueue(lane) if lane.runs or lane.due else None

    def _enqueue(self, lane: Lane[OwnerT, RecordT]) -> int | None:
        """Claim a lane that has work and is free, and put it on its heap."""
        while (lane.runs or lane.due) and lane.claim.acquire(False):  # noqa: FBT003 - as above
            # Only a holder takes work away, and that is this thread now: what is seen here stays.
            if lane.runs or lane.due:
                return self._push(lane)
            # A former holder finished it before the claim. Look again after the release: whoever appended meanwhile
            # found the lane claimed and relies on this.
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
        """Whether no lane is ready or held; keys and runs that wait in one do not count."""
        return not any(lane.claim.locked() for lane in self.lanes)
