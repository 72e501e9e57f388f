"""The one shard of a file store, as its coordinator works on it. Used by the coordinator's thread.

What is published is not waited for until it is settled durably here: until then, the done log has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from xxhash import xxh3_128_digest

from penstock.errors import ConfigurationError
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.stores.file.changes import Changes
from penstock.transactions.stores.file.check_scheduler import FileCheckScheduler
from penstock.transactions.stores.file.log.journal import Outcome, Settle
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.file.log.redo import NoRoomError
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.file.slow_call import SlowCall
from penstock.transactions.stores.relay.backlog import Reason
from penstock.transactions.stores.relay.publishable import OutboundMessage, Publishable
from penstock.transactions.stores.relay.relay import Relay
from penstock.transactions.stores.relay.relayed_store import CheckTerms
from penstock.transactions.wire.discarded import BY_OPERATOR, EXHAUSTED, encode_discarded
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import id_text
from penstock.transactions.wire.ops import Author, Verdict

#: Most seconds between two rounds.
_LONGEST_WAIT_S = 1.0
#: Transactions in one Kafka transaction, at most.
_GROUP = 1_000
#: The file, beside the redo log, with the transactional ids under which the store may be published.
_CLAIM = "publishers"


class FileShard:
    """What a file store holds: one shard, of the one coordinator that the store has.

    Raises `ConfigurationError` where the store has one already. `wake` is called by any thread.
    """

    count = 1
    owned: Collection[int] = (0,)
    leaving: Collection[int] = ()
    #: A disk that failed is not tried again: the store takes nothing more until it is opened again.
    transient_errors: tuple[type[Exception], ...] = ()

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        opened: OpenStore,
        folder: Path,
        label: str,
        prefix: str,
        checks: CheckTerms,
        changes: Changes,
        wake: Callable[[], object],
    ) -> None:
        self.name = f"{prefix}.file.{opened.journal.redo.store_id}"
        self._opened = opened
        self._slow_call = SlowCall(folder)
        self._claim = folder / _CLAIM
        self._discarded = f"{prefix}.discarded"
        self._scheduler = FileCheckScheduler(opened, checks, changes)
        # Ids of published transactions that could not be settled for lack of room, and requests to settle that are
        # under way. Guarded by the store's lock.
        self._unsettled: list[str] = []
        self._settling = 0
        with opened.lock:
            if opened.coordinator is not None:
                raise ConfigurationError(f"{label} has a coordinator already; use that one")
            opened.coordinator = self._scheduler.plan, wake
            opened.ready.begin_anew(one for one in opened.pending.values() if not one.settled)
            for stored in opened.pending.values():
                if not stored.settled:
                    self._scheduler.plan(stored)

    def transactional_id(self, shard: int) -> str:  # noqa: ARG002 - there is one
        """Return the transactional id that publishes it."""
        return self.name

    def backlog(self, shard: int) -> FileBacklog:  # noqa: ARG002 - the same
        """Return what waits in it."""
        return FileBacklog(self._opened, self._discarded, self._settle, self._claim)

    def renew(self) -> None:
        """Raise why the store takes nothing more, if it does not."""
        if self._opened.writer.failure is not None:
            raise self._opened.writer.failure

    def give_up(self, shard: int) -> None:
        """Nobody else can have it."""

    def check(self) -> None:
        """Send the checks that are due, and hand over those that are exhausted."""
        self._scheduler.round()

    def is_durable(self) -> bool:
        """Whether all that was published is durably settled; what failed for lack of room is tried again."""
        self._settle(())
        with self._opened.lock:
            return not self._settling and not self._unsettled

    def purge(self) -> None:
        """What is settled leaves the redo log with its segment."""

    def note_slow_call(self, shard: int, call: str, age_s: float) -> None:  # noqa: ARG002 - there is one
        """Note the call that publication waits for."""
        self._slow_call.note(call, age_s)

    def wait_s(self, relays: Iterable[Relay], *, busy: bool) -> float:  # noqa: ARG002 - what came meanwhile has woken it
        """Return the seconds after which something is due, if nothing wakes the coordinator before."""
        opened, wait, takes_more = self._opened, _LONGEST_WAIT_S, True
        for relay in relays:
            wait, takes_more = min(wait, relay.wait_s()), relay.is_ready
        with opened.lock:
            if takes_more:
                wait = min(wait, opened.ready.wait_s(int(time.time() * 1000), wait))
            return max(0.0, min(wait, self._scheduler.wait_s()))

    def close(self) -> None:
        """Let another coordinator have the store."""
        self._slow_call.note("", 0.0)
        with self._opened.lock:
            self._opened.coordinator = None

    def statistics(self, shards: Collection[int] | None) -> CoordinatorStatistics:  # noqa: ARG002 - there is one
        """Return counts since the store was opened and what is pending now. Safe from any thread."""
        opened = self._opened
        with opened.lock:
            pending = [stored for stored in opened.pending.values() if not stored.settled]
            oldest = min((stored.birth_ms for stored in pending), default=None)
            counts = opened.counts
            return CoordinatorStatistics(
                partitions=0,
                pending=len(pending),
                oldest_pending_age=0.0 if oldest is None else max(0.0, time.time() - oldest / 1000),
                held=opened.ready.refused,
                committed=counts.committed,
                rolled_back=counts.rolled_back,
                discarded=counts.discarded,
                refused=counts.refused,
                forged=0,
                checks=counts.checks,
                answered_checks=counts.answered_checks,
                no_producer=counts.no_producer,
                groups=0,
                recoveries=0,
                held_by_key=opened.ready.held_by_key,
                delayed=opened.ready.delayed,
                finish_times=tuple(counts.finish_times),
                finish_seconds=counts.finish_seconds,
            )

    def _settle(self, ids: Sequence[str]) -> None:
        """Have published transactions settled durably some time later; what fails for lack of room is tried again."""
        opened = self._opened
        with opened.lock:
            ids, self._unsettled = (*self._unsettled, *ids), []
            if not ids:
                return
            self._settling += 1

        def settled(outcome: Outcome | Exception) -> None:
            with opened.lock:
                self._settling -= 1
                if isinstance(outcome, NoRoomError):
                    self._unsettled.extend(ids)

        opened.writer.submit(Settle(ids), settled)


class FileBacklog:
    """What waits in a file store.

    `settle` has transactions settled by their ids, durably some time later; `claim` is the file of transactional ids.
    """

    #: The store has one coordinator.
    is_lost = False

    def __init__(self, opened: OpenStore, discarded: str, settle: Callable[[Sequence[str]], None], claim: Path) -> None:
        self._opened = opened
        self._discarded = discarded
        self._settle = settle
        self._claim = claim
        # What the relay has, by the name that it has it by.
        self._taken: dict[str, StoredTransaction] = {}

    def may_open(self, claim: Sequence[str]) -> bool:
        """Write the transactional ids down; the store has one coordinator, so it may always be published."""
        if list(claim) != self.claimed():
            # Another process has to know of them; what a machine that failed had under way, Kafka ends by itself.
            new = self._claim.with_suffix(".new")
            new.write_text(" ".join(claim))
            new.replace(self._claim)
        return True

    def claimed(self) -> list[str]:
        """Return the transactional ids that were written down last."""
        return self._claim.read_text().split() if self._claim.exists() else []

    def take(self, limit: int, room_bytes: int) -> Sequence[Publishable]:
        """Return what to publish next."""
        opened = self._opened
        with opened.lock:
            share = opened.ready.take(int(time.time() * 1000), min(limit, _GROUP), room_bytes)
        entries = [_publishable(stored, opened.halves(stored), self._discarded) for stored in share]
        self._taken.update((entry.transaction_id, stored) for entry, stored in zip(entries, share, strict=True))
        return entries

    def wants_visible(self, entries: Sequence[Publishable]) -> bool:
        """Tell whether somebody waits until one of them is settled."""
        return self._opened.is_watched([self._taken[entry.transaction_id] for entry in entries])

    def published(self, names: Collection[str]) -> None:
        """Settle what is published, and complete who waits for it."""
        opened, stored = self._opened, [self._taken.pop(name, None) for name in names]
        found = [one for one in stored if one is not None]
        if len(found) < len(names):
            # What a former coordinator published, and much that is settled.
            wanted = set(names)
            with opened.lock:
                waiting = [one for one in opened.pending.values() if one.verdict is not None and not one.settled]
            found += [one for one in waiting if _name_of(one) in wanted and one not in found]
        found = sorted((one for one in found if not one.settled), key=lambda one: one.decided)
        completed = opened.published(found)
        if found:
            self._settle([one.transaction_id for one in found])
        for callback, verdict in completed:
            callback(verdict)

    def give_back(self, names: Collection[str]) -> None:
        """Take back what was not published."""
        with self._opened.lock:
            for name in names:
                stored = self._taken.pop(name, None)
                if stored is not None and not stored.settled:
                    self._opened.ready.give_back(stored)

    def hold(self, reasons: Mapping[str, Reason]) -> None:
        """Keep what was taken for trials."""
        with self._opened.lock:
            for name, reason in reasons.items():
                stored = self._taken.get(name)
                if stored is not None:
                    self._opened.ready.hold(stored, reason)

    def release(self, names: Collection[str]) -> None:
        """Let what was held go with the others again."""
        with self._opened.lock:
            for name in names:
                stored = self._taken.pop(name, None)
                if stored is not None and not stored.settled:
                    self._opened.ready.release(stored)

    def take_held(self, names: Sequence[str]) -> Mapping[str, Publishable | None]:
        """Take what is held for a trial."""
        opened = self._opened
        found: dict[str, Publishable | None] = {}
        tried: list[StoredTransaction] = []
        with opened.lock:
            for name in names:
                stored = self._taken.get(name)
                if stored is None or stored.settled or _name_of(stored) != name:
                    # Discarded, and perhaps settled as such.
                    found[name] = None
                    self._taken.pop(name, None)
                elif opened.ready.try_held(stored):
                    tried.append(stored)
        for stored in tried:
            entry = _publishable(stored, opened.halves(stored), self._discarded)
            found[entry.transaction_id] = entry
        return found

    def put_back(self, names: Collection[str]) -> None:
        """A trial is over."""
        with self._opened.lock:
            for name in names:
                stored = self._taken.get(name)
                if stored is not None:
                    self._opened.ready.put_back(stored)


def _name_of(stored: StoredTransaction) -> str:
    """Return what stands in the done log for a transaction: its id, or where one can be settled twice, a name for each.

    One that was discarded, is resumed and commits is not taken for published because the done log has it as discarded.
    """
    return _name(stored, Verdict.COMMIT if stored.verdict is Verdict.COMMIT else Verdict.DISCARD)


def _name(stored: StoredTransaction, what: Verdict) -> str:
    if what is Verdict.COMMIT and stored.resumed is None:
        return stored.transaction_id
    return id_text(xxh3_128_digest(f"{stored.transaction_id} {what.name} {stored.resumed or ''}".encode()))


def _publishable(stored: StoredTransaction, halves: Sequence[Half], discarded: str) -> Publishable:
    """Return what is published of a transaction that is decided COMMIT or DISCARD (then to the topic `discarded`)."""
    if stored.verdict is Verdict.DISCARD:
        messages = []
        for half in halves:
            why = BY_OPERATOR if stored.author is Author.OPERATOR else EXHAUSTED
            headers = encode_discarded(half, why, stored.check_count)
            messages.append(OutboundMessage(discarded, None, half.key, half.value, headers))
        return Publishable(_name_of(stored), messages, None, discards=_name(stored, Verdict.COMMIT))
    messages = [OutboundMessage(half.topic, half.partition, half.key, half.value, half.headers) for half in halves]
    return Publishable(_name_of(stored), messages, stored.line)
