"""A lane: an ordered queue of runs, and the keys of it that are parked.

A lane is filled by the router and emptied by the one worker that holds it; who holds it is the scheduler's business. So
the queue needs no lock of its own: `deque.append` and `deque.popleft` are atomic, the router only appends, the holder
only takes. Parked keys and held runs belong to the holder alone.

The router may be two threads, of which one has the messages whose keys a user's function gives; those of a topic always
come from the same. A count of appended runs that both raise at once may miss one. It only tells the holder that
something came since he read it, and each appends before he counts, so what is missed was there at that reading.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from enum import Enum
from typing import Generic, TypeVar

OwnerT = TypeVar("OwnerT")
RecordT = TypeVar("RecordT")


class Run(Generic[OwnerT, RecordT]):
    """Consecutive messages of one lane, of one fetch of one partition, handed over in one go.

    Attributes:
        owner: what the messages belong to: an assignment and its block, opaque here.
        records: the messages, in offset order.
        indexes: the place of each in its owner's block.
        arrival: when the first message of the block came, as a number that rises with every message. A message's own
            is this and its index: the lane's claim to be served.
        next: the first message not taken yet. Written by the lane's holder only.
    """

    __slots__ = ("arrival", "indexes", "next", "owner", "records")

    def __init__(self, owner: OwnerT, arrival: int, records: list[RecordT], indexes: list[int]) -> None:
        self.owner = owner
        self.records = records
        self.indexes = indexes
        self.arrival = arrival
        self.next = 0


class KeyState(Enum):
    """Where the head of a parked key is. Written by the lane's holder only."""

    #: Here, for its time or for a rate.
    WAITING = "waiting"
    #: With its handler, which put the completion off.
    DEFERRED = "deferred"
    #: On its way to another topic, which must have it first.
    SENDING = "sending"
    #: Here, and not to be tried while its partition stays: its handler holds it.
    HELD = "held"
    #: Here, and not to be tried: the consumer stops because of it.
    STOPPING = "stopping"


class ParkedKey(Generic[OwnerT, RecordT]):
    """A key whose head message waits: the head, and what came for the key behind it. The lane holder's alone.

    Waking a parked key is a hint; what happens to it is decided by these fields.

    Attributes:
        waiting: the messages in order, each with its owner and its place in the owner's block; the head is first.
        attempts: how often the head was tried.
        before: how often the head was handed over behind others, with them, before it was the head.
        tried: how often the messages behind the head were, in their order; those it does not reach never were.
        alone: how many messages, from the head on, are tried one at a time where others come in batches.
        batch_keys: the keys, this one included, whose messages failed together as one batch: they are tried again so.
        since: when the head was first tried, on the caller's clock.
        asked: whether the head stands in the line for its handler's rate. Set by the holder, cleared by who wakes the
            key because of it, before he does.
        state: where the head is.
        due_at: when a head that waits may be tried (again); infinity where its handler's policy says never.
        settled: what became of a head that somebody else had: None while it is out, `DONE`, `HOLD`, or the error it
            ended with. Written once by that somebody, before the key is woken; the holder takes note of it then.
    """

    __slots__ = (
        "alone",
        "asked",
        "attempts",
        "batch_keys",
        "before",
        "due_at",
        "settled",
        "since",
        "state",
        "tried",
        "waiting",
    )

    def __init__(self) -> None:
        self.waiting: deque[tuple[OwnerT, int, RecordT]] = deque()
        self.attempts = 0
        self.before = 0
        # Made at need: only handlers of batches have any.
        self.tried: deque[int] | None = None
        self.alone = 0
        self.batch_keys: tuple[Hashable, ...] = ()
        self.asked = False
        self.since = 0.0
        self.state = KeyState.WAITING
        self.due_at = 0.0
        self.settled: object = None

    @property
    def tries(self) -> int:
        """How often the head was handed over."""
        return self.before + self.attempts

    def tries_behind(self, place: int) -> int:
        """Return how often a message that waits was handed over; those behind the head have places from 1 on."""
        tried = self.tried
        return 0 if tried is None or place > len(tried) else tried[place - 1]

    def count_behind(self, count: int) -> None:
        """Note that so many messages behind the head were handed over with it, and wait again."""
        if not count:
            return
        if self.tried is None:
            self.tried = deque()
        for place in range(min(count, len(self.tried))):
            self.tried[place] += 1
        self.tried.extend([1] * (count - len(self.tried)))

    def next_head(self) -> None:
        """Remove the head; the next message starts with a clean count."""
        self.waiting.popleft()
        self.attempts = 0
        self.before = self.tried.popleft() if self.tried else 0
        self.alone = max(0, self.alone - 1)
        self.state = KeyState.WAITING
        self.due_at = 0.0
        self.settled = None


