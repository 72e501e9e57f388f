"""The backlog of one shard: what its relay takes from the store, and gives back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.transactions.stores.relay.publishable import Publishable


class Reason(NamedTuple):
    """Why a transaction is held."""

    #: In words, for operators: the broker's reason.
    why: str
    #: The name of the one before it in its key that it waits for; None where it was refused itself.
    behind: str | None = None


class ShardBacklog(Protocol):
    """What a shard of a store holds, as its relay needs it. Used by one thread; a name is that of the done log."""

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

    def take(self, limit: int, room_bytes: int) -> Sequence[Publishable]:
        """Return what to publish next with the others, in its order; nothing that was held is among it.

        It is `limit` transactions and `room_bytes` of messages at most, about; a single one may be larger.
        """

    def wants_visible(self, entries: Sequence[Publishable]) -> bool:
        """Tell whether it is waited for until a committed reader can see one of them."""

    def published(self, names: Collection[str]) -> None:
        """Mark as settled what is published. Some may be so already, or unknown."""

    def give_back(self, names: Collection[str]) -> None:
        """Take back what `take` returned and is not published: it is free."""

    def hold(self, reasons: Mapping[str, Reason]) -> None:
        """Keep what `take` returned for trials, or note why it is kept."""

    def release(self, names: Collection[str]) -> None:
        """Let `take` return what was held: it goes with the others again."""

    def take_held(self, names: Sequence[str]) -> Mapping[str, Publishable | None]:
        """Return what is held, for a trial; until `put_back` or `published` nobody decides it in another way.

        None stands for what is not held any more. What is missing here is busy: it is asked for again.
        """

    def put_back(self, names: Collection[str]) -> None:
        """A trial is over: what it had is held again."""
