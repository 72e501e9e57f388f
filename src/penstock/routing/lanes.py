"""A lane: an ordered queue of runs, and the keys of it that are parked.

A lane is filled by the router and emptied by the one worker that holds it; the scheduler decides which. So the queue
needs no lock of its own: operations of a `deque` are atomic, the fetcher appends at its end, the holder changes its
front. Parked keys and runs that were set aside belong to the holder alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar

OwnerT = TypeVar("OwnerT")
RecordT = TypeVar("RecordT")


@dataclass(slots=True, eq=False, repr=False)
class Run(Generic[OwnerT, RecordT]):
    """Consecutive messages of one lane, of one fetch of one partition, handed over in one go."""

    #: What the messages belong to: an assignment and its block, opaque here.
    owner: OwnerT
    #: When the first message of the block came, as a number that rises with every message. A message's own is this and
    #: its index: by it the lane is served.
    arrival: int
    #: The messages, in offset order, and the place of each in its owner's block.
    records: list[RecordT]
    indexes: list[int]
    #: The first message that is not done, parked or gathered yet. Written by the lane's holder, and while the holder is
    #: at a slice of the run under a lock of theirs by others who complete its first messages.
    next: int = field(default=0, init=False)


class Call(Protocol):
    """A call of a handler that goes on though its message was given up."""

    @property
    def place(self) -> tuple[str, int, int]:
        """Topic, partition and offset of its message."""

    @property
    def has_ended(self) -> bool:
        """Whether it has returned."""


class KeyState(Enum):
    """Where the head of a parked key is.

    The lane's holder moves it from WAITING to any of the others, and on to WAITING with the next head or the next try.
    DEFERRED and SENDING are left to another thread, which ends them with HANDLED, DONE, FAILED or HELD, and wakes it.
    """

    #: In the lane, until its time.
    WAITING = "waiting"
    #: In the lane, and no time will come: the wait of its policy has no end.
    UNSCHEDULED = "unscheduled"
    #: In the lane, and not to be tried while its partition stays: its handler holds it.
    HELD = "held"
    #: In the lane, and not to be tried: the consumer stops because of it.
    STOPPING = "stopping"
    #: With its handler, which put the completion off.
    DEFERRED = "deferred"
    #: On its way to another topic, which must have it first.
    SENDING = "sending"
    #: Its deferred completion came: the message is done.
    HANDLED = "handled"
    #: Another topic has it, or it was dropped.
    DONE = "done"
    #: Its deferred completion failed.
    FAILED = "failed"


# Looked up once: in Python 3.11 a member of an enum costs as much as a call.
WAITING = KeyState.WAITING
#: Another thread has the head, and will end the state.
_OUT = (KeyState.DEFERRED, KeyState.SENDING)
#: The message is done.
_FINISHED = (KeyState.HANDLED, KeyState.DONE)


@dataclass(slots=True, eq=False, repr=False)
class ParkedKey(Generic[OwnerT, RecordT]):
    """A key whose head message waits: the head, and what came for the key behind it. The lane holder's alone.

    Save for `state` and `error` while another thread has the head: that thread writes them by `resolve`, the holder by
    `send_out` before that and by `take_error` after it, all under the lock. Waking a parked key is a hint; what happens
    to it is decided by these fields.
    """

    #: Where it is parked.
    lane: Lane[OwnerT, RecordT]
    #: What it is parked under: a batch that failed as a whole under the keys of all its messages, and what came for one
    #: of them waits behind it.
    keys: tuple[Hashable, ...]
    #: The messages in order, each with its owner and its place in the owner's block; the head is first.
    waiting: deque[tuple[OwnerT, int, RecordT]] = field(default_factory=deque)
    #: How often the head was tried.
    attempts: int = 0
    #: The class of what it failed with last.
    failed_with: str = ""
    #: How often messages that wait were handed over behind a head, with it, by owner and place: in batches only.
    tries_behind: dict[tuple[OwnerT, int], int] = field(default_factory=dict)
    #: How many messages are handed over in each of the next calls: those of a batch that failed come again together,
    #: or one at a time. The tries and times of the head are those of all in its call. What is behind comes as if new.
    portions: deque[int] = field(default_factory=deque)
    #: Whether the key stands in the queue of its handler's token bucket. Set by the holder, cleared by whoever wakes
    #: the key because of it, before he does.
    awaits_token: bool = False
    #: How often the head was over its handler's time limit.
    over_time_limit: int = 0
    #: A call for an earlier message that was given up. Until it ends no message of the key is handed over (I1), and the
    #: key stays parked, also where none waits.
    call: Call | None = None
    #: When the head was first tried, and when one that waits may be tried (again), on the caller's clock.
    since: float = 0.0
    due_at: float = 0.0
    #: Where the head is, and what its deferred completion failed with.
    state: KeyState = WAITING
    error: BaseException | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send_out(self, state: KeyState) -> None:
        """Leave the head to another thread. By the holder, before that thread can know of it."""
        with self._lock:
            self.state = state

    def resolve(self, state: KeyState, error: BaseException | None = None) -> None:
        """End the state of a head that is out; its key is to be woken afterwards. Any thread, once for each head."""
        with self._lock:
            if self.state not in _OUT:
                raise AssertionError(f"a head that is {self.state.value} is not out")
            self.error = error
            self.state = state

    def take_error(self) -> BaseException:
        """Return what the head's completion failed with; the head waits again. By the holder, in state FAILED."""
        with self._lock:
            error, self.error = self.error, None
            self.state = KeyState.WAITING
        if error is None:
            raise AssertionError("only a head that failed has an error")
        return error

    @property
    def is_out(self) -> bool:
        """Whether another thread has the head."""
        return self.state in _OUT

    @property
    def is_finished(self) -> bool:
        """Whether the head's message is done."""
        return self.state in _FINISHED

    @property
    def is_blocked(self) -> bool:
        """Whether a call for an earlier message goes on."""
        return self.call is not None and not self.call.has_ended

    @property
    def tries(self) -> int:
        """How often the head was handed over."""
        return self.tries_behind.get(self.waiting[0][:2], 0) + self.attempts

    def count_behind(self, item: tuple[OwnerT, int, RecordT], tries: int = 1) -> None:
        """Note that a message behind the head was handed over with it, so often, and waits again."""
        self.tries_behind[item[:2]] = self.tries_behind.get(item[:2], 0) + tries

    def next_head(self) -> None:
        """Remove the head; the next message starts with a clean count, unless it is handed over in the same call."""
        self.tries_behind.pop(self.waiting.popleft()[:2], None)
        self.state = WAITING
        if self.portions and self.portions[0] > 1:
            self.portions[0] -= 1
            return
        if self.portions:
            self.portions.popleft()
        self.attempts = self.over_time_limit = 0
        self.failed_with = ""
        self.due_at = 0.0


