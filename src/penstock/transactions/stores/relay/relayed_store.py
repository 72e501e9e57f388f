"""The seam between a store that is not in Kafka and its coordinator: what each such store brings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from penstock.options import ClientConfig
from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.core.discard import Discarding
from penstock.transactions.model import CoordinatorStatistics, PendingTransaction
from penstock.transactions.stores.relay.backlog import ShardBacklog
from penstock.transactions.stores.relay.relay import Relay
from penstock.transactions.wire.ops import Verdict


class CheckTerms(NamedTuple):
    """What a store must know to check the undecided transactions of a coordinator."""

    policy: CheckPolicy
    discarding: Discarding
    #: Seconds after which a coordinator that fell silent loses its shards.
    session_s: float


class StoreShards(Protocol):
    """A store's shards, as its coordinator works on them. Used by the coordinator's thread, save for `statistics`."""

    @property
    def name(self) -> str:
        """What the done log's name and the transactional ids begin with; no other store has it."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def owned(self) -> Collection[int]:
        """Those that are this coordinator's."""

    @property
    def leaving(self) -> Collection[int]:
        """Those that it hands over: nothing new is begun in them."""

    @property
    def transient_errors(self) -> tuple[type[Exception], ...]:
        """Errors of the store that pass: it is tried again after them."""

    def transactional_id(self, shard: int) -> str:
        """Return the transactional id that publishes a shard."""

    def backlog(self, shard: int) -> ShardBacklog:
        """Return what waits in a shard."""

    def renew(self) -> None:
        """Keep what is owned, take what is free; raise what ends the store for good. Called each round."""

    def give_up(self, shard: int) -> None:
        """Leave a shard to others. Nothing is under way in it."""

    def check(self) -> None:
        """Send the checks that are due, and hand over those that are exhausted. Called each round."""

    def is_durable(self) -> bool:
        """Whether all that the relays said was published is durably settled: then the done log may be trimmed."""

    def purge(self) -> None:
        """Delete what nobody will ask for."""

    def note_slow_call(self, shard: int, call: str, age_s: float) -> None:
        """Note, for operators in any process, the call that publication of a shard waits for; mostly an empty name."""

    def wait_s(self, relays: Iterable[Relay], *, busy: bool) -> float:
        """Return the seconds after which something may be due, if nothing wakes the thread before.

        Args:
            relays: of the shards that are owned.
            busy: whether the last round found something to do.
        """

    def close(self) -> None:
        """Give up all that is owned."""

    def statistics(self, shards: Collection[int] | None) -> CoordinatorStatistics:
        """Return what was counted and what the store holds; of some shards, or of all. Safe from any thread."""


class StoreAdministration(Protocol):
    """What an operator may do on such a store, in the process of its coordinator. Safe from any thread."""

    def oldest(self, most: int, shards: Collection[int]) -> Sequence[PendingTransaction]:
        """Return the oldest pending transactions of some shards, at most so many."""

    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None."""

    def decide(self, transaction_id: str, verdict: Verdict, actor: str, why: str) -> None:
        """Store an operator's decision, and write down who it was."""

    def resume(self, transaction_id: str, actor: str, why: str) -> object:
        """Bring a discarded transaction back, and write down who it was."""


class RelayedStore(Protocol):
    """A store whose messages a relay publishes into Kafka, as its coordinator sees it."""

    @property
    def label(self) -> str:
        """What it is called in messages."""

    @property
    def bootstrap_servers(self) -> str:
        """Kafka's addresses."""

    @property
    def config(self) -> ClientConfig:
        """Settings of the Kafka clients."""

    @property
    def prefix(self) -> str:
        """What the names of its topics begin with."""

    def start(self) -> None:
        """Open it; starts are counted."""

    def stop(self, timeout_s: float) -> None:
        """Give one start back."""

    def administration(self) -> StoreAdministration:
        """Return what an operator may do, once it was started."""

    def open_shards(self, checks: CheckTerms, wake: Callable[[], object]) -> StoreShards:
        """Return its shards, for one coordinator, once it was started.

        Args:
            checks: the rules of checks.
            wake: called by any thread when the coordinator has something to do.
        """
