"""The interface of a store outside Kafka to its coordinator: shards, their backlogs, and due checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.core.commit_batch import DecidedBatch
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.quarantine import TargetQuarantine
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.publishing.group_commit import Backlog
from penstock.transactions.stores.done_log import DoneRead, encode_ids
from penstock.transactions.stores.store_coordinator import Counts
from penstock.transactions.wire.half import Half

#: Ids in one record of the done log: an eighth of a megabyte.
_IDS_PER_RECORD = 8_000


class CheckTerms(NamedTuple):
    """The check policy and the session time-out of one coordinator."""

    policy: CheckPolicy
    #: Seconds after which a silent coordinator loses its shards.
    session_s: float


class DueCheck(NamedTuple):
    """An undecided transaction whose check is due, or whose checks are exhausted."""

    transaction_id: str
    group: str
    check_count: int
    #: The store's own reference to the transaction.
    stored: Any = None


@dataclass(slots=True)
class StoredBatch(DecidedBatch):
    """The transactions of one shard that one Kafka transaction settles."""

    @property
    def names(self) -> list[str]:
        """The ids of its transactions in the done log."""
        return [pending.done_name or pending.half.transaction_id for pending in self.decided]

    def records(self) -> Iterator[bytes]:
        """Yield the records for the done log."""
        names = self.names
        return (encode_ids(names[at : at + _IDS_PER_RECORD]) for at in range(0, len(names), _IDS_PER_RECORD))


class ShardBacklog(Backlog):
    """The decided transactions of one shard. Used by the coordinator's thread.

    The store keeps the messages and selects the decided and due ones. These are in the queue until they are settled.
    If a method raises the store's error, the caller calls it again later.
    """

    #: Whether the shard belongs to another coordinator now.
    is_lost: bool = False
    # The quarantine of the relay's engine, and the topic of discarded messages.
    _quarantine: TargetQuarantine
    _discarded_to = ""

    @abstractmethod
    def may_open(self, claim: Sequence[str]) -> bool:
        """Return whether the shard is still owned. The caller then fences its former publishers.

        `claim`: the transactional ids that may publish the shard from now on. The store saves them: the next owner
        fences them.
        """

    @abstractmethod
    def claimed(self) -> Sequence[str]:
        """Return the transactional ids that were saved last."""

    def take_over(self, found: DoneRead, quarantine: TargetQuarantine, discarded_to: str) -> None:
        """Start from the content of the done log. By now all other writers are fenced."""
        self._quarantine, self._discarded_to = quarantine, discarded_to
        #: Below this offset of the done log all is settled, except open Kafka transactions.
        self.done_end = found.end
        self._taken_over(sorted(found.ids))

    @abstractmethod
    def _taken_over(self, names: Sequence[str]) -> None:
        """Settle published transactions by their ids in the done log; some may be settled already, or unknown."""

    @abstractmethod
    def _published(self, transactions: Sequence[Pending]) -> None:
        """Settle published transactions in the store."""

    def _given_back(self, transactions: Sequence[Pending]) -> None:
        """Take back transactions that were not published."""
        for pending in transactions:
            pending.in_flight = False

    def is_durable(self) -> bool:
        """Return whether all published transactions are durably settled: then the done log may be trimmed."""
        return True

    def flush(self) -> None:
        """Write outstanding notes into the store; after an error, the next call writes them."""

    def explain(self) -> None:
        """Store changed reasons for waiting, so that operators in other processes see them."""

    def began(self, batch: StoredBatch) -> None:
        """Mark the batch as in flight: the store does not change its transactions meanwhile."""
        for pending in batch.decided:
            pending.in_flight = True

    def settled(self, batch: StoredBatch, done_end: int | None) -> list[str]:
        """Settle the published batch in the store."""
        self.done_end = max(self.done_end, done_end or 0)
        return self._settle(batch.decided)

    def failed(self, batch: StoredBatch) -> None:
        """Give the batch back."""
        self._given_back(batch.decided)

    def learned(self, batch: StoredBatch, found: DoneRead) -> list[str]:
        """Settle the transactions that the done log has; give the others back."""
        self.done_end = max(self.done_end, found.end)
        known = [name in found.ids for name in batch.names]
        self._given_back([pending for pending, is_done in zip(batch.decided, known, strict=True) if not is_done])
        return self._settle([pending for pending, is_done in zip(batch.decided, known, strict=True) if is_done])

    def _settle(self, transactions: Sequence[Pending]) -> list[str]:
        if transactions:
            self._published(transactions)
        return [pending.half.transaction_id for pending in transactions]

    def why_held(self, pending: Pending) -> str:
        """Return why a transaction that was set aside waits."""
        refused = self._quarantine.why_refused(pending.transaction_id)
        if refused is not None:
            return refused
        before = self.set_aside.behind(pending)
        if before is None:
            return self._why(self.set_aside.topic(pending.transaction_id) or "")
        why = self._quarantine.why_refused(before.transaction_id) or "it waits, too"
        return f"transaction {before.transaction_id}, before it in its key: {why}"

    def _why(self, topic: str) -> str:
        return f"{topic}: {self._quarantine.why(topic) or 'the reason is not known yet'}"


class StoreShards(ABC):
    """All shards of a store. Used by the coordinator's thread, except `statistics` and `half`.

    Args:
        name: the prefix of the done log's name and of transactional ids, unique to the store.
        count: the number of shards.
        counts: the counts since the start.
    """

    def __init__(self, name: str, count: int, counts: Counts) -> None:
        self.name = name
        self.count = count
        self.counts = counts
        #: Shards that the coordinator hands over: it starts nothing new in them.
        self.leaving: set[int] = set()

    @property
    @abstractmethod
    def owned(self) -> Collection[int]:
        """The shards that this coordinator owns."""

    @abstractmethod
    def backlog(self, shard: int) -> ShardBacklog:
        """Return the backlog of a shard, for its take-over."""

    @abstractmethod
    def renew(self) -> None:
        """Renew owned leases and take free shards; raise the error that ends the store. Called each round."""

    def give_up(self, shard: int) -> None:
        """Release a shard. No Kafka transaction of it is open."""
        self.leaving.discard(shard)

    @abstractmethod
    def due(self) -> Sequence[DueCheck]:
        """Return due checks: each undecided transaction once per check interval."""

    @abstractmethod
    def ask(self, due: Sequence[DueCheck]) -> Collection[str]:
        """Send each check to another producer of its group than last time; return groups without producers."""

    @abstractmethod
    def half(self, due: DueCheck) -> Half | None:
        """Read the first half of a transaction; None if it is decided by now. Any thread."""

    @abstractmethod
    def purge(self) -> None:
        """Delete rows that no reader needs any longer."""

    @abstractmethod
    def note_slow_call(self, shard: int, call: str, age_s: float) -> None:
        """Store the name and age of a shard's hung call for operators in any process; an empty name means none.

        Raises `OSError` if there is no room for it.
        """

    @abstractmethod
    def wait_s(self, *, takes_more: bool, busy: bool) -> float:
        """Return the seconds until the next round, if nothing wakes the thread before.

        Args:
            takes_more: whether a relay could publish more now.
            busy: whether the last round found something to do.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all owned shards."""

    @abstractmethod
    def statistics(self, shards: Collection[int] | None) -> CoordinatorStatistics:
        """Return the counts and the content of these shards, or of all shards if None. Any thread."""
