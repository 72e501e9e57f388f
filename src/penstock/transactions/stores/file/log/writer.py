"""The file store's writing thread: takes changes from all threads, and makes as many durable at once as have come.

While one sync is under way, the next batch gathers: that is what makes syncs few when much is written, and waits short
when little is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from penstock.errors import PenstockError, StoreFailedError
from penstock.transactions.stores.file.log.journal import Change, Journal, Outcome, Prepare
from penstock.transactions.stores.file.log.redo import NoRoomError

_log = logging.getLogger("penstock.transactions")

#: Called with what became of a change, or why it is not stored.
ChangedCallback = Callable[[Outcome | Exception], None]
#: Changes, and bytes of halves, that go into one batch.
_BATCH = 2_000
_BATCH_BYTES = 4 << 20
#: About what a change takes besides the payload.
_OVERHEAD_BYTES = 200


class Writer:
    """One thread that writes a journal. `submit` is safe from any thread, also from within a callback.

    The opened journal is used by this thread from now on, and changes under the guard. `changed` is called with the
    changes and outcomes of each durable batch, before their callbacks.
    """

    def __init__(
        self,
        journal: Journal,
        guard: threading.Lock,
        changed: Callable[[Sequence[Change], Sequence[Outcome]], None],
        name: str,
    ) -> None:
        self._journal = journal
        self._guard = guard
        self._changed = changed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Guards the fields below; the writer waits on `_more`.
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)
        self._waiting: deque[tuple[Change, ChangedCallback]] = deque()
        self._stopping = False
        #: Why it takes nothing more, or None.
        self.failure: StoreFailedError | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write what has come, and end; tell whether that was done in time."""
        with self._lock:
            self._stopping = True
            self._more.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, change: Change, callback: ChangedCallback) -> None:
        """Hand a change over; the callback comes once: from the writing thread, or at once if nothing is taken.

        Never waits: what waits to be written is in flight at its producer, whose limits bound it.
        """
        with self._lock:
            refusal = self._refusal()
            if refusal is None:
                self._waiting.append((change, callback))
                self._more.notify()
        if refusal is not None:
            callback(refusal)

    def _refusal(self) -> Exception | None:
        if self.failure is not None:
            return self.failure
        return StoreFailedError("the file store is stopped; start it again") if self._stopping else None

    def _run(self) -> None:
        while batch := self._take():
            self._write(batch)

    def _take(self) -> list[tuple[Change, ChangedCallback]]:
        with self._lock:
            while not self._waiting and not self._stopping:
                self._more.wait()
            batch: list[tuple[Change, ChangedCallback]] = []
            size = 0
            while self._waiting and len(batch) < _BATCH and (not batch or size < _BATCH_BYTES):
                batch.append(self._waiting.popleft())
                size += _size_of(batch[-1][0])
            return batch

    def _write(self, batch: Sequence[tuple[Change, ChangedCallback]]) -> None:
        changes = [change for change, _ in batch]
        outcomes: Sequence[Outcome | Exception]
        try:
            with self._guard:
                outcomes = done = self._journal.commit(changes)
            self._changed(changes, done)
        except NoRoomError as error:
            _log.warning("the file store has no room: %s; what was to be stored is refused until there is", error)
            outcomes = [error] * len(batch)
        except Exception as error:  # noqa: BLE001 - each callback gets it; the thread must not die in silence
            outcomes = [self._fail(error)] * len(batch)
        for (_, callback), outcome in zip(batch, outcomes, strict=True):
            callback(outcome)

    def _fail(self, error: Exception) -> StoreFailedError:
        """Take nothing more: after a sync that failed, nobody knows what the disk holds, and asking again may lie."""
        failure = StoreFailedError(
            f"the file store takes nothing more: {error}; mend the disk and open the store anew, "
            "what it acknowledged is there"
        )
        failure.__cause__ = error
        if not isinstance(error, OSError | PenstockError):
            _log.exception("the file store fails")
        with self._lock:
            self.failure = failure
            left, self._waiting = list(self._waiting), deque()
        for _, callback in left:
            callback(failure)
        return failure


def _size_of(change: Change) -> int:
    if not isinstance(change, Prepare):
        return _OVERHEAD_BYTES
    return _OVERHEAD_BYTES + sum(len(half.key or b"") + len(half.value or b"") for half in change.halves)
