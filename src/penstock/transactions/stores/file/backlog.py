"""A file store as its relay sees it. Used by the coordinator's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from penstock.transactions.stores.file.ledger import Kept
from penstock.transactions.stores.file.opened import OpenStore
from penstock.transactions.stores.file.outgoing import name_of, publishable
from penstock.transactions.stores.relay.publishable import Publishable
from penstock.transactions.stores.relay.quarantine import Reason

#: Transactions in one Kafka transaction, at most.
_GROUP = 1_000


class FileBacklog:
    """What a file store holds.

    Args:
        opened: the store.
        discarded: the topic of those that nobody could decide.
        settle: has the transactions of some ids settled, durably some time later.
    """

    def __init__(self, opened: OpenStore, discarded: str, settle: Callable[[Sequence[str]], None]) -> None:
        self._opened = opened
        self._discarded = discarded
        self._settle = settle
        # What the relay has, by the name that it has it by.
        self._taken: dict[str, Kept] = {}

    def may_open(self) -> bool:
        """Say yes: the store has one coordinator."""
        return True

    def take(self) -> Sequence[Publishable]:
        """Return what to publish next."""
        opened = self._opened
        with opened.lock:
            share = opened.shelf.take(int(time.time() * 1000), _GROUP)
        entries = [publishable(kept, opened.halves(kept), self._discarded) for kept in share]
        self._taken.update((entry.transaction_id, kept) for entry, kept in zip(entries, share, strict=True))
        return entries

    def is_watched(self, entries: Iterable[Publishable]) -> bool:
        """Tell whether somebody waits for the settling of one of them."""
        return self._opened.is_watched([self._taken[entry.transaction_id] for entry in entries])

    def published(self, names: Collection[str]) -> None:
        """Settle what is published, and tell who waits for it."""
        opened, kept = self._opened, [self._taken.pop(name, None) for name in names]
        found = [one for one in kept if one is not None]
        if len(found) < len(names):
            # What a former coordinator published, and much that is settled.
            wanted = set(names)
            with opened.lock:
                waiting = [one for one in opened.kept.values() if one.verdict is not None and not one.settled]
            found += [one for one in waiting if name_of(one) in wanted and one not in found]
        found = sorted((one for one in found if not one.settled), key=lambda one: one.decided)
        told = opened.published(found)
        if found:
            self._settle([one.transaction_id for one in found])
        for watch, verdict in told:
            watch(verdict)

    def give_back(self, names: Collection[str]) -> None:
        """Take back what was not published."""
        with self._opened.lock:
            for name in names:
                kept = self._taken.pop(name, None)
                if kept is not None and not kept.settled:
                    self._opened.shelf.give_back(kept)

    def hold(self, reasons: Mapping[str, Reason]) -> None:
        """Keep what was taken for trials."""
        with self._opened.lock:
            for name, reason in reasons.items():
                kept = self._taken.get(name)
                if kept is not None:
                    self._opened.shelf.hold(kept, reason)

    def take_held(self, names: Sequence[str]) -> Mapping[str, Publishable | None]:
        """Take what is held for a trial."""
        opened = self._opened
        found: dict[str, Publishable | None] = {}
        tried: list[Kept] = []
        with opened.lock:
            for name in names:
                kept = self._taken.get(name)
                if kept is None or kept.settled or name_of(kept) != name:
                    # Discarded, and perhaps settled as such.
                    found[name] = None
                    self._taken.pop(name, None)
                elif opened.shelf.try_held(kept):
                    tried.append(kept)
        for kept in tried:
            entry = publishable(kept, opened.halves(kept), self._discarded)
            found[entry.transaction_id] = entry
        return found

    def put_back(self, names: Collection[str]) -> None:
        """A trial is over."""
        with self._opened.lock:
            for name in names:
                kept = self._taken.get(name)
                if kept is not None:
                    self._opened.shelf.put_back(kept)


__all__ = ["FileBacklog"]
