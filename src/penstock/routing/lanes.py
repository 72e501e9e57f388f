"""A lane: an ordered queue of runs, with its parked keys.

The router fills a lane, and the one worker that holds it empties it; the scheduler decides which worker. So the queue
needs no lock of its own: operations of a `deque` are atomic, the fetcher appends at the end, the holder changes the
front. Parked keys and runs set aside belong to the holder alone.
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
    """Consecutive messages of one lane, from one fetch of one partition, handed over together."""

    #: The assignment and block of the messages; opaque here.
    owner: OwnerT
    #: The arrival number of the block's first message; the number rises with every message. The arrival of a message is
    #: this plus its index. The scheduler serves lanes by it.
    arrival: int
    #: The messages, in offset order, and the index of each in its owner's block.
    records: list[RecordT]
    indexes: list[int]
    #: Index of the first message that is not done, parked or gathered yet. Written by the lane's holder. While the
    #: holder works on a slice of the run, other threads complete its first messages; then all write under one lock.
    next: int = field(default=0, init=False)


class Call(Protocol):
    """A call of a handler that still runs although its message was given up."""

    @property
    def place(self) -> tuple[str, int, int]:
        """Topic, partition and offset of its message."""

    @property
    def has_ended(self) -> bool:
        """Whether it has returned."""


class KeyState(Enum):
    """The state of the head of a parked key.

    The lane's holder moves it from WAITING to any other state, and back to WAITING with the next head or the next try.
    Another thread ends DEFERRED and SENDING with HANDLED, DONE, FAILED or HELD, and wakes the key.
    """

    #: It waits in the lane for its retry time.
    WAITING = "waiting"
    #: It waits in the lane without a retry time: its policy waits for ever.
    UNSCHEDULED = "unscheduled"
    #: It stays in the lane as long as this member has the partition (`on_failure="hold"`).
    HELD = "held"
    #: It stays in the lane: the consumer stops because of it.
    STOPPING = "stopping"
    #: Its handler returned a deferred completion.
    DEFERRED = "deferred"
    #: It is being sent to another topic, which must store it before it is done.
    SENDING = "sending"
    #: Its deferred completion succeeded: the message is done.
    HANDLED = "handled"
    #: Another topic has stored it, or it was dropped.
    DONE = "done"
    #: Its deferred completion failed.
    FAILED = "failed"


# Looked up once: in Python 3.11 a member of an enum costs as much as a call.
WAITING = KeyState.WAITING
#: States that another thread will end.
_OUT = (KeyState.DEFERRED, KeyState.SENDING)
#: The message is done.
_FINISHED = (KeyState.HANDLED, KeyState.DONE)


@dataclass(slots=True, eq=False, repr=False)
class ParkedKey(Generic[OwnerT, RecordT]):
    """A parked key: its head message, which waits, and the later messages of the key. Used by the lane's holder alone.

    `state` and `error` are exceptions. While another thread has the head, that thread writes them by `resolve`. The
    holder writes them before that by `send_out` and after it by `take_error`. All do so under the lock. Waking a parked
    key is only a hint: these fields decide what happens to it.
    """

    #: The lane in which it is parked.
    lane: Lane[OwnerT, RecordT]
    #: The keys that it blocks: several for a batch that failed as a whole. Later messages of any of them wait behind
    #: it.
    keys: tuple[Hashable, ...]
    #: The messages in order, head first, each with its owner and its index in the owner's block.
    waiting: deque[tuple[OwnerT, int, RecordT]] = field(default_factory=deque)
    #: How often the head was tried.
    attempts: int = 0
    #: The class name of the head's last error.
    failed_with: str = ""
    #: By owner and index: how often a waiting message was handed over behind a head, in the same call. For batches
    #: only.
    tries_behind: dict[tuple[OwnerT, int], int] = field(default_factory=dict)
    #: The number of messages in each of the next calls. Messages of a failed batch are retried together or one by one.
    #: The tries and times of the head count for its whole call. Messages behind these portions count as new.
    portions: deque[int] = field(default_factory=deque)
    #: Whether the key waits in the queue of its handler's token bucket. The holder sets it. The thread that wakes the
    #: key for a token clears it first.
    awaits_token: bool = False
    #: How often the head exceeded its handler's time limit.
    over_time_limit: int = 0
    #: An abandoned call for an earlier message. Until it ends, no message of the key is handed over (I1), and the key
    #: stays parked even without a waiting message.
    call: Call | None = None
    #: When the head was first tried, and when it may be tried (again), on the caller's clock.
    since: float = 0.0
    due_at: float = 0.0
    #: The state of the head, and the error of its deferred completion.
    state: KeyState = WAITING
    error: BaseException | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send_out(self, state: KeyState) -> None:
        """Leave the head to another thread. Called by the holder, before that thread learns of the head."""
        with self._lock:
            self.state = state

    def resolve(self, state: KeyState, error: BaseException | None = None) -> None:
        """End the state that `send_out` began; then wake the key. Any thread, once for each head."""
        with self._lock:
            if self.state not in _OUT:
                raise AssertionError(f"a head that is {self.state.value} is not out")
            self.error = error
            self.state = state

    def take_error(self) -> BaseException:
        """Return the error of the head's completion; the head waits again. Called by the holder, in state FAILED."""
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
        """Whether an abandoned call for an earlier message still runs."""
        return self.call is not None and not self.call.has_ended

    @property
    def tries(self) -> int:
        """How often the head was handed over."""
        return self.tries_behind.get(self.waiting[0][:2], 0) + self.attempts

    def count_behind(self, item: tuple[OwnerT, int, RecordT], tries: int = 1) -> None:
        """Add tries of a message that was handed over behind the head, in the same call, and waits again."""
        self.tries_behind[item[:2]] = self.tries_behind.get(item[:2], 0) + tries

    def next_head(self) -> None:
        """Remove the head. The next message starts with no tries, unless it belongs to the same call."""
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
    """Runs that wait for a token, or for more messages of their batch, while their lane serves other runs.

    Used by the lane's holder alone, except `awaits_token`.
    """

    #: The lane, and the name under which they were set aside.
    lane: Lane[OwnerT, RecordT]
    name: Hashable
    #: In arrival order. Later runs of the same name are appended.
    runs: deque[Run[OwnerT, RecordT]] = field(default_factory=deque)
    #: Number of their messages that were not taken yet.
    count: int = 0
    #: Whether they wait in the token bucket's queue. The holder sets it. The thread that wakes them for a token clears
    #: it first, so a holder that saw it set is woken later.
    awaits_token: bool = False
    #: When the latest timer wakes them, on the caller's clock; None: no timer.
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
    #: Runs set aside, by name: opaque here, and never equal to a key. The holder's alone.
    aside: dict[Hashable, RunsAside[OwnerT, RecordT]] = field(default_factory=dict)
    #: Woken entries: parked keys, runs set aside, and other objects of the caller. Any thread appends, the holder
    #: takes.
    due: list[object] = field(default_factory=list)
    #: Seconds spent on woken entries, owed to the runs that waited meanwhile. The holder's alone.
    owed_s: float = 0.0
    #: Held while the lane is queued or served. It is a flag that is tested and set in one step; nobody waits for it.
    claim: threading.Lock = field(default_factory=threading.Lock)

    def park(self, *keys: Hashable) -> ParkedKey[OwnerT, RecordT]:
        """Park a key that is not parked, or several keys as one. Called by the holder."""
        parked: ParkedKey[OwnerT, RecordT] = ParkedKey(self, tuple(dict.fromkeys(keys)))
        self.parked.update(dict.fromkeys(parked.keys, parked))
        return parked

    @property
    def serves_due(self) -> bool:
        """Whether woken entries are served next, before runs: both get the same time. Called by the holder."""
        return bool(self.due) and (not self.runs or self.owed_s <= 0.0)
