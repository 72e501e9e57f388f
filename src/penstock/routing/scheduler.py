"""The scheduler: which lane a free worker takes next.

Ready lanes are served oldest head first, not round robin: the message that has waited longest is the one that holds
the watermark and, when a key is hot, the one that decides when all is done. In pinned mode each worker has one lane
for life, and only ever takes that.

Thread-safe. One lock guards the heaps and the `claimed` flag of every lane; no call blocks while holding it. A lane
is *claimed* from the moment it is queued until its holder gives it back without work, so it stands in at most one
heap and is held by at most one worker: that is invariant I1. The router appends to a lane before it asks for the
lock, and the holder looks for more work under the lock before it unclaims: no run can be left without a claim.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from penstock.routing.hashing import lane_of
from penstock.routing.lanes import Lane

#: Lanes for each worker. More lanes delay fewer neighbours of a slow key; each visit of a lane costs some
#: microseconds, so with empty handlers many more would tell.
LANES_PER_WORKER = 64

OwnerT = TypeVar("OwnerT")
RecordT = TypeVar("RecordT")


class Scheduler(Generic[OwnerT, RecordT]):
    """The lanes of one consumer and the order in which they are served.

    Args:
        workers: number of workers.
        lanes_per_worker: how many lanes there are for each.
        pinned: one lane for each worker, which alone serves it.

    Attributes:
        lanes: all lanes, by number.
        slots: how many groups of workers there are: one that shares all lanes, or one for each worker when pinned.
    """

    def __init__(self, workers: int, *, lanes_per_worker: int = LANES_PER_WORKER, pinned: bool = False) -> None:
        count = workers if pinned else workers * lanes_per_worker
        self.lanes: tuple[Lane[OwnerT, RecordT], ...] = tuple(Lane(number) for number in range(count))
        self.pinned = pinned
        self.slots = workers if pinned else 1
        self._lock = threading.Lock()
        #: One heap a slot of (arrival of the head, lane number).
        self._ready: list[list[tuple[int, int]]] = [[] for _ in range(self.slots)]
        self._held = 0

    def lane_number(self, key: bytes) -> int:
        """Return the number of the lane that serves a key."""
        return lane_of(key, len(self.lanes))

    def slot_of(self, worker: int) -> int:
        """Return the slot a worker takes lanes from."""
        return worker % self.slots

    def ready(self, lanes: Iterable[Lane[OwnerT, RecordT]]) -> list[int]:
        """Tell that runs were appended to these lanes.

        Returns:
            The slot of each lane that became ready by it: so many workers of these slots should be woken.
        """
        with self._lock:
            return [self._queue(lane) for lane in lanes if not lane.claimed and lane.has_work]

    def wake(self, lane: Lane[OwnerT, RecordT], key: Hashable) -> list[int]:
        """Tell that a parked key of a lane is due. Returns slots as `ready` does."""
        lane.due.append(key)
        return self.ready((lane,))

    def take(self, slot: int) -> Lane[OwnerT, RecordT] | None:
        """Give the caller the ready lane of its slot whose head is oldest, or None. It must give it back."""
        with self._lock:
            ready = self._ready[slot]
            if not ready:
                return None
            self._held += 1
            return self.lanes[heapq.heappop(ready)[1]]

    def give_back(self, lane: Lane[OwnerT, RecordT]) -> int | None:
        """Take a lane back. Returns its slot when it is ready again: the caller looks there once more, or wakes one."""
        with self._lock:
            self._held -= 1
            lane.claimed = False
            return self._queue(lane) if lane.has_work else None

    def _queue(self, lane: Lane[OwnerT, RecordT]) -> int:
        """Put an unclaimed lane with work on its heap; called with the lock held."""
        lane.claimed = True
        # A due retry is older than any run: serve it first.
        lane.arrival = 0 if lane.due else lane.runs[0].arrival
        slot = lane.number % self.slots
        heapq.heappush(self._ready[slot], (lane.arrival, lane.number))
        return slot

    @property
    def idle(self) -> bool:
        """Whether no lane is ready or held; parked keys that are not due do not count."""
        with self._lock:
            return not self._held and not any(self._ready)


__all__ = ["LANES_PER_WORKER", "Scheduler"]
