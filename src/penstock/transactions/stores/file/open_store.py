"""A file store that is open: what producers, the coordinator and operators of the process share.

The writing thread changes the journal. A batch that has become durable is taken in at once, under the journal's lock,
so what is seen here is on the disk. What is decided stands in the queue of all stores, until it is published; what is
delayed for long waits in the state table, and comes here when its time is near.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from penstock.errors import PenstockError, StoreFailedError
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.queue import Delays, ReadyQueue
from penstock.transactions.store import SettledCallback
from penstock.transactions.stores.coordination import Counts
from penstock.transactions.stores.file.checks import CheckSources
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.journal import Journal
from penstock.transactions.stores.file.log.judging import Applied, Change, Settle
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.file.log.redo import NoRoomError
from penstock.transactions.stores.file.log.table import State
from penstock.transactions.stores.relayed_store import Decide, Prepare, Result
from penstock.transactions.stores.shards import ShardBacklog
from penstock.transactions.wire.ops import Author, Verdict

_log = logging.getLogger("penstock.transactions")


def _keep(_: Pending) -> None:
    """Keep the payload of what begins to wait."""


class OpenStore(Journal):
    """One opened store. Thread-safe.

    The lock guards the queue, too. What is set aside in it is the coordinator's thread's alone, which others read under
    the lock.
    """

    def __init__(self, folder: Folder, segment_bytes: int) -> None:
        super().__init__(folder, segment_bytes)
        self.queue = ReadyQueue(Delays(), _keep)
        self.check_sources = CheckSources(self)
        self.counts = Counts()
        #: Why it takes nothing more, or None. Written by the writing thread.
        self.failure: StoreFailedError | None = None
        #: What the coordinator of this process works on, where there is one; and wakes it.
        self.shard: ShardBacklog | None = None
        self.wake: Callable[[], object] = bool
        #: The call into the Kafka client that publication waits for, and since when in monotonic seconds; None: none.
        self.slow_call: tuple[str, float] | None = None
        #: What is due by then, in milliseconds since the epoch, waits in memory; what is due later, in the table.
        self.near_ms = 0.0
        #: Ids of what is published, a little before that is durable here.
        self.over: set[str] = set()
        #: Those of them that could not be settled for lack of room, and how many requests to settle are under way: the
        #: next coordinator of this process goes on with them.
        self.unsettled: list[str] = []
        self.settling = 0
        # What was set aside and decided again, and what takes its place.
        self._replaced = deque[tuple[Pending, StoredTransaction]]()
        self._watches: dict[str, SettledCallback] = {}
        # Of the writing thread: whom to call once a batch is taken in.
        self._rolled_back: list[SettledCallback] = []

    def open(self) -> None:
        """Open the log and the table; see `Journal.open`."""
        super().open()
        self.begin_again()

    def begin_again(self) -> None:
        """Let all that is decided wait to be published, whatever a former coordinator of this process had of it.

        The next one first reads the done log.
        """
        now_ms = time.time() * 1000
        self._replaced.clear()
        self.queue = ReadyQueue(Delays(), _keep)
        waiting = [stored for name, stored in self.live.items() if name not in self.over]
        for stored in sorted(waiting, key=lambda pending: pending.number):
            self._stand_in_line(stored)
        for stored in sorted(waiting, key=lambda pending: pending.decided):
            if stored.verdict is not None:
                stored.in_flight = False
                if stored.held:
                    stored.held = False
                self._wait(stored, now_ms)

    def write(self, changes: Sequence[Change]) -> Sequence[Result]:
        """Make changes durable, all of them or none, take them in, and return what became of each."""
        if self.failure is not None:
            return [self.failure] * len(changes)
        try:
            applied = self.commit(changes)
        except NoRoomError as error:
            _log.warning("the file store has no room: %s; what was to be stored is refused until there is", error)
            return [error] * len(changes)
        except Exception as error:  # noqa: BLE001 - each change gets it; the thread must not die in silence
            return [self._fail(error)] * len(changes)
        self.wake()
        callbacks, self._rolled_back = self._rolled_back, []
        for callback in callbacks:
            callback(Verdict.ROLLBACK)
        return applied

    def _fail(self, error: Exception) -> StoreFailedError:
        """Take nothing more: after a sync that failed, nobody knows what the disk holds, and asking again may lie."""
        self.failure = StoreFailedError(
            f"the file store takes nothing more: {error}; repair the disk and open the store again, "
            "what it acknowledged is there"
        )
        self.failure.__cause__ = error
        if not isinstance(error, OSError | PenstockError):
            _log.exception("the file store fails")
        return self.failure

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled."""
        with self.lock:
            self._watches[transaction_id] = callback

    def forget(self, transaction_id: str) -> None:
        """Give a watch up."""
        with self.lock:
            self._watches.pop(transaction_id, None)

    def published(self, some: Sequence[Pending]) -> list[tuple[SettledCallback, Verdict]]:
        """Take in that transactions were published, before that is durable here: the done log knows of it.

        Returns the callbacks to call, each with how its transaction was settled.
        """
        completed = []
        now = time.time()
        with self.lock:
            for pending in some:
                name, verdict = pending.half.transaction_id, pending.verdict or Verdict.COMMIT
                self.queue.forget(pending)
                self.over.add(name)
                self.counts.settled(verdict, now - pending.birth_ms / 1000)
                watch = self._watches.pop(name, None)
                if watch is not None:
                    completed.append((watch, verdict))
        return completed

    # What follows is called with the lock held.

    def is_watched(self, some: Sequence[Pending]) -> bool:
        """Tell whether somebody waits for the settling of one of them."""
        return bool(self._watches) and any(pending.half.transaction_id in self._watches for pending in some)

    def take_replaced(self) -> None:
        """Let what was decided again wait instead of what it replaces. Called by the coordinator's thread."""
        while self._replaced:
            former, stored = self._replaced.popleft()
            self.queue.forget(former)
            self._stand_in_line(stored)
            self.queue.add(stored)

    def waits(self, stored: StoredTransaction) -> bool:
        """Tell whether a transaction waits in memory to be published, or is published and not durably settled."""
        return stored.half.transaction_id in self.queue.all or stored.half.transaction_id in self.over

    def withdraw(self, stored: StoredTransaction, verdict: Verdict) -> bool:
        """Let nobody publish what is to be decided again, if that may be."""
        if verdict is Verdict.DISCARD:
            may = stored.held and not stored.in_flight
            if may:
                # No trial takes it.
                stored.in_flight = True
            return may
        if stored.half.transaction_id in self.queue.delays:
            self.queue.withdraw(stored)
            return True
        # What is not in memory waits for its time in the table.
        return not self.waits(stored)

    def restore(self, stored: StoredTransaction) -> None:
        """Let what was withdrawn wait as before."""
        stored.in_flight = False
        if stored.half.transaction_id not in self.queue.all:
            self._wait(stored, time.time() * 1000)

    def changed(self, changes: Sequence[Change], applied: Sequence[Applied]) -> None:
        """Take in what has become durable."""
        now_ms = time.time() * 1000
        for change, outcome in zip(changes, applied, strict=True):
            if outcome.refused is not None:
                self.counts.refused += isinstance(change, Decide)
            elif isinstance(change, Prepare):
                self._stand_in_line(outcome.changed[0])
            elif isinstance(change, Settle):
                self.over.difference_update(change.transaction_ids)
            else:
                for stored in outcome.changed:
                    self._decided(stored, change, now_ms)

    def _stand_in_line(self, stored: StoredTransaction) -> None:
        if stored.half.order_key is not None and (line := stored.half.line) is not None:
            self.queue.keys.add(line, stored)

    def _decided(self, stored: StoredTransaction, change: Decide, now_ms: float) -> None:
        self.counts.answered_checks += change.author is Author.CHECK
        self.check_sources.forget(stored)
        if change.verdict is Verdict.UNKNOWN:
            return
        if change.verdict is not Verdict.ROLLBACK:
            self._wait(stored, now_ms)
            return
        self.counts.settled(change.verdict, 0.0)
        self.queue.forget(stored)
        watch = self._watches.pop(stored.transaction_id, None)
        if watch is not None:
            self._rolled_back.append(watch)

    def _wait(self, stored: StoredTransaction, now_ms: float) -> None:
        """Let a decided transaction wait for its time, or to be published."""
        due_ms = stored.half.deliver_at_ms
        former = self.queue.all.get(stored.half.transaction_id)
        if former is not None:
            self._replaced.append((former, stored))
        elif due_ms is None or due_ms <= max(now_ms, self.near_ms) or stored.verdict is Verdict.DISCARD or stored.stays:
            self.queue.add(stored)

    def bring_in(self, number: int, stored: StoredTransaction | None) -> None:
        """Let one that was read wait in memory, for its time is near; it may be there already, or be settled by now."""
        if self.table.row(number).state == State.DELAYED:
            stored = self.adopt(number, stored)
            if stored is not None:
                self.queue.add(stored)
