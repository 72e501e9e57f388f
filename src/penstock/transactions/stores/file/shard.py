"""The one shard of a file store, as the coordinator and its relay use it. Used by the coordinator's thread.

Publication does not wait for durable settlement here: until then, the done log proves the publication.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from penstock.errors import ConfigurationError, StoppedError
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.queue import Blocking
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.stores.file.checks import NEAR_S, TableScan
from penstock.transactions.stores.file.log.entries import StoredTransaction
from penstock.transactions.stores.file.log.table import UNDECIDED, State, tick_of
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.shards import CheckTerms, DueCheck, ShardBacklog, StoredBatch, StoreShards
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import id_bytes

#: Most seconds between two rounds of the coordinator.
_MAX_IDLE_S = 1.0
#: Most transactions that one round reads for checks or for near deliveries.
_MAX_PER_ROUND = 2_000
#: The file, next to the redo log, with the transactional ids that may publish the store.
_CLAIM = "publishers"


class FileShard(StoreShards, ShardBacklog):
    """The one shard of a file store. The store has one coordinator at a time.

    Raises `ConfigurationError` if the store has a coordinator already. `settle` submits the settlement of published
    transactions. `wake` wakes the coordinator, from any thread.
    """

    owned: Collection[int] = (0,)

    def __init__(  # noqa: PLR0917 - called in one place
        self,
        opened: OpenStore,
        label: str,
        prefix: str,
        terms: CheckTerms,
        settle: Callable[[Collection[str]], object],
        wake: Callable[[], object],
    ) -> None:
        super().__init__(f"{prefix}.file.{opened.redo.store_id}", 1, opened.counts)
        self._opened = opened
        self._settle_durably = settle
        # The names in the done log of what a former coordinator published, until `flush` has settled them.
        self._former: Sequence[str] = ()
        self._scan = TableScan(opened.table, terms.policy)
        with opened.lock:
            if opened.shard is not None:
                raise ConfigurationError(f"{label} has a coordinator already; use that one")
            opened.shard, opened.wake, opened.slow_call = self, wake, None
            opened.rebuild_queue()
            self.queue = opened.queue

    def backlog(self, shard: int) -> FileShard:  # noqa: ARG002 - there is one
        """Return the shard itself."""
        return self

    def renew(self) -> None:
        """Raise an error if all writes were stopped by one."""
        failure = self._opened.failure
        if failure is not None:
            # A `StoreFailedError` is an `OSError`, and those pass by themselves here.
            raise StoppedError(str(failure)) from failure

    def due(self) -> Sequence[DueCheck]:
        """Return due checks, at most one round's worth. Load near deliveries into memory."""
        scan, opened = self._scan, self._opened
        if time.monotonic() >= scan.due_at:
            with opened.lock:
                # A transaction decided during the scan, which the scan misses, must not stay in the table.
                opened.near_ms = time.time() * 1000 + NEAR_S * 1000
            near_ms = scan.run()
            with opened.lock:
                opened.near_ms = near_ms
        for number in _take_some(scan.near):
            stored = opened.peek(number)
            with opened.lock:
                opened.queue_due(number, stored)
        checked = (self._check(number) for number in _take_some(scan.checks))
        return [
            DueCheck(stored.transaction_id, stored.group, stored.check_count, stored)
            for stored in checked
            if stored is not None
        ]

    def _check(self, number: int) -> StoredTransaction | None:
        """Return a transaction to be checked now, and note the check in the table; or None."""
        opened, table, now_ms = self._opened, self._opened.table, time.time() * 1000
        stored = opened.peek(number)
        if stored is None or stored.verdict is not None:
            return None
        with opened.lock:
            row = table.row(number)
            if row.state not in UNDECIDED or table.key(number)[0] != id_bytes(stored.transaction_id):
                return None
            immune_ms = stored.birth_ms + (stored.half.immunity_ms or 0)
            if row.state == State.BORN and immune_ms > now_ms:
                table.set_wait(number, State.IMMUNE, tick_of(immune_ms))
                return None
            table.set_wait(number, State.ASKED, tick_of(now_ms))
            stored.answered_ms, stored.check_count = int(now_ms), row.checks
            opened.unload_if_idle(stored)
        return stored

    def ask(self, due: Sequence[DueCheck]) -> Collection[str]:
        """Offer checks to the producers of this process. Return the groups without a producer."""
        by_group = defaultdict[str, dict[str, int]](dict)
        for check in due:
            by_group[check.group][check.transaction_id] = check.stored.offset
        return {group for group, checks in by_group.items() if not self._opened.checks_of(group).offer(checks)}

    def half(self, due: DueCheck) -> Half | None:
        """Return the first half of an undecided transaction, or None."""
        stored = self._opened.undecided(due.stored.offset, due.transaction_id)
        return None if stored is None else stored.half

    def is_durable(self) -> bool:
        """Return whether all published transactions are durably settled. If not, submit their settlement again.

        The disk may have room for it now.
        """
        published = self._opened.published_ids
        with self._opened.lock:
            # Under the lock: a transaction that is settled by now, and was resumed since, must not be settled by this.
            if published:
                self._settle_durably(published)
            return not published and not self._former

    def purge(self) -> None:
        """Do nothing: settled transactions leave the redo log with its segments."""

    def note_slow_call(self, shard: int, call: str, age_s: float) -> None:  # noqa: ARG002 - there is one
        """Show operators in this process the call that publication waits for."""
        self._opened.slow_call = (call, time.monotonic() - age_s) if call else None

    def wait_s(self, *, takes_more: bool, busy: bool) -> float:  # noqa: ARG002 - a change wakes the thread
        """Return the seconds until something is due, if nothing wakes the coordinator before."""
        opened, delays = self._opened, self.queue.delays
        with opened.lock:
            wait = min(_MAX_IDLE_S, self._scan.due_at - time.monotonic())
            if self._scan.near or self._scan.checks or (takes_more and self.queue.ready):
                wait = 0.0
            elif takes_more and (due_ms := delays.next_ms()) is not None:
                wait = min(wait, due_ms / 1000 - time.time())
        return max(0.0, wait)

    def close(self) -> None:
        """Free the store for another coordinator."""
        with self._opened.lock:
            self._opened.shard, self._opened.wake, self._opened.slow_call = None, bool, None

    def statistics(self, shards: Collection[int] | None) -> CoordinatorStatistics:  # noqa: ARG002 - there is one
        """Return the counts since the store was opened, and the pending transactions now. Safe from any thread."""
        opened, queue = self._opened, self.queue
        table, now_ms = opened.table, time.time() * 1000
        with opened.lock:
            pending = table.used - len(opened.published_ids)
        held = {
            "pending": pending,
            "oldest_pending_age": max(0.0, (now_ms - table.oldest_ms()) / 1000) if pending else 0.0,
            "held": len(queue.set_aside),
            "delayed": table.count(State.DELAYED),
            "held_by_key": queue.keys.behind,
        }
        return self.counts.statistics(lambda: held)

    def may_open(self, claim: Sequence[str]) -> bool:
        """Write the transactional ids down. True, for the store has one coordinator."""
        if list(claim) != self.claimed():
            # The next process reads them. Not synced: after a crash of the machine Kafka ends the open transactions by
            # itself.
            folder, temporary = self._opened.folder, f"{_CLAIM}.new"
            folder.remove(temporary)
            folder.write(temporary, 0, " ".join(claim).encode())
            folder.rename(temporary, _CLAIM)
        return True

    def claimed(self) -> list[str]:
        """Return the transactional ids that were written last."""
        folder = self._opened.folder
        return folder.read(_CLAIM).decode().split() if _CLAIM in folder.names() else []

    def _taken_over(self, names: Sequence[str]) -> None:
        self._former = names

    def flush(self) -> None:
        """Settle the transactions that a former coordinator published; most names are of settled ones."""
        if not self._former:
            return
        opened = self._opened
        with opened.lock:
            by_name = {stored.done_name or name: stored for name, stored in opened.live.items()}
            # A transaction that is only in the table has its id as its name.
            found = [(name, by_name.get(name) or opened.find(name)) for name in self._former]
        self._former = ()
        self._settle(
            [
                stored
                for name, stored in found
                if stored is not None
                and stored.verdict is not None
                and (stored.done_name or stored.transaction_id) == name
                and stored.transaction_id not in opened.published_ids
            ]
        )

    def next_batch(self, limit: int, blocking: Blocking, room_bytes: int) -> StoredBatch | None:
        """Take transactions that can be published together, and set the others aside."""
        opened, queue, now_ms = self._opened, self.queue, int(time.time() * 1000)

        def blocking_topic(pending: Pending) -> str | None:
            if pending.in_flight:
                # It is being decided again, and the transaction before it in the line is gone.
                return pending.half.topic
            return blocking(pending)

        with opened.lock:
            opened.apply_replacements()
            queue.release_due(now_ms)
            return self._batch(list(queue.choose(limit, blocking_topic, room_bytes).values()))

    def trial(self, waiting: Sequence[Pending], fits: Callable[[Pending], bool]) -> StoredBatch | None:
        """Take set-aside transactions from the front, up to the first in flight or the first that does not fit."""
        chosen: list[Pending] = []
        with self._opened.lock:
            for pending in waiting:
                # It stood behind a transaction that is no longer held.
                if not pending.held:
                    continue
                if pending.in_flight or not fits(pending):
                    break
                chosen.append(pending)
            return self._batch(chosen)

    def _batch(self, chosen: list[Pending]) -> StoredBatch | None:
        """Return a batch of transactions. From now on no other decision of them counts. The caller holds the lock."""
        if not chosen:
            return None
        for pending in chosen:
            # The payloads are read last: a target may accept none of its waiting transactions.
            self._opened.load_payload(pending)
        for pending in chosen:
            pending.in_flight = True
            if pending.half.deliver_at_ms is not None:
                self._opened.table.mark_due(pending.offset)
        is_watched = self._opened.is_watched(chosen)
        return StoredBatch(chosen, discarded_to=self._discarded_to, is_watched=is_watched)

    def _given_back(self, some: Sequence[Pending]) -> None:
        """Take back transactions that were not published. They may wait long; their payloads can be read again."""
        with self._opened.lock:
            super()._given_back(some)
            for pending in some:
                self._opened.drop_payload_if_full(pending)

    def release(self, topic: str, is_refused: Callable[[str], bool]) -> None:
        """Make the transactions that wait for a topic ready again; see `Backlog.release`."""
        with self._opened.lock:
            super().release(topic, is_refused)

    def _published(self, some: Sequence[Pending]) -> None:
        """Settle published transactions, and notify their watchers."""
        opened = self._opened
        with opened.lock:
            opened.mark_published(some)
            # No thread waits for the write. If the disk has no room, `is_durable` submits it again.
            self._settle_durably([pending.half.transaction_id for pending in some])
        opened.notify_watchers()


def _take_some(numbers: array[int]) -> list[int]:
    """Take at most one round's worth of numbers from the end."""
    return [numbers.pop() for _ in range(min(len(numbers), _MAX_PER_ROUND))]
