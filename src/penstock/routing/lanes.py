"""A lane: an ordered queue of runs, and the keys of it that are parked.

A lane is filled by one thread (the router) and emptied by the one worker that holds it; who holds it is the
scheduler's business. So the queue needs no lock of its own: `deque.append` and `deque.popleft` are atomic, the
router only appends, the holder only takes. Parked keys belong to the holder alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

OwnerT = TypeVar("OwnerT")
RecordT = TypeVar("RecordT")


class Run(Generic[OwnerT, RecordT]):
    """Consecutive messages of one lane, of one fetch of one partition, handed over in one go.

    Attributes:
        owner: what the messages belong to: an assignment and its block, opaque here.
        records: the messages, in offset order.
        indexes: the place of each in its owner's block.
        arrival: when the run came, as a number that rises with every fetch: the lane's claim to be served.
        next: the first message not taken yet. Written by the lane's holder only.
    """

    __slots__ = ("arrival", "indexes", "next", "owner", "records")

    def __init__(self, owner: OwnerT, arrival: int, records: list[RecordT], indexes: list[int]) -> None:
        self.owner = owner
        self.records = records
        self.indexes = indexes
        self.arrival = arrival
        self.next = 0


class ParkedKey(Generic[OwnerT, RecordT]):
    """A key whose head message waits: the head, and what came for the key behind it. The lane holder's alone.

    Attributes:
        waiting: the messages in order, each with its owner and its place in the owner's block; the head is first.
        attempts: how often the head was tried.
        since: when the head was first tried, on the caller's clock.
        head_done: whether the head was settled in another way than by its handler. Written by whoever settles it,
            before the key is woken; the holder removes it then.
    """

    __slots__ = ("attempts", "head_done", "since", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[OwnerT, int, RecordT]] = deque()
        self.attempts = 0
        self.since = 0.0
        self.head_done = False

    def next_head(self) -> None:
        """Remove the head; the next message starts with a clean count."""
        self.waiting.popleft()
        self.attempts = 0
        self.head_done = False


class Lane(Generic[OwnerT, RecordT]):
    """An ordered queue of messages whose keys hash to the same number."""

    __slots__ = ("arrival", "claimed", "due", "number", "parked", "runs")

    def __init__(self, number: int) -> None:
        self.number = number
        #: Runs in arrival order: the router appends, the holder takes from the front.
        self.runs: deque[Run[OwnerT, RecordT]] = deque()
        #: Keys whose head waits for its retry time or its dead letter. The holder's alone.
        self.parked: dict[Hashable, ParkedKey[OwnerT, RecordT]] = {}
        #: Parked keys whose time has come. The scheduler appends, the holder takes.
        self.due: deque[Hashable] = deque()
        #: Whether the lane is queued or held. Written under the scheduler's lock.
        self.claimed = False
        #: Arrival of the oldest run when the lane was last queued. Written under the scheduler's lock.
        self.arrival = 0

    @property
    def has_work(self) -> bool:
        """Whether a worker that took the lane now would find something to do."""
        return bool(self.due or self.runs)

    def park(self, key: Hashable, head: tuple[OwnerT, int, RecordT]) -> ParkedKey[OwnerT, RecordT]:
        """Park a key that is not parked on its failed head. By the holder."""
        parked = self.parked[key] = ParkedKey()
        parked.waiting.append(head)
        return parked

    def behind(self, key: Hashable, owner: OwnerT, indexes: Sequence[int], records: Sequence[RecordT]) -> None:
        """Let messages of a parked key wait behind its head. By the holder."""
        self.parked[key].waiting.extend((owner, index, record) for index, record in zip(indexes, records, strict=True))


__all__ = ["Lane", "ParkedKey", "Run"]
