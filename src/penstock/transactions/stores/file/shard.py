"""The one shard of a file store, as its coordinator and its relay work on it. Used by the coordinator's thread.

What is published is not waited for until it is settled durably here: until then, the done log has it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from xxhash import xxh3_128_digest

from penstock.errors import ConfigurationError
from penstock.transactions.core.pending import Pending
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.stores.file.checks import NEAR_S, TableScan
from penstock.transactions.stores.file.log.ledger import Settle, StoredTransaction
from penstock.transactions.stores.file.log.redo import NoRoomError
from penstock.transactions.stores.file.log.table import UNDECIDED, State, tick_of
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.relayed_store import ChangedCallback, Result
from penstock.transactions.stores.shards import CheckTerms, DueCheck, StoreShards
from penstock.transactions.stores.stored_backlog import decided
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import id_bytes, id_text
from penstock.transactions.wire.ops import Author, Verdict

#: Most seconds between two rounds.
_MAX_IDLE_S = 1.0
#: Transactions in one Kafka transaction, at most; and those that are read for checks, or since their time is near, in
#: one round.
_GROUP = 1_000
_ROUND = 2_000
#: The file, beside the redo log, with the transactional ids under which the store may be published.
_CLAIM = "publishers"


class FileShard(StoreShards):
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
    #: The store has one coordinator.
    is_lost = False

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        opened: OpenStore,
        folder: Path,
        label: str,
        prefix: str,
        terms: CheckTerms,
        submit: Callable[[Settle, ChangedCallback], None],
        wake: Callable[[], object],
    ) -> None:
        super().__init__(f"{prefix}.file.{opened.journal.redo.store_id}", 1, opened.counts)
        self._opened = opened
        self._folder = folder
        self._submit = submit
        # What the relay has, by id.
        self._taken: dict[str, StoredTransaction] = {}
        self._scan = TableScan(opened.journal.table, terms.policy)
        # Guarded by the store's lock: ids of published transactions that could not be settled for lack of room, and how
        # many requests to settle are under way.
        self._unsettled: list[str] = []
        self._settling = 0
        with opened.lock:
            if opened.wake is not None:
                raise ConfigurationError(f"{label} has a coordinator already; use that one")
            opened.wake = wake
            opened.ready.begin_again(stored for stored in opened.journal.live.values() if not stored.settled)

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
            self._look()
        for number in _some(scan.near):
            if opened.journal.in_memory(number) is None:
                stored = opened.journal.load(number)
                with opened.lock:
                    opened.bring_in(number, stored)
        checked = (self._check(number) for number in _some(scan.checks))
        return [
            DueCheck(stored.transaction_id, stored.group, stored.check_count, stored)
            for stored in checked
            if stored is not None
        ]

    def _look(self) -> None:
        """Scan the table."""
        opened = self._opened
        with opened.lock:
            # What is decided meanwhile, and the scan does not see, must not stay in the table.
            opened.near_ms = time.time() * 1000 + NEAR_S * 1000
        near_ms = self._scan.run()
        with opened.lock:
            opened.near_ms = near_ms

    def _check(self, number: int) -> StoredTransaction | None:
        """Return a transaction that is to be checked now, and waits in the table from now on; None: it is not."""
        opened, table, now_ms = self._opened, self._opened.journal.table, time.time() * 1000
        stored = opened.journal.peek(number)
        if stored is None or stored.verdict is not None:
            return None
        with opened.lock:
            row = table.row(number)
            if row.state not in UNDECIDED or table.key(number)[0] != id_bytes(stored.transaction_id):
                return None
            immune_ms = stored.birth_ms + (stored.immunity_ms or 0)
            if row.state == State.BORN and immune_ms > now_ms:
                table.wait(number, State.IMMUNE, tick_of(immune_ms))
                return None
            table.wait(number, State.ASKED, tick_of(now_ms))
            stored.asked_ms, stored.check_count = int(now_ms), row.checks
            opened.drop_halves(stored)
            opened.journal.park(stored)
        return stored

    def ask(self, due: Sequence[DueCheck]) -> Collection[str]:
        """Let the producers of this process take checks; return the groups that have none."""
        return self._opened.check_sources.ask([check.stored for check in due])

    def half(self, due: DueCheck) -> Half | None:
        """Read the first half of an undecided transaction, or None."""
        stored = self._opened.journal.undecided(due.stored.record, due.transaction_id)
        return None if stored is None or stored.halves is None else stored.halves[0]

    def is_durable(self) -> bool:
        """Whether all that was published is durably settled; what failed for lack of room is tried again."""
        self._settle(())
        with self._opened.lock:
            return not self._settling and not self._unsettled

    def purge(self) -> None:
        """What is settled leaves the redo log with its segment."""

    def note_slow_call(self, shard: int, call: str, age_s: float) -> None:  # noqa: ARG002 - there is one
        """Let operators in this process know which call publication waits for."""
        self._opened.slow_call = (call, time.monotonic() - age_s) if call else None

    def wait_s(self, *, takes_more: bool, busy: bool) -> float:  # noqa: ARG002 - what came meanwhile has woken it
        """Return the seconds after which something is due, if nothing wakes the coordinator before."""
        opened = self._opened
        with opened.lock:
            wait = min(_MAX_IDLE_S, self._scan.due_at - time.monotonic())
            if self._scan.near or self._scan.checks:
                wait = 0.0
            if takes_more:
                wait = opened.ready.wait_s(int(time.time() * 1000), wait)
        return max(0.0, wait)

    def close(self) -> None:
        """Let another coordinator have the store."""
        self.note_slow_call(0, "", 0.0)
        with self._opened.lock:
            self._opened.wake = None

    def statistics(self, shards: Collection[int] | None) -> CoordinatorStatistics:  # noqa: ARG002 - there is one
        """Return counts since the store was opened and what is pending now. Safe from any thread."""
        opened = self._opened
        table, now_ms = opened.journal.table, time.time() * 1000
        with opened.lock:
            pending = table.used - opened.ready.settled
        held = {
            "pending": pending,
            "oldest_pending_age": max(0.0, (now_ms - table.oldest_ms()) / 1000) if pending else 0.0,
            "held": opened.ready.held,
            "delayed": table.counts[State.DELAYED],
            "held_by_key": opened.ready.held_by_key,
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

    def taken_over(self, names: Sequence[str]) -> None:
        """Settle what a former coordinator published, by its names in the done log."""
        with self._opened.lock:
            former = list(self._former(names).values())
        self._publish(former)

    def _former(self, names: Sequence[str]) -> dict[str, StoredTransaction]:
        """Return what a former coordinator published, among much that is settled."""
        journal = self._opened.journal
        live = {_name_of(stored): stored for stored in journal.live.values() if stored.verdict is not None}
        # What is in the table alone has its id for a name.
        found = {name: live.get(name) or journal.find(name) for name in names}
        return {
            name: stored
            for name, stored in found.items()
            if stored is not None and stored.verdict is not None and _name_of(stored) == name
        }

    def take(self, limit: int, room_bytes: int) -> Sequence[Pending]:
        """Return what to publish next."""
        opened = self._opened
        with opened.lock:
            taken = opened.ready.take(int(time.time() * 1000), min(limit, _GROUP), room_bytes)
            for stored in taken:
                if stored.deliver_at_ms is not None:
                    opened.journal.table.ripen(stored.record)
        self._taken.update((stored.transaction_id, stored) for stored in taken)
        return [self._pending(stored) for stored in taken]

    def wants_visible(self, some: Sequence[Pending]) -> bool:
        """Tell whether somebody waits until one of them is settled."""
        return self._opened.is_watched([self._taken[pending.half.transaction_id] for pending in some])

    def published(self, ids: Sequence[str]) -> None:
        """Settle what is published, and complete who waits for it."""
        self._publish([stored for name in ids if (stored := self._taken.pop(name, None)) is not None])

    def _publish(self, some: Sequence[StoredTransaction]) -> None:
        settled = sorted((stored for stored in some if not stored.settled), key=lambda stored: stored.decided)
        completed = self._opened.published(settled)
        if settled:
            self._settle([stored.transaction_id for stored in settled])
        for callback, verdict in completed:
            callback(verdict)

    def hold(self, reasons: Mapping[str, str]) -> None:
        """Keep what was taken for trials."""
        with self._opened.lock:
            for name, reason in reasons.items():
                stored = self._taken.get(name)
                if stored is not None and not stored.settled:
                    self._opened.ready.hold(stored, reason)

    def take_held(self, ids: Sequence[str]) -> Mapping[str, Pending | None]:
        """Take what is held for a trial."""
        opened = self._opened
        found: dict[str, Pending | None] = {}
        tried: list[StoredTransaction] = []
        with opened.lock:
            for name in ids:
                stored = self._taken.get(name)
                if stored is None or stored.settled:
                    found[name] = None
                    self._taken.pop(name, None)
                elif opened.ready.try_held(stored):
                    tried.append(stored)
        return found | {stored.transaction_id: self._pending(stored) for stored in tried}

    def _settle(self, ids: Sequence[str]) -> None:
        """Have published transactions settled durably some time later; what fails for lack of room is tried again."""
        opened = self._opened
        with opened.lock:
            ids, self._unsettled = (*self._unsettled, *ids), []
            if not ids:
                return
            self._settling += 1

        def settled(result: Result) -> None:
            with opened.lock:
                self._settling -= 1
                if isinstance(result, NoRoomError):
                    self._unsettled.extend(ids)

        self._submit(Settle(ids), settled)

    def _pending(self, stored: StoredTransaction) -> Pending:
        """Return a transaction that is decided COMMIT or DISCARD, with its messages."""
        verdict = Verdict.DISCARD if stored.verdict is Verdict.DISCARD else Verdict.COMMIT
        author = Author.OPERATOR if stored.author is Author.OPERATOR else None
        return decided(self._opened.journal.halves(stored), verdict, author, stored.check_count, _name_of(stored))


def _some(numbers: array[int]) -> list[int]:
    """Take as many numbers from the end as one round has time for."""
    return [numbers.pop() for _ in range(min(len(numbers), _ROUND))]


def _name_of(stored: StoredTransaction) -> str:
    """Return what stands in the done log for a transaction: its id, or where one can be settled twice, a name for each.

    One that was discarded, is resumed and commits is not taken for published because the done log has it as discarded.
    """
    if stored.verdict is Verdict.COMMIT and stored.resumed is None:
        return stored.transaction_id
    what = Verdict.COMMIT if stored.verdict is Verdict.COMMIT else Verdict.DISCARD
    return id_text(xxh3_128_digest(f"{stored.transaction_id} {what.name} {stored.resumed or ''}".encode()))
