"""A shard of a store outside Kafka, as a backlog of the engine, with the queue that all stores have.

The store has the messages, and judges what is decided and due. What it gives is in the queue until it is settled; what
is set aside leaves its messages in the store. What is to be noted there is noted by `flush`, in its order: where the
store fails for a moment, nothing is lost but time, and nothing is taken from it before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.transactions.core.commit_batch import DecidedBatch
from penstock.transactions.core.delays import Delays
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.quarantine import TargetQuarantine
from penstock.transactions.core.queue import ReadyQueue
from penstock.transactions.core.set_aside import SetAside
from penstock.transactions.publishing.backlog import Addressed, Blocking
from penstock.transactions.stores.relay.done_log import DoneRead, encode_ids
from penstock.transactions.stores.relay.shards import ShardBacklog
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

#: Ids in one record of the done log: an eighth of a megabyte.
_IDS_PER_RECORD = 8_000


def decided(
    halves: Sequence[Half], verdict: Verdict, author: Author | None, check_count: int, done_name: str = ""
) -> Pending:
    """Return a transaction that a store has decided, COMMIT or DISCARD, and whose time has come.

    `done_name` is its name in the done log; empty: its id.
    """
    first, *others = halves
    if first.deliver_at_ms is not None and verdict is Verdict.COMMIT:
        first = first._replace(deliver_at_ms=None)
    pending = Pending(first._replace(part=(1, len(halves))) if others else first, 0)
    for offset, half in enumerate(others, 1):
        pending.add_part(offset, half._replace(part=(offset + 1, len(halves))))
    pending.verdict, pending.author = verdict, author
    if check_count:
        pending.check_count = check_count
    if done_name and done_name != first.transaction_id:
        pending.done_name = done_name
    return pending


@dataclass(slots=True)
class StoredBatch(DecidedBatch):
    """What one Kafka transaction settles of a shard."""

    is_watched: bool = False

    @property
    def names(self) -> list[str]:
        """Its names in the done log."""
        return [pending.done_name or pending.half.transaction_id for pending in self.decided]

    def records(self) -> Iterator[bytes]:
        """Yield what is written into the done log."""
        names = self.names
        return (encode_ids(names[at : at + _IDS_PER_RECORD]) for at in range(0, len(names), _IDS_PER_RECORD))


class StoredBacklog:
    """One shard. Used by the coordinator's thread; what it asks of the store, and `flush`, raise as the store does.

    `found` is what the done log said when the shard was taken over; `discarded` is the topic of what is discarded.
    """

    def __init__(self, shard: ShardBacklog, quarantine: TargetQuarantine, found: DoneRead, discarded: str) -> None:
        self._shard = shard
        self._quarantine = quarantine
        self._discarded = discarded
        self._to_discarded: Sequence[Addressed] = (Half("", "", discarded, None, None, None, (), None),)
        self._queue = ReadyQueue(Delays(), self._let_go)
        # What the choice under way sets aside, and the store does not know to be held.
        self._stopped: list[Pending] = []
        #: Below it, all of the done log is settled, save for what is under way.
        self.done_end = found.end
        # By topic, why what waits for its sake waits, as the store knows it.
        self._explained: dict[str, str] = {}
        # What is to be noted in the store.
        self._notes: deque[Callable[[], object]] = deque([partial(shard.taken_over, sorted(found.ids))])

    @property
    def set_aside(self) -> SetAside:
        """What cannot be published with the others now."""
        return self._queue.set_aside

    @property
    def is_flushed(self) -> bool:
        """Whether the store knows all that was published."""
        return not self._notes

    def flush(self) -> None:
        """Note in the store what is to be noted."""
        while self._notes:
            self._notes[0]()
            self._notes.popleft()

    def next_batch(self, limit: int, blocking: Blocking, room_bytes: int) -> StoredBatch | None:
        """Take what can be published with others, and have the rest held."""
        if not self._queue.ready:
            for pending in self._shard.take(limit, room_bytes):
                self._enter(pending)

        def out(pending: Pending) -> str | None:
            if pending.verdict is Verdict.DISCARD:
                return self._discarded if pending.dropped is not None else blocking(self._to_discarded)
            # One whose messages are in the store is tried as what its target refused is.
            return blocking(pending.halves) or (None if pending.dropped is None else pending.half.topic)

        chosen = self._queue.choose(limit, out, room_bytes)
        stopped, self._stopped = self._stopped, []
        self._hold(stopped)
        return self._batch(list(chosen.values()))

    def _batch(self, chosen: list[Pending]) -> StoredBatch | None:
        if not chosen:
            return None
        return StoredBatch(chosen, discarded_to=self._discarded, is_watched=self._shard.wants_visible(chosen))

    def _enter(self, pending: Pending) -> None:
        """Take in what the store gave, which may be there already; one that was committed may be discarded since."""
        known = self._queue.all.get(pending.half.transaction_id)
        if known is not None:
            if known.verdict is pending.verdict:
                return
            self._queue.forget(known)
        if (line := pending.half.line) is not None:
            self._queue.keys.add(line, pending)
        self._queue.add(pending)

    def _let_go(self, pending: Pending) -> None:
        if pending.dropped is None:
            self._stopped.append(pending)

    def trial(
        self,
        waiting: Sequence[Pending],
        now: float,  # noqa: ARG002 - the store has its own
        fits: Callable[[Pending], bool],
    ) -> StoredBatch | None:
        """Take the first of what is set aside, up to one that the store does not give now, or that does not fit."""
        found = self._shard.take_held([pending.half.transaction_id for pending in waiting]) if waiting else {}
        chosen: list[Pending] = []
        for pending in waiting:
            name = pending.half.transaction_id
            stored = found.get(name)
            if not pending.held:
                # It stood behind one that is not held any more.
                continue
            if stored is not None and stored.verdict is pending.verdict:
                pending.load(list(zip(stored.offsets, stored.halves, strict=True)))
                if not fits(pending):
                    break
                chosen.append(pending)
            elif stored is not None:
                self._enter(stored)
            elif name in found:
                self._queue.forget(pending)
            else:
                break
        tried = set(chosen)
        self._hold([pending for pending in waiting if pending.held and pending not in tried])
        return self._batch(chosen)

    def began(self, batch: StoredBatch) -> None:
        """Note that it is under way; the store leaves what was taken alone."""
        for pending in batch.decided:
            pending.in_flight = True

    def settled(self, batch: StoredBatch, done_end: int | None) -> list[str]:
        """Have what was published settled in the store."""
        self.done_end = max(self.done_end, done_end or 0)
        return self._published(batch.decided)

    def failed(self, batch: StoredBatch) -> None:
        """Give back what was taken."""
        self._give_back(batch.decided)

    def learned(self, batch: StoredBatch, found: DoneRead) -> list[str]:
        """Settle what the done log has, and give the rest back."""
        self.done_end = max(self.done_end, found.end)
        known = [name in found.ids for name in batch.names]
        self._give_back([pending for pending, is_done in zip(batch.decided, known, strict=True) if not is_done])
        return self._published([pending for pending, is_done in zip(batch.decided, known, strict=True) if is_done])

    def release(self, topic: str, is_refused: Callable[[str], bool]) -> None:
        """Let what was set aside for a topic's sake go with the others, save what is refused."""
        self._queue.release(topic, is_refused)

    def explain(self) -> None:
        """Note why things wait, where the reason of their topic is another one by now."""
        for topic in self.set_aside.topics():
            why = self._why(topic)
            if self._explained.get(topic) != why:
                self._explained[topic] = why
                # What is being tried is held again when that ends.
                self._hold([pending for pending in self.set_aside.fronts(topic) if not pending.in_flight])

    def _published(self, some: Sequence[Pending]) -> list[str]:
        names = [pending.half.transaction_id for pending in some]
        for pending in some:
            self._queue.forget(pending)
        if names:
            self._notes.append(partial(self._shard.published, names))
        return names

    def _give_back(self, some: Iterable[Pending]) -> None:
        held = []
        for pending in some:
            pending.in_flight = False
            if pending.held:
                held.append(pending)
        self._hold(held)

    def _hold(self, some: Sequence[Pending]) -> None:
        """Note that these are held, and why; their messages stay in the store."""
        for pending in some:
            pending.drop()
        if some:
            reasons = {pending.half.transaction_id: self._reason(pending) for pending in some}
            self._notes.append(partial(self._shard.hold, reasons))

    def _reason(self, pending: Pending) -> str:
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