#: What `ParkedKey.settled` holds when the head was done.
DONE = "done"
#: What it holds when the head was not taken elsewhere, and its handler holds it.
HOLD = "hold"


class ThrottledRuns(Generic[OwnerT, RecordT]):
    """Runs that wait for the rate of their handler while their lane goes on with others. The lane holder's alone.

    Attributes:
        runs: the runs in arrival order; later ones of the same handler go behind.
        asked: whether they stand in the line for the rate. Set by the holder, cleared by who wakes them because of it,
            before he does: a holder who saw it set is woken after that.
        dropped: the caller's count of dropped owners when the runs were last searched for theirs.
    """

    __slots__ = ("asked", "dropped", "runs")

    def __init__(self) -> None:
        self.runs: deque[Run[OwnerT, RecordT]] = deque()
        self.asked = False
        self.dropped = 0


class Lane(Generic[OwnerT, RecordT]):
    """An ordered queue of messages whose keys hash to the same number."""

    __slots__ = ("appended", "claim", "due", "number", "owed_s", "parked", "runs", "throttled")

    def __init__(self, number: int) -> None:
        self.number = number
        #: Runs in arrival order: the router appends, the holder takes from the front.
        self.runs: deque[Run[OwnerT, RecordT]] = deque()
        #: How many runs were ever appended. Written by the router.
        self.appended = 0
        #: Keys whose head waits. The holder's alone.
        self.parked: dict[Hashable, ParkedKey[OwnerT, RecordT]] = {}
        #: Runs that wait for a rate, by what limits it: opaque here, and never equal to a key. The holder's alone.
        self.throttled: dict[Hashable, ThrottledRuns[OwnerT, RecordT]] = {}
        #: Parked keys and held runs that were woken. Any thread appends, the holder takes.
        self.due: list[Hashable] = []
        #: Seconds that were given to what was woken and not yet to runs that stood here meanwhile. The holder's alone.
        self.owed_s = 0.0
        #: Held while the lane is queued or served; used as a flag that is tested and set in one step, never waited for.
        self.claim = threading.Lock()

    def append(self, run: Run[OwnerT, RecordT]) -> None:
        """Put a run at the end. By the router, which tells the scheduler afterwards."""
        self.runs.append(run)
        self.appended += 1

    def park(self, key: Hashable) -> ParkedKey[OwnerT, RecordT]:
        """Park a key that is not parked. By the holder."""
        parked = self.parked[key] = ParkedKey()
        return parked

    @property
    def serves_due(self) -> bool:
        """Whether what was woken is served next, and not the runs: by turns, of the same length. By the holder."""
        return bool(self.due) and (not self.runs or self.owed_s <= 0.0)

    def due_owner(self) -> OwnerT | None:
        """Return what the head of the first that was woken belongs to, or None where nothing waits. By the holder."""
        key = self.due[0]
        parked = self.parked.get(key)
        if parked is not None:
            return parked.waiting[0][0]
        throttled = self.throttled.get(key) if self.throttled else None
        return throttled.runs[0].owner if throttled is not None and throttled.runs else None


__all__ = ["DONE", "HOLD", "KeyState", "Lane", "ParkedKey", "Run", "ThrottledRuns"]