@dataclass(slots=True, eq=False, repr=False)
class RunsAside(Generic[OwnerT, RecordT]):
    """Runs that wait while their lane goes on with others: for a token, or for more of their batch.

    The lane holder's alone, save `awaits_token`.
    """

    #: Where they were set aside, and under what.
    lane: Lane[OwnerT, RecordT]
    name: Hashable
    #: In arrival order; later ones under the same name go behind.
    runs: deque[Run[OwnerT, RecordT]] = field(default_factory=deque)
    #: How many messages they have that were not taken yet.
    count: int = 0
    #: Whether they stand in the token bucket's queue. Set by the holder, cleared by whoever wakes them because of it,
    #: before he does: a holder who saw it set is woken after that.
    awaits_token: bool = False
    #: When a timer last set wakes them, on the caller's clock; None where none was set.
    wakes_at: float | None = None


@dataclass(slots=True, eq=False, repr=False)
class Lane(Generic[OwnerT, RecordT]):
    """An ordered queue of messages whose keys hash to the same number."""

    number: int
    #: The ready queue from which it is served.
    queue: int = 0
    #: Runs in arrival order. The router appends, then calls `Scheduler.ready`; the holder takes from the front.
    runs: deque[Run[OwnerT, RecordT]] = field(default_factory=deque)
    #: Keys whose head waits. The holder's alone.
    parked: dict[Hashable, ParkedKey[OwnerT, RecordT]] = field(default_factory=dict)
    #: Runs that were set aside, by what they have in common: opaque here, and never equal to a key. The holder's alone.
    aside: dict[Hashable, RunsAside[OwnerT, RecordT]] = field(default_factory=dict)
    #: What was woken: parked keys, runs that were set aside, and what else the caller has. Any thread appends, the
    #: holder takes.
    due: list[object] = field(default_factory=list)
    #: Seconds that what was woken took, owed to the runs that waited meanwhile. The holder's alone.
    owed_s: float = 0.0
    #: Held while the lane is queued or served; used as a flag that is tested and set in one step, never waited for.
    claim: threading.Lock = field(default_factory=threading.Lock)

    def park(self, *keys: Hashable) -> ParkedKey[OwnerT, RecordT]:
        """Park a key that is not parked, or several as one. By the holder."""
        parked: ParkedKey[OwnerT, RecordT] = ParkedKey(self, tuple(dict.fromkeys(keys)))
        self.parked.update(dict.fromkeys(parked.keys, parked))
        return parked

    @property
    def serves_due(self) -> bool:
        """Whether what was woken is served next, and not the runs: both get as much time. By the holder."""
        return bool(self.due) and (not self.runs or self.owed_s <= 0.0)
