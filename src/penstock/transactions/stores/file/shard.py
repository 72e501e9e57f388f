"""The one shard of a file store, as its coordinator and its relay work on it. Used by the coordinator's thread.

What is published is not waited for until it is settled durably here: until then, the done log has it.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from penstock.errors import ConfigurationError
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.queue import Blocking
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.stores.file.checks import NEAR_S, TableScan
from penstock.transactions.stores.file.log.frames import Settled
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.file.log.table import UNDECIDED, State, tick_of
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.relayed_store import ChangedCallback
from penstock.transactions.stores.shards import CheckTerms, DueCheck, ShardBacklog, StoredBatch, StoreShards
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import id_bytes

#: Most seconds between two rounds.
_MAX_IDLE_S = 1.0
#: Transactions that are read in one round for checks, or since their time is near.
_MAX_PER_ROUND = 2_000
#: The file, beside the redo log, with the transactional ids under which the store may be published.
_CLAIM = "publishers"


class FileShard(StoreShards, ShardBacklog):
    """What a file store holds: one shard, of the one coordinator that the store has.

    Raises `ConfigurationError` where the store has one already.

    Args:
        opened: the store.
        folder: where it is.
        label: what it is called in messages.
        prefix: what the names of its topics begin with.
        terms: the rules of checks.
        submit: has a change written.
        wake: called by any thread when the coordinator has something to do.
    """

    owned: Collection[int] = (0,)

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        opened: OpenStore,
        folder: Path,
        label: str,
        prefix: str,
        terms: CheckTerms,
        submit: Callable[[Settled, ChangedCallback], None],
        wake: Callable[[], object],
    ) -> None:
        super().__init__(f"{prefix}.file.{opened.redo.store_id}", 1, opened.counts)
        self._opened = opened
        self._folder = folder
        self._submit = submit
        self._scan = TableScan(opened.table, terms.policy)
        with opened.lock:
            if opened.shard is not None:
                raise ConfigurationError(f"{label} has a coordinator already; use that one")
            opened.shard, opened.wake = self, wake
            opened.rebuild_queue()
            self.queue = opened.queue

    def backlog(self, shard: int) -> FileShard:  # noqa: ARG002 - there is one
        """Return what waits in it."""
        return self

    def renew(self) -> None:
        """Raise why the store takes nothing more, if it does not."""
        if self._opened.failure is not None:
            raise self._opened.failure

    def due(self) -> Sequence[DueCheck]:
        """Return what is due, as much as one round has time for; what is to be published soon comes into memory."""
        scan, opened = self._scan, self._opened
        if time.monotonic() >= scan.due_at:
            with opened.lock:
                # What is decided meanwhile, and the scan does not see, must not stay in the table.
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
        """Return a transaction that is to be checked now, and waits in the table from now on; None: it is not."""
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
        """Let the producers of this process take checks; return the groups that have none."""
        by_group = defaultdict[str, dict[str, int]](dict)
        for check in due:
            by_group[check.group][check.transaction_id] = check.stored.offset
        return {group for group, some in by_group.items() if not self._opened.checks_of(group).offer(some)}

    def half(self, due: DueCheck) -> Half | None:
        """Read the first half of an undecided transaction, or None."""
        stored = self._opened.undecided(due.stored.offset, due.transaction_id)
        return None if stored is None else stored.half

    def is_durable(self) -> bool:
        """Whether all that was published is durably settled; if not, that is asked for again: there may be room now."""
        over = self._opened.published_ids
        with self._opened.lock:
            # With the lock held: what is settled by now, and was brought back since, is not settled by this.
            if over:
                self._submit(Settled(tuple(over)), lambda _: None)
            return not over

    def purge(self) -> None:
        """What is settled leaves the redo log with its segment."""

    def note_slow_call(self, shard: int, call: str, age_s: float) -> None:  # noqa: ARG002 - there is one
        """Let operators in this process know which call publication waits for."""
        self._opened.slow_call = (call, time.monotonic() - age_s) if call else None

    def wait_s(self, *, takes_more: bool, busy: bool) -> float:  # noqa: ARG002 - what came meanwhile has woken it
        """Return the seconds after which something is due, if nothing wakes the coordinator before."""
        opened, delays = self._opened, self.queue.delays
        with opened.lock:
            wait = min(_MAX_IDLE_S, self._scan.due_at - time.monotonic())
            if self._scan.near or self._scan.checks or (takes_more and self.queue.ready):
                wait = 0.0
            elif takes_more and (due_ms := delays.next_ms()) is not None:
                wait = min(wait, due_ms / 1000 - time.time())
        return max(0.0, wait)

    def close(self) -> None:
        """Let another coordinator have the store."""
        self.note_slow_call(0, "", 0.0)
        with self._opened.lock:
            self._opened.shard, self._opened.wake = None, bool

    def statistics(self, shards: Collection[int] | None) -> CoordinatorStatistics:  # noqa: ARG002 - there is one
        """Return counts since the store was opened and what is pending now. Safe from any thread."""
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
        """Write the transactional ids down; the store has one coordinator, so it may always be published."""
        if list(claim) != self.claimed():
            # Another process has to know of them; what a machine that failed had under way, Kafka ends by itself.
            new = self._folder / f"{_CLAIM}.new"
            new.write_text(" ".join(claim))
            new.replace(self._folder / _CLAIM)
        return True

    def claimed(self) -> list[str]:
        """Return the transactional ids that were written down last."""
        claim = self._folder / _CLAIM
        return claim.read_text().split() if claim.exists() else []

    def _taken_over(self, names: Sequence[str]) -> None:
        """Settle what a former coordinator published, among much that is settled."""
        opened = self._opened
        with opened.lock:
            by_name = {stored.done_name or name: stored for name, stored in opened.live.items()}
            # What is in the table alone has its id for a name.
            found = [(name, by_name.get(name) or opened.find(name)) for name in names]
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
        """Take what can be published with others, and set the rest aside."""
        opened, queue, now_ms = self._opened, self.queue, int(time.time() * 1000)

        def blocking_topic(pending: Pending) -> str | None:
            if pending.in_flight:
                # It is decided again just now, and what stood before it is gone.
                return pending.half.topic
            return blocking(pending)

        with opened.lock:
            opened.apply_replacements()
            queue.release_due(now_ms)
            return self._batch(list(queue.choose(limit, blocking_topic, room_bytes).values()))

    def trial(self, waiting: Sequence[Pending], fits: Callable[[Pending], bool]) -> StoredBatch | None:
        """Take the first of what is set aside, up to one that another decides just now, or that does not fit."""
        chosen: list[Pending] = []
        with self._opened.lock:
            for pending in waiting:
                # What stood behind one that is not held any more is not held itself.
                if not pending.held:
                    continue
                if pending.in_flight or not fits(pending):
                    break
                chosen.append(pending)
            return self._batch(chosen)

    def _batch(self, chosen: list[Pending]) -> StoredBatch | None:
        """Return what is published together. From now on nothing of it is decided otherwise; the lock is held."""
        if not chosen:
            return None
        for pending in chosen:
            # Not before: a target may take nothing of all that waits for it.
            self._opened.load_payload(pending)
        for pending in chosen:
            pending.in_flight = True
            if pending.half.deliver_at_ms is not None:
                self._opened.table.mark_due(pending.offset)
        is_watched = self._opened.is_watched(chosen)
        return StoredBatch(chosen, discarded_to=self._discarded_to, is_watched=is_watched)

    def _given_back(self, some: Sequence[Pending]) -> None:
        """Take back what was not published; it may wait for long, and is read again then."""
        with self._opened.lock:
            super()._given_back(some)
            for pending in some:
                self._opened.drop_payload_if_full(pending)

    def release(self, topic: str, is_refused: Callable[[str], bool]) -> None:
        """Let what was set aside for a topic's sake go with the others; see `Backlog.release`."""
        with self._opened.lock:
            super().release(topic, is_refused)

    def _published(self, some: Sequence[Pending]) -> None:
        """Settle what is published, and complete who waits for it."""
        opened = self._opened
        with opened.lock:
            opened.mark_published(some)
            # Nobody waits until that is durable; where there is no room for it, `is_durable` asks again.
            self._submit(Settled(tuple(pending.half.transaction_id for pending in some)), lambda _: None)
        opened.notify_watchers()


def _take_some(numbers: array[int]) -> list[int]:
    """Take as many numbers from the end as one round has time for."""
    return [numbers.pop() for _ in range(min(len(numbers), _MAX_PER_ROUND))]
