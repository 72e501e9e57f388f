"""An open file store: judges changes, makes them durable, and queues decided transactions for publication.

The writing thread judges a batch of changes, writes the accepted ones as one frame, and then applies them under the
store's lock. So every change that another thread sees is on the disk. Decided transactions wait in the same queue as in
every store. A transaction with a late `deliver_at` waits in the state table, until its time is near.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from penstock.errors import PenstockError, StoreDamagedError, StoreFailedError
from penstock.transactions.core.decisions import may_cancel
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.queue import Delays, ReadyQueue
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.store import SettledCallback
from penstock.transactions.stores.file.checks import GroupChecks
from penstock.transactions.stores.file.log.entries import (
    Checked,
    Decided,
    Entry,
    Prepared,
    Settled,
    StoredTransaction,
    encode_entry,
)
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.frames import Record
from penstock.transactions.stores.file.log.journal import Journal
from penstock.transactions.stores.file.log.redo import NoRoomError, NotReadError
from penstock.transactions.stores.file.log.table import State, tick_of
from penstock.transactions.stores.relayed_store import (
    NOT_HELD,
    UNKNOWN_ID,
    Decide,
    Outcome,
    Prepare,
    Result,
    came_first,
)
from penstock.transactions.stores.shards import ShardBacklog
from penstock.transactions.stores.store_coordinator import Counts
from penstock.transactions.wire.half import MAX_CHECK_NUMBER
from penstock.transactions.wire.ops import Author, Verdict

_log = logging.getLogger("penstock.transactions")

Change = Prepare | Decide | Settled
#: The transactions that a batch prepares or decides, by id, with the COMMIT that the decision withdraws, or None.
_Taken = dict[str, StoredTransaction | None]


class OpenStore(Journal):
    """One opened store. Thread-safe.

    The lock also guards the queue. Only the coordinator's thread changes `queue.set_aside`; other threads read it under
    the lock.
    """

    def __init__(self, folder: Folder, segment_bytes: int) -> None:
        super().__init__(folder, segment_bytes)
        self.queue: ReadyQueue
        # The checks that producers take, by producer group. Only `checks_of` adds to it.
        self._checks: dict[str, GroupChecks] = {}
        self.counts = Counts()
        self._ration = RationedLog()
        #: The error that stopped all writes, or None. Written by the writing thread.
        self.failure: StoreFailedError | None = None
        #: The coordinator's shard, or None if this process has no coordinator; and the call that wakes the coordinator.
        self.shard: ShardBacklog | None = None
        self.wake: Callable[[], object] = bool
        #: The call into the Kafka client that publication waits for, and its start in monotonic seconds; None if no
        #: call is slow.
        self.slow_call: tuple[str, float] | None = None
        #: Transactions that are due by then (milliseconds since the epoch) wait in memory, later ones in the table.
        #: Written by the coordinator's thread.
        self.near_ms = 0.0
        #: Ids of published transactions whose settlement is not durable yet.
        self.published_ids: set[str] = set()
        # Pairs of a set-aside transaction that was decided again, and the object that replaces it.
        self._replaced = deque[tuple[Pending, StoredTransaction]]()
        # The callback of each watched transaction, by id; and the callbacks that `notify_watchers` calls next.
        self._watches: dict[str, SettledCallback] = {}
        self._completed: list[tuple[SettledCallback, Verdict]] = []

    def open(self) -> None:
        """Open the log and the table as `Journal.open` does, and queue the decided transactions."""
        super().open()
        self.rebuild_queue()

    def rebuild_queue(self) -> None:
        """Queue all decided transactions for publication, also those that a former coordinator had taken.

        The next coordinator reads the done log before it publishes.
        """
        self._replaced.clear()
        # Payloads stay in memory while there is room: see `drop_payload_if_full`.
        self.queue = ReadyQueue(Delays(), lambda _: None)
        waiting = [stored for name, stored in self.live.items() if name not in self.published_ids]
        for stored in sorted(waiting, key=lambda pending: pending.number):
            self.queue.keys.add(stored)
        for stored in sorted(waiting, key=lambda pending: pending.decided):
            if stored.verdict is not None:
                stored.in_flight = False
                if stored.held:
                    stored.held = False
                self.queue.add(stored)

    # Changes. Called by the writing thread.

    def write(self, changes: Sequence[Change]) -> Sequence[Result]:
        """Make changes durable, all of them or none, apply them, and return the result of each."""
        if self.failure is not None:
            return [self.failure] * len(changes)
        try:
            outcomes = self.commit(changes)
        except NoRoomError as error:
            self._ration.warn("room", "the file store has no room: %s; it refuses changes until there is room", error)
            return [error] * len(changes)
        except Exception as error:  # noqa: BLE001 - each change gets it; the thread must not die in silence
            return [self._fail(error)] * len(changes)
        self.wake()
        self.notify_watchers()
        return outcomes

    def _fail(self, error: Exception) -> StoreFailedError:
        """Refuse all further changes.

        After a failed sync the content of the disk is unknown, and a second sync may report success for lost data.
        """
        advice = "; repair the disk and open the store again, all acknowledged changes are there"
        if isinstance(error, StoreDamagedError | FileNotFoundError):
            # Not all are there, and the error says what is gone.
            advice = ""
        self.failure = StoreFailedError(f"the file store takes nothing more: {error}{advice}")
        self.failure.__cause__ = error
        if not isinstance(error, OSError | PenstockError):
            _log.exception("the file store fails")
        return self.failure

    def commit(self, changes: Sequence[Change]) -> list[Outcome]:
        """Judge changes in their order, and make the accepted ones durable together.

        Raises `NoRoomError` without having changed anything: the caller may try again. After an `OSError`, only opening
        the store again shows which changes are durable.
        """
        taken: _Taken = {}
        last = self.redo.bases[-1]
        try:
            with self.lock:
                entries = [self._judge(change, taken) for change in changes]
            records = iter(self._write([encode_entry(entry) for entry in entries if isinstance(entry, tuple)]))
        except (NoRoomError, NotReadError) as error:
            with self.lock:
                for stored in taken.values():
                    if stored is not None:
                        self._restore(stored)
                self._unload_decided(changes)
            raise NoRoomError(str(error)) from error
        now_ms = time.time() * 1000
        with self.lock:
            outcomes = []
            for change, entry in zip(changes, entries, strict=True):
                if isinstance(entry, tuple):
                    self._apply(entry, next(records), now_ms)
                    outcomes.append(Outcome())
                else:
                    outcomes.append(self._refused(change, entry))
            self._unload_decided(changes)
        if self.redo.bases[-1] != last:
            # The changes are durable, whether this works or not. The next new segment brings the next attempt.
            try:
                self._compact()
            except (NoRoomError, NotReadError) as error:
                _log.warning("the file store has no room for compaction: %s", error)
            except Exception as error:  # noqa: BLE001 - the next change gets it
                self._fail(error)
        return outcomes

    # The methods below are called with the lock held, except `notify_watchers`.

    def _judge(self, change: Change, taken: _Taken) -> Entry | str | None:
        """Return the entry of an accepted change, or the reason of the refusal. None refuses without a reason.

        The transactions do not show earlier changes of the same batch yet; `taken` does.
        """
        if isinstance(change, Settled):
            return change
        if isinstance(change, Decide):
            return self._judge_decision(change, taken)
        transaction_id = change.halves[0].transaction_id
        if transaction_id in taken or self.number_of(transaction_id):
            return f"transaction {transaction_id} is stored already"
        taken[transaction_id] = None
        self.table.number += 1
        return Prepared(self.table.number, change.birth_ms, 0, 0, Verdict.UNKNOWN, 0, change.halves)

    def _judge_decision(self, change: Decide, taken: _Taken) -> Entry | str | None:
        transaction_id = change.transaction_id
        stored = self.find(transaction_id)
        if stored is None:
            ended = self.recent_ends.get(transaction_id)
            return UNKNOWN_ID if ended is None else f"{came_first(ended)}; it is settled"
        group = stored.half.group
        if change.group not in {None, group}:
            return f"it belongs to group {group}"
        is_first = stored.verdict is None and not change.cancels
        if transaction_id in taken or not (is_first or self._withdraw(stored, change)):
            # A late answer UNKNOWN does not contradict the decision.
            return None if change.verdict is Verdict.UNKNOWN else _too_late(change, stored)
        if change.verdict is Verdict.UNKNOWN:
            count = stored.check_count + 1
            if change.check_number != count or count > MAX_CHECK_NUMBER:
                return None
            return Checked(transaction_id, count, change.now_ms)
        taken[transaction_id] = None if is_first else stored
        self.table.decided += 1
        return Decided(transaction_id, change.verdict, change.author, self.table.decided, change.actor)

    def _withdraw(self, stored: StoredTransaction, change: Decide) -> bool:
        """Return whether a decision overrules the COMMIT of a transaction, and if so keep publication from taking it.

        A ROLLBACK does so before the delivery time, and an operator's DISCARD if Kafka refuses the message. Neither
        does while the transaction is being published, or is about to be.
        """
        if stored.verdict is not Verdict.COMMIT:
            return False
        if (change.verdict, change.author) == (Verdict.DISCARD, Author.OPERATOR):
            may = stored.held and not stored.in_flight
            if may:
                # Trials do not take a transaction in flight.
                stored.in_flight = True
            return may
        due_ms = stored.half.deliver_at_ms
        if due_ms is None or change.now_ms >= due_ms or not may_cancel(change.verdict, change.author):
            return False
        if stored.half.transaction_id in self.queue.delays:
            self.queue.withdraw(stored)
            return True
        # A transaction that is not in memory waits in the table for its delivery time.
        return not self._is_queued(stored)

    def _restore(self, stored: StoredTransaction) -> None:
        """Let a transaction wait as before its withdrawal."""
        stored.in_flight = False
        if stored.half.transaction_id not in self.queue.all:
            self._schedule(stored, time.time() * 1000)

    def _refused(self, change: Change, why: str | None) -> Outcome:
        if why is None or not isinstance(change, Decide):
            return Outcome(why)
        self.counts.refused += 1
        stored = self.live.get(change.transaction_id)
        if stored is None:
            ended = self.recent_ends.get(change.transaction_id)
            return Outcome(why, ended, is_known=ended is not None)
        return Outcome(why, stored.verdict, is_known=change.group in {None, stored.half.group})

    def _apply(self, entry: Entry, record: Record, now_ms: float) -> None:
        """Apply an entry that has become durable."""
        if isinstance(entry, Prepared):
            self.queue.keys.add(self.add(entry, record))
        elif isinstance(entry, Settled):
            for transaction_id in entry.transaction_ids:
                settled = self.find(transaction_id)
                if settled is not None:
                    self.end(settled, settled.verdict or Verdict.COMMIT)
            self.published_ids.difference_update(entry.transaction_ids)
        else:
            stored = self._transaction_of(entry)
            self.checks_of(stored.group).forget(stored.transaction_id)
            if isinstance(entry, Checked):
                self.counts.answered_checks += 1
                stored.check_count, stored.answered_ms = entry.check_count, entry.answered_ms
                self.table.set_wait(stored.offset, State.ANSWERED, tick_of(entry.answered_ms), entry.check_count)
            else:
                self.counts.answered_checks += entry.author is Author.CHECK
                self._decide(stored, entry, now_ms)

    def _transaction_of(self, entry: Checked | Decided) -> StoredTransaction:
        """Return the transaction of an entry. A due check may have removed it from memory since it was judged."""
        stored = self.find(entry.transaction_id)
        assert stored is not None  # noqa: S101 - only this thread settles it
        return stored

    def _decide(self, stored: StoredTransaction, entry: Decided, now_ms: float) -> None:
        if entry.verdict is Verdict.ROLLBACK:
            self._remove_settled(stored, entry.verdict, 0.0)
            self.end(stored, entry.verdict)
            return
        self.table.decide(stored.offset, entry.verdict, entry.author, entry.decided)
        if stored.verdict is None:
            stored.decide(entry.verdict, entry.author, entry.decided)
        else:
            # This is a second decision, and the coordinator's thread holds the object. A new object replaces it.
            self.unload(stored)
            stored = self._transaction_of(entry)
        self._schedule(stored, now_ms)

    def _schedule(self, stored: StoredTransaction, now_ms: float) -> None:
        """Let a decided transaction wait for its delivery time or for publication."""
        due_ms = stored.half.deliver_at_ms
        former = self.queue.all.get(stored.half.transaction_id)
        if former is not None:
            self._replaced.append((former, stored))
        elif due_ms is None or due_ms <= max(now_ms, self.near_ms) or stored.verdict is Verdict.DISCARD or stored.stays:
            # A later one waits in the table. A scan finds it in time.
            self.queue.add(stored)

    def _unload_decided(self, changes: Sequence[Change]) -> None:
        """Remove transactions of these changes from memory if they are decided or have been asked about."""
        for change in changes:
            stored = self.live.get(change.transaction_id) if isinstance(change, Decide) else None
            if stored is not None and (stored.verdict is not None or stored.answered_ms):
                self.unload_if_idle(stored)

    def unload_if_idle(self, stored: StoredTransaction) -> None:
        """Remove a transaction from memory, unless memory needs it."""
        if not stored.stays and not self._is_queued(stored) and self.live.get(stored.transaction_id) is stored:
            self.unload(stored)

    def _is_queued(self, stored: StoredTransaction) -> bool:
        """Return whether a transaction waits for publication in memory, or is published but not durably settled."""
        return stored.half.transaction_id in self.queue.all or stored.half.transaction_id in self.published_ids

    def queue_due(self, number: int, stored: StoredTransaction | None) -> None:
        """Queue a transaction whose delivery time is near. It may be in memory or settled by now."""
        stored = self.adopt(number, stored)
        if stored is not None and stored.verdict is not None:
            self.queue.add(stored)

    def apply_replacements(self) -> None:
        """Replace each transaction that was decided again by its new object. Called by the coordinator's thread."""
        while self._replaced:
            former, stored = self._replaced.popleft()
            self.queue.forget([former])
            self.queue.keys.add(stored)
            self.queue.add(stored)

    def mark_published(self, some: Sequence[Pending]) -> None:
        """Remember that transactions were published, before this is durable here. The done log has it."""
        now = time.time()
        for pending in some:
            self.published_ids.add(pending.half.transaction_id)
            self._remove_settled(pending, pending.verdict or Verdict.COMMIT, now - pending.birth_ms / 1000)

    def _remove_settled(self, pending: Pending, verdict: Verdict, age_s: float) -> None:
        self.counts.settled(verdict, age_s)
        self.queue.forget([pending])
        watch = self._watches.pop(pending.half.transaction_id, None)
        if watch is not None:
            self._completed.append((watch, verdict))

    def is_watched(self, some: Sequence[Pending]) -> bool:
        """Return whether a caller waits for the settlement of one of these."""
        return bool(self._watches) and any(pending.half.transaction_id in self._watches for pending in some)

    def checks_of(self, group: str) -> GroupChecks:
        """Return the checks of a producer group. Safe from any thread, with the lock or without it."""
        found = self._checks.get(group)
        # `setdefault` is one step under the interpreter's lock, so a group has one object.
        return found if found is not None else self._checks.setdefault(group, GroupChecks(self.undecided))

    # Callbacks of settled transactions. These methods take the lock.

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled."""
        with self.lock:
            self._watches[transaction_id] = callback

    def forget(self, transaction_id: str) -> None:
        """Remove the callback of a transaction."""
        with self.lock:
            self._watches.pop(transaction_id, None)

    def notify_watchers(self) -> None:
        """Call the callbacks of the transactions that were settled since the last call."""
        with self.lock:
            completed, self._completed = self._completed, []
        for callback, verdict in completed:
            callback(verdict)


def _too_late(change: Decide, stored: StoredTransaction) -> str:
    if stored.verdict is None:
        return "it is not decided yet" if change.cancels else "another decision came first"
    if (stored.verdict, change.verdict) == (Verdict.COMMIT, Verdict.DISCARD):
        return NOT_HELD
    return came_first(stored.verdict)
