"""One shard of a SQL store, as its relay sees it: statements, made by the coordinator's thread alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from penstock.transactions.stores.relay.publishable import Publishable
from penstock.transactions.stores.relay.quarantine import Reason
from penstock.transactions.stores.sql.claims import Claims
from penstock.transactions.stores.sql.counting import SqlCounts
from penstock.transactions.stores.sql.shards import Shards


class SqlBacklog:
    """What a shard holds. Used by the coordinator's thread.

    Args:
        number: the shard.
        shards: the coordinator's.
        claims: the statements.
        counts: of what is settled.
    """

    def __init__(self, number: int, shards: Shards, claims: Claims, counts: SqlCounts) -> None:
        self._number = number
        self._shards = shards
        self._claims = claims
        self._counts = counts
        # Whether what a former owner held was let go.
        self._is_released = False
        #: Whether another coordinator has the shard.
        self.is_lost = False

    def may_open(self) -> bool:
        """Renew the lease: a coordinator that lost the shard must not shut its new owner out."""
        self.is_lost = self.is_lost or not self._shards.renew(self._number)
        return not self.is_lost

    def take(self) -> Sequence[Publishable]:
        """Return what to publish next, and settle what was rolled back."""
        if self.is_lost:
            return ()
        if not self._is_released:
            self._claims.release(self._number, self._shards.mine(self._number))
            self._is_released = True
        if not self._claims.waiting(self._number):
            return ()
        self._counts.settled(self._claims.roll_back(self._number))
        # With the ownership, after the relay was opened: whoever takes the shard from now on shuts it out.
        entries = self._claims.claim(self._number, self._shards.mine(self._number))
        self.is_lost = entries is None
        return entries or ()

    def published(self, names: Collection[str]) -> None:
        """Mark as settled what is published."""
        self._counts.settled(self._claims.settle(list(names)))

    def give_back(self, names: Collection[str]) -> None:
        """Nothing was marked: it is free."""

    def hold(self, reasons: Mapping[str, Reason]) -> None:
        """Have what is tried apart left alone by `take`."""
        self._claims.hold(reasons)

    def take_held(self, names: Sequence[str]) -> Mapping[str, Publishable | None]:
        """Take what is held for a trial; None stands for what was discarded or settled."""
        found = self._claims.take_held(self._number, names, self._shards.mine(self._number))
        if found is None:
            self.is_lost = True
            return {}
        return {name: found.get(name) for name in names}

    def put_back(self, names: Collection[str]) -> None:
        """A trial is over."""
        self._claims.put_back(names, self._shards.mine(self._number))


__all__ = ["SqlBacklog"]
