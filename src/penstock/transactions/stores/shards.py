"""What a store outside Kafka brings: its shards, what waits in each to be published, and whose check is due."""

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
from penstock.transactions.stores.coordination import Counts
from penstock.transactions.stores.done_log import DoneRead, encode_ids
from penstock.transactions.wire.half import Half

#: Ids in one record of the done log: an eighth of a megabyte.
_IDS_PER_RECORD = 8_000


class CheckTerms(NamedTuple):
    """What a store must know to check the undecided transactions of a coordinator."""

    policy: CheckPolicy
    #: Seconds after which a coordinator that fell silent loses its shards.
    session_s: float


class DueCheck(NamedTuple):
    """An undecided transaction whose check is due, or whose checks are exhausted."""

    transaction_id: str
    group: str
    check_count: int
    #: What the store knows it by.
    stored: Any = None


@dataclass(slots=True)
class StoredBatch(DecidedBatch):
    """What one Kafka transaction settles of a shard."""

    @property
    def names(self) -> list[str]:
        """Its names in the done log."""
        return [pending.done_name or pending.half.transaction_id for pending in self.decided]

    def records(self) -> Iterator[bytes]:
        """Yield what is written into the done log."""
        names = self.names
        return (encode_ids(names[at : at + _IDS_PER_RECORD]) for at in range(0, len(names), _IDS_PER_RECORD))


class ShardBacklog(Backlog):
    """One shard, as its relay takes it over and the engine publishes it. Used by the coordinator's thread.

    The store has the messages, and judges what is decided and due; from then until it is settled, it is in the queue.
    Methods raise as the store does, and are called again then.
    """

    #: Whether the shard is another's by now.
    is_lost: bool = False
    # What the relay's engine holds back, and the topic of what is discarded.
    _quarantine: TargetQuarantine
    _discarded_to = ""

    @abstractmethod
    def may_open(self, claim: Sequence[str]) -> bool:
        """Make sure that the shard is still one's own: whoever publishes it now is shut out next.

        `claim`: the transactional ids under which it may be published from now on. They are written down for the next
        owner, who shuts them out.
        """

    @abstractmethod
    def claimed(self) -> Sequence[str]:
        """Return the transactional ids that were written down last."""

    def take_over(self, found: DoneRead, quarantine: TargetQuarantine, discarded_to: str) -> None:
        """Begin with what the done log said, once nobody else can be writing there."""
        self._quarantine, self._discarded_to = quarantine, discarded_to
        #: Below it, all of the done log is settled, save for what is under way.
        self.done_end = found.end
        self._taken_over(sorted(found.ids))

    @abstractmethod
    def _taken_over(self, names: Sequence[str]) -> None:
        """Have what was published settled, by the names in the done log; some may be settled already, or unknown."""

    @abstractmethod
    def _published(self, some: Sequence[Pending]) -> None:
        """Have settled what was published."""

    def _given_back(self, some: Sequence[Pending]) -> None:
        """Take back what was not published."""
        for pending in some:
            pending.in_flight = False

    @property
    def is_flushed(self) -> bool:
        """Whether the store knows all that was published."""
        return True

    def flush(self) -> None:
        """Note in the store what is to be noted; where that fails, it is noted by the next call."""

    def explain(self) -> None:
        """Let operators in other processes know why things wait, where the reason is another one by now."""

    def began(self, batch: StoredBatch) -> None:
        """Note that it is under way; the store leaves what was taken alone."""
        for pending in batch.decided:
            pending.in_flight = True

    def settled(self, batch: StoredBatch, done_end: int | None) -> list[str]:
        """Have what was published settled in the store."""
        self.done_end = max(self.done_end, done_end or 0)
        return self._settle(batch.decided)

    def failed(self, batch: StoredBatch) -> None:
        """Give back what was taken."""
        self._given_back(batch.decided)

    def learned(self, batch: StoredBatch, found: DoneRead) -> list[str]:
        """Settle what the done log has, and give the rest back."""
        self.done_end = max(self.done_end, found.end)
        known = [name in found.ids for name in batch.names]
        self._given_back([pending for pending, is_done in zip(batch.decided, known, strict=True) if not is_done])
        return self._settle([pending for pending, is_done in zip(batch.decided, known, strict=True) if is_done])

    def _settle(self, some: Sequence[Pending]) -> list[str]:
        if some:
            self._published(some)
        return [pending.half.transaction_id for pending in some]

    def why_held(self, pending: Pending) -> str:
        """Return in words why one that is set aside waits."""
        refused = self._quarantine.why_refused(pending.transaction_id)
        if refused is not None:
            return refused
        before = self.set_aside.behind(pending)
        if before is None:
            return self._why(self.set_aside.topic(pending.transaction_id) or "")
        why = self._quarantine.why_refused(before.transaction_id) or "which waits, too"
        return f"transaction {before.transaction_id}, before it in its key: {why}"

    def _why(self, topic: str) -> str:
        return f"{topic}: {self._quarantine.why(topic) or 'it is not known yet'}"


class StoreShards(ABC):
    """A store's shards, as its coordinator works on them. Used by its thread, save for `statistics` and `half`.

    Args:
        name: what the done log's name and the transactional ids begin with; no other store has it.
        count: how many there are.
        counts: what was counted since the start.
    """

    def __init__(self, name: str, count: int, counts: Counts) -> None:
        self.name = name
        self.count = count
        self.counts = counts
        #: Those that it hands over: nothing new is begun in them.
        self.leaving: set[int] = set()

    @property
    @abstractmethod
    def owned(self) -> Collection[int]:
        """Those that are this coordinator's."""

    @abstractmethod
    def backlog(self, shard: int) -> ShardBacklog:
        """Return what waits in a shard, to be taken over."""

    @abstractmethod
    def renew(self) -> None:
        """Keep what is owned, take what is free; raise what ends the store for good. Called each round."""

    def give_up(self, shard: int) -> None:
        """Leave a shard to others. Nothing is under way in it."""
        self.leaving.discard(shard)

    @abstractmethod
    def due(self) -> Sequence[DueCheck]:
        """Return what is due, each once an interval as long as nobody decides it."""

    @abstractmethod
    def ask(self, due: Sequence[DueCheck]) -> Collection[str]:
        """Have one producer of each group asked, another one than last time; return the groups that have none."""

    @abstractmethod
    def half(self, due: DueCheck) -> Half | None:
        """Read the first half of one, or None where it is decided by now. Called by any thread."""

    def is_durable(self) -> bool:
        """Whether all that the relays said was published is durably settled: then the done log may be trimmed."""
        return True

    @abstractmethod
    def purge(self) -> None:
        """Delete what nobody will ask for."""

    @abstractmethod
    def note_slow_call(self, shard: int, call: str, age_s: float) -> None:
        """Write down, for operators in any process, which call has not gone on for so long; an empty name: all do.

        It raises `OSError` where there is no room for it.
        """

    @abstractmethod
    def wait_s(self, *, takes_more: bool, busy: bool) -> float:
        """Return the seconds after which something may be due, if nothing wakes the thread before.

        Args:
            takes_more: whether what can be published would be taken now.
            busy: whether the last round found something to do.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up all that is owned."""

    @abstractmethod
    def statistics(self, shards: Collection[int] | None) -> CoordinatorStatistics:
        """Return what was counted and what the store holds; of some shards, or of all. Safe from any thread."""
