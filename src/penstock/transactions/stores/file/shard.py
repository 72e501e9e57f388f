"""The one shard of a file store, as its coordinator and its relay work on it. Used by the coordinator's thread.

What is published is not waited for until it is settled durably here: until then, the done log has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from xxhash import xxh3_128_digest

from penstock.errors import ConfigurationError
from penstock.transactions.core.pending import Pending
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.operator.description import hanging
from penstock.transactions.stores.file.check_sources import DueQueue
from penstock.transactions.stores.file.log.journal import Settle
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.file.log.redo import NoRoomError
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.relay.changes import ChangedCallback, Result
from penstock.transactions.stores.relay.shards import CheckTerms, DueCheck, StoreShards
from penstock.transactions.stores.relay.stored_backlog import decided
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import id_text
from penstock.transactions.wire.ops import Author, Verdict

#: Most seconds between two rounds.
_LONGEST_WAIT_S = 1.0
#: Transactions in one Kafka transaction, at most; and checks in one round.
_GROUP = 1_000
_CHECKS = 2_000
#: The files, beside the redo log, with the transactional ids under which the store may be published, and with the call
#: into the Kafka client that publication waits for.
_CLAIM = "publishers"
_SLOW_CALL = "slow-call"
#: Bytes of the latter that are read.
_MOST_BYTES = 1_000


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
        self._policy = terms.policy
        self._submit = submit
        # What the relay has, by id.
        self._taken: dict[str, StoredTransaction] = {}
        # Guarded by the store's lock: the next checks; ids of published transactions that could not be settled for lack
        # of room, and how many requests to settle are under way.
        self._due = DueQueue()
        self._unsettled: list[str] = []
        self._settling = 0
        with opened.lock:
            if opened.coordinator is not None:
                raise ConfigurationError(f"{label} has a coordinator already; use that one")
            opened.coordinator = self._plan, wake
            unsettled = [stored for stored in opened.pending.values() if not stored.settled]
            opened.ready.begin_again(unsettled)
            for stored in unsettled:
                self._plan(stored)

    def backlog(self, shard: int) -> FileShard:  # noqa: ARG002 - there is one
        """Return what waits in it."""
        return self

    def renew(self) -> None:
        """Raise why the store takes nothing more, if it does not."""
        if self._opened.failure is not None:
            raise self._opened.failure

    def due(self) -> Sequence[DueCheck]:
        """Return what is due, as much as one round has time for."""
        now = time.monotonic()
        with self._opened.lock:
            due = self._due.take_due(now, _CHECKS)
            for stored in due:
                self._due.plan(stored, now + self._policy.interval(stored.check_count + 1))
        return [DueCheck(stored.transaction_id, stored.group, stored.check_count, stored) for stored in due]

    def ask(self, due: Sequence[DueCheck]) -> Collection[str]:
        """Let the producers of this process take checks; return the groups that have none."""
        return self._opened.check_sources.ask([check.stored for check in due])

    def half(self, due: DueCheck) -> Half | None:
        """Read the first half of an undecided transaction, or None."""
        return self._opened.first_half(due.stored)

    def _plan(self, stored: StoredTransaction) -> None:
        """Plan the next check of an undecided transaction. The caller holds the store's lock."""
        if stored.verdict is not None:
            return
        # Wall clocks jump; what they say is trusted no further than that a birth is not in the future.
        now_ms = time.time() * 1000
        birth_s, answered_s = min(stored.birth_ms, now_ms) / 1000, min(stored.answered_ms, now_ms) / 1000
        due = self._policy.next_due(birth_s, (stored.immunity_ms or 0) / 1000, answered_s, stored.check_count)
        self._due.plan(stored, time.monotonic() + max(0.0, due - now_ms / 1000))

    def is_durable(self) -> bool:
        """Whether all that was published is durably settled; what failed for lack of room is tried again."""
        self._settle(())
        with self._opened.lock:
            return not self._settling and not self._unsettled

    def purge(self) -> None:
        """What is settled leaves the redo log with its segment."""

    def note_slow_call(self, shard: int, call: str, age_s: float) -> None:  # noqa: ARG002 - there is one
        """Write down the call that publication waits for."""
        if call:
            _replace(self._folder / _SLOW_CALL, f"{time.time() - age_s:.3f} {call}")
        else:
            (self._folder / _SLOW_CALL).unlink(missing_ok=True)

    def wait_s(self, *, takes_more: bool, busy: bool) -> float:  # noqa: ARG002 - what came meanwhile has woken it
        """Return the seconds after which something is due, if nothing wakes the coordinator before."""
        opened = self._opened
        with opened.lock:
            wait = min(_LONGEST_WAIT_S, self._due.next_due - time.monotonic())
            if takes_more:
                wait = opened.ready.wait_s(int(time.time() * 1000), wait)
        return max(0.0, wait)

    def close(self) -> None:
        """Let another coordinator have the store."""
        self.note_slow_call(0, "", 0.0)
        with self._opened.lock:
            self._opened.coordinator = None

    def statistics(self, shards: Collection[int] | None) -> CoordinatorStatistics:  # noqa: ARG002 - there is one
        """Return counts since the store was opened and what is pending now. Safe from any thread."""
        opened = self._opened
        with opened.lock:
            births = [stored.birth_ms for stored in opened.pending.values() if not stored.settled]
            return self.counts.statistics(
                pending=len(births),
                oldest_age_s=time.time() - min(births) / 1000 if births else 0.0,
                held=opened.ready.held,
                delayed=opened.ready.delayed,
                held_by_key=opened.ready.held_by_key,
            )

    def may_open(self, claim: Sequence[str]) -> bool:
        """Write the transactional ids down; the store has one coordinator, so it may always be published."""
        if list(claim) != self.claimed():
            # Another process has to know of them; what a machine that failed had under way, Kafka ends by itself.
            _replace(self._folder / _CLAIM, " ".join(claim))
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
        wanted = set(names)
        waiting = (stored for stored in self._opened.pending.values() if wanted and stored.verdict is not None)
        return {name: stored for stored in waiting if (name := _name_of(stored)) in wanted}

    def take(self, limit: int, room_bytes: int) -> Sequence[Pending]:
        """Return what to publish next."""
        opened = self._opened
        with opened.lock:
            taken = opened.ready.take(int(time.time() * 1000), min(limit, _GROUP), room_bytes)
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
        return decided(self._opened.halves(stored), verdict, author, stored.check_count, _name_of(stored))


def read_slow_call(folder: Path) -> str:
    """Return in words which call publication of the store in a folder waits for, or an empty text."""
    try:
        since, _, call = (folder / _SLOW_CALL).read_bytes()[:_MOST_BYTES].decode(errors="replace").partition(" ")
        return hanging(call, time.time() - float(since))
    except (OSError, ValueError):
        return ""


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _name_of(stored: StoredTransaction) -> str:
    """Return what stands in the done log for a transaction: its id, or where one can be settled twice, a name for each.

    One that was discarded, is resumed and commits is not taken for published because the done log has it as discarded.
    """
    if stored.verdict is Verdict.COMMIT and stored.resumed is None:
        return stored.transaction_id
    what = Verdict.COMMIT if stored.verdict is Verdict.COMMIT else Verdict.DISCARD
    return id_text(xxh3_128_digest(f"{stored.transaction_id} {what.name} {stored.resumed or ''}".encode()))
