"""What producers, checks, the discard policy and operators change in a store outside Kafka, and the thread that writes.

While one batch is being written the next one gathers: so writes are few when much is changed, and waits are short when
little is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.errors import StoppedError
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

_log = logging.getLogger("penstock.transactions")

#: Changes, and bytes of halves, in one batch.
_BATCH = 2_000
_BATCH_BYTES = 4 << 20
#: About what a change takes besides the payload.
_OVERHEAD_BYTES = 200


class Prepare(NamedTuple):
    """Store the halves of a transaction."""

    halves: tuple[Half, ...]
    #: By this machine's clock; a database takes its own.
    birth_ms: int
    #: What chooses the shard; the first half's key, or else the id, where it is None.
    ordering_key: bytes | None = None

    def __repr__(self) -> str:
        """Name the transaction, never a key."""
        return f"<Prepare {self.halves[0].transaction_id}>"


class Decide(NamedTuple):
    """Decide a transaction, or (UNKNOWN) count an answered check."""

    transaction_id: str
    #: None: of any group.
    group: str | None
    verdict: Verdict
    author: Author
    #: Of the check that is answered; 0: it is no answer.
    check_number: int
    now_ms: int
    #: Who it was, where a person decided.
    actor: str = ""
    #: It takes back what is committed and not due yet, and decides nothing else.
    cancels: bool = False


@dataclass(slots=True)
class Outcome:
    """What became of a change.

    Attributes:
        refused: why it does not count; None: it does.
        stands: the decision that stands against it, where that is known.
        is_known: whether the store knows of such a transaction, of that group.
    """

    refused: str | None = None
    stands: Verdict | None = None
    is_known: bool = True


#: What became of a change, or why it is not known to be stored.
Result = Outcome | Exception
ChangedCallback = Callable[[Any], None]
#: Makes changes durable, all of them or each alone, and returns what became of each. It raises nothing.
Write = Callable[[Sequence[Any]], Sequence[Result]]

#: Why a discard of what is committed does not count.
NOT_HELD = (
    "COMMIT was decided before, and it is not held, or is being published just now; what Kafka refuses can be "
    "discarded: look at what it waits for, and try again"
)
#: Why a decision on what the store does not know does not count.
UNKNOWN_ID = "the store has no such transaction of that group; it is unknown, or settled long ago"


def came_first(verdict: Verdict) -> str:
    """Return why a decision does not count where another one stands."""
    return f"{verdict.name} was decided before, and the first decision stands"


class GroupWriter:
    """One thread that writes what is submitted, in its order. Thread-safe, also from within a callback."""

    def __init__(self, write: Write, label: str, name: str, most: int = _BATCH) -> None:
        self._write = write
        self._label = label
        self._most = most
        self._thread = threading.Thread(target=self._run, name=f"penstock-writer-{name}", daemon=True)
        # Guards the fields below; the writer waits on `_more`.
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)
        self._waiting: deque[tuple[Any, ChangedCallback]] = deque()
        self._stopping = False
        #: Set by stop(): what is not written by now is refused.
        self.is_late = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write what has come, at most `timeout_s` seconds, and end; tell whether it has ended. The rest is refused."""
        with self._lock:
            self._stopping = True
            self._more.notify_all()
        self._thread.join(timeout_s)
        self.is_late = True
        return not self._thread.is_alive()

    def submit(self, change: Any, callback: ChangedCallback) -> None:
        """Hand a change over; the callback comes once: from the writing thread, or at once if nothing is taken.

        Never waits: what waits to be written is in flight at its producer, whose limits bound it.
        """
        with self._lock:
            is_taken = not self._stopping
            if is_taken:
                self._waiting.append((change, callback))
                self._more.notify()
        if not is_taken:
            callback(self.refusal())

    def refusal(self) -> StoppedError:
        """Return why nothing more is taken."""
        return StoppedError(f"{self._label} was stopped")

    def _run(self) -> None:
        while batch := self._take():
            changes = [change for change, _ in batch]
            results = [self.refusal()] * len(batch) if self.is_late else self._write(changes)
            for (_, callback), result in zip(batch, results, strict=True):
                try:
                    callback(result)
                except Exception:  # noqa: BLE001 - one that fails shall not keep the others waiting
                    _log.exception("a change of %s could not be completed; this is an error in penstock", self._label)

    def _take(self) -> list[tuple[Any, ChangedCallback]]:
        with self._lock:
            while not self._waiting and not self._stopping:
                self._more.wait()
            batch: list[tuple[Any, ChangedCallback]] = []
            size = 0
            while self._waiting and len(batch) < self._most and (not batch or size < _BATCH_BYTES):
                batch.append(self._waiting.popleft())
                size += _size_of(batch[-1][0])
            return batch


def _size_of(change: Any) -> int:
    if not isinstance(change, Prepare):
        return _OVERHEAD_BYTES
    return _OVERHEAD_BYTES + sum(len(half.key or b"") + len(half.value or b"") for half in change.halves)
