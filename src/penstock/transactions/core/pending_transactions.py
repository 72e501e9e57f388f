"""What is pending in one half partition: by id, by decision, by payload, by the logs that hold it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from penstock.transactions.core.checkpoints import LogPlaces
from penstock.transactions.core.payloads import Payloads
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.queue import ReadyQueue
from penstock.transactions.wire.done_records import Note
from penstock.transactions.wire.half import Half


class PendingTransactions:
    """The transactions of one half partition that are not settled, indexed. One thread drives it."""

    def __init__(self) -> None:
        #: All of them, by id, in the order of the half log.
        self.pending: OrderedDict[str, Pending] = OrderedDict()
        #: Those of them that have a decision.
        self.queue = ReadyQueue()
        #: Those that a snapshot says to be decided, until that op is read again: its place tells their turn.
        self.unread: dict[str, Pending] = {}
        #: Those with a count of answered checks that is not in the done log yet.
        self.answered: dict[str, Pending] = {}
        #: Which logs hold them.
        self.places = LogPlaces()
        #: Which payloads are in memory.
        self.payloads = Payloads(self.pending, self.queue, self.places.at_risk)

    @property
    def decided(self) -> Mapping[str, Pending]:
        """Pending transactions that have a decision, in the order in which the decisions took effect."""
        return self.queue.all

    @property
    def only_in_half_log(self) -> Iterable[Pending]:
        """Pending transactions that are in the half log alone, lowest first."""
        return self.places.only_in_half_log.values()

    @property
    def snapshotted(self) -> Iterable[Pending]:
        """Pending transactions with a snapshot in the done log, in the order of the snapshots."""
        return self.places.snapshotted.values()

    def lose(self, some: Iterable[Pending]) -> list[Pending]:
        """Forget those whose payloads are not in memory, for they are not in the logs either; return them."""
        lost = [pending for pending in some if pending.dropped is not None]
        for pending in lost:
            self._forget(pending)
        return lost

    @property
    def has_work(self) -> bool:
        """Whether there is something to publish or to write down, apart from what waits."""
        return bool(self.answered) or self.queue.ready > 0

    def _keep(self, pending: Pending) -> None:
        half = pending.half
        self.pending[half.transaction_id] = pending
        self.payloads.add(pending)
        if (line := half.line) is not None:
            self.queue.keys.add(line, pending)

    def _forget(self, pending: Pending) -> None:
        transaction_id = pending.half.transaction_id
        del self.pending[transaction_id]
        self.payloads.forget(pending)
        if self.answered:
            self.answered.pop(transaction_id, None)
        self.places.forget(pending)
        self.unread.pop(transaction_id, None)
        self.queue.forget(pending)

    def _is_noted(self, note: Note) -> None:
        """Take in that the done log has a count of answered checks; one that grew since has to be written anew."""
        pending = self.answered.get(note.transaction_id)
        if pending is not None and pending.check_count == note.check_count:
            del self.answered[note.transaction_id]

    def load(self, transaction_id: str, halves: Sequence[tuple[int, Half]], place: int | None = None) -> Pending | None:
        """Take in the payload of a transaction, which was read again: its halves, by their offsets in the half log.

        `place` is the offset of its snapshot in the done log, if they were read there. Returns the transaction; None
        where it is settled, or was in memory, or the halves are not its own.
        """
        pending = self.pending.get(transaction_id)
        if pending is None or not pending.load(halves):
            return None
        if place is not None and pending.snapshot_at is not None:
            pending.snapshot_at = max(pending.snapshot_at, place)
        self.payloads.take_in(pending)
        return pending
