"""The backlog of one shard: what its relay takes from the store, and gives back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from penstock.transactions.stores.relay.publishable import Publishable
from penstock.transactions.stores.relay.quarantine import Reason


class Backlog(Protocol):
    """What a shard of a store holds, as its relay needs it. Used by one thread; a name is that of the done log."""

    @property
    def is_lost(self) -> bool:
        """Whether the shard is another's by now."""

    def may_open(self) -> bool:
        """Make sure that the shard is still one's own: whoever publishes it now is shut out next."""

    def take(self) -> Sequence[Publishable]:
        """Return what to publish next on the main path, in its order; nothing that was held is among it."""

    def wants_visible(self, entries: Sequence[Publishable]) -> bool:
        """Tell whether it is waited for until a committed reader can see one of them."""

    def published(self, names: Collection[str]) -> None:
        """Mark as settled what is published. Some may be so already, or unknown."""

    def give_back(self, names: Collection[str]) -> None:
        """Take back what `take` returned and is not published: it is free."""

    def hold(self, reasons: Mapping[str, Reason]) -> None:
        """Keep what `take` returned for trials, or note why it is kept."""

    def take_held(self, names: Sequence[str]) -> Mapping[str, Publishable | None]:
        """Return what is held, for a trial; until `put_back` or `published` nobody decides it in another way.

        None stands for what is not held any more. What is missing here is busy: it is asked for again.
        """

    def put_back(self, names: Collection[str]) -> None:
        """A trial is over: what it had is held again."""
