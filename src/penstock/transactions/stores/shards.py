"""What a store outside Kafka brings: its shards, what waits in each to be published, and whose check is due."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.core.discard import Discarding
from penstock.transactions.core.pending import Pending
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.stores.coordination import Counts
from penstock.transactions.wire.half import Half


class CheckTerms(NamedTuple):
    """What a store must know to check the undecided transactions of a coordinator."""

    policy: CheckPolicy
    discarding: Discarding
    #: Seconds after which a coordinator that fell silent loses its shards.
    session_s: float


class DueCheck(NamedTuple):
    """An undecided transaction whose check is due, or whose checks are exhausted."""

    transaction_id: str
    group: str
    check_count: int
    #: What the store knows it by.
    stored: Any = None


class ShardBacklog(Protocol):
    """What a shard of a store holds, as its relay needs it. Used by one thread.

    Whatever is noted here may be noted twice: after an error that passes, it is tried again.
    """

    @property
    def is_lost(self) -> bool:
        """Whether the shard is another's by now."""

    def may_open(self, claim: Sequence[str]) -> bool:
        """Make sure that the shard is still one's own: whoever publishes it now is shut out next.

        `claim`: the transactional ids under which it may be published from now on. They are written down for the next
        owner, who shuts them out.
        """

    def claimed(self) -> Sequence[str]:
        """Return the transactional ids that were written down last."""

    def taken_over(self, names: Sequence[str]) -> None:
        """Mark as settled what was published, by the names in the done log, and free what a former owner held.

        Some may be settled already, or unknown.
        """

    def take(self, limit: int, room_bytes: int) -> Sequence[Pending]:
        """Return what to publish next with the others, in its order; nothing that is held is among it.

        It is `limit` transactions and `room_bytes` of messages at most, about; a single one may be larger. It may be
        what was returned before.
        """

    def wants_visible(self, some: Sequence[Pending]) -> bool:
        """Tell whether it is waited for until a committed reader can see one of them."""

    def published(self, ids: Sequence[str]) -> None:
        """Mark as settled what was taken, and is published."""

    def hold(self, reasons: Mapping[str, str]) -> None:
        """Keep what was taken, by its id, for trials, or note why it is kept: in words, for operators."""

    def take_held(self, ids: Sequence[str]) -> Mapping[str, Pending | None]:
        """Return what is held, for a trial; until `hold` or `published` nobody decides it in another way.

        One that was decided in another way meanwhile is returned so. None stands for what is settled. What is missing
        here is busy: it is asked for again.
        """


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
        """Return what waits in a shard."""

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
