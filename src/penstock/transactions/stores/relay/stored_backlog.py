"""A shard of a store outside Kafka, as a backlog of the engine: the store has the messages, this what is set aside.

What is to be noted in the store is noted by `flush`, in its order: where the store fails for a moment, nothing is lost
but time, and nothing is taken from it before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from typing import NamedTuple

from penstock.transactions.core.quarantine import TargetQuarantine
from penstock.transactions.core.set_aside import SetAside
from penstock.transactions.publishing.backlog import Blocking
from penstock.transactions.stores.relay.done_log import DoneRead, encode_ids
from penstock.transactions.stores.relay.publishable import OutboundMessage, Publishable
from penstock.transactions.stores.relay.shards import ShardBacklog

#: Ids in one record of the done log: an eighth of a megabyte.
_IDS_PER_RECORD = 8_000
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """What one Kafka transaction settles of a shard.

    Attributes:
        is_trial: whether it was set aside, and is tried apart.
    """

    decided: Sequence[Publishable]
    is_watched: bool
    is_trial: bool

    @property
    def names(self) -> list[str]:
        """Its names in the done log."""
        return [entry.transaction_id for entry in self.decided]

    def topics(self) -> set[str]:
        """Return the topics that it publishes to."""
        return {message.topic for entry in self.decided for message in entry.messages}

    def messages(self) -> Iterator[tuple[str, Sequence[OutboundMessage]]]:
        """Yield what is published, by transaction."""
        return ((entry.transaction_id, entry.messages) for entry in self.decided)

    def records(self) -> Iterator[bytes]:
        """Yield what is written into the done log."""
        names = self.names
        return (encode_ids(names[at : at + _IDS_PER_RECORD]) for at in range(0, len(names), _IDS_PER_RECORD))


class _Taken(NamedTuple):
    """A transaction that was taken: the places that it stands in, and its place among all that were."""

    places: tuple[int, ...]
    order: int


@dataclass(slots=True, eq=False)
class _Waiting:
    """A transaction that is set aside. Its messages stay in the store."""

    transaction_id: str
    places: tuple[int, ...]
    addresses: tuple[tuple[str, int | None], ...]
    order: int
    held: bool = False
    in_flight: bool = False

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(topic for topic, _ in self.addresses))

    def partitions_wanted(self, topic: str) -> int:
        wanted = (1 if number is None else number + 1 for name, number in self.addresses if name == topic)
        return max(wanted, default=0)


class StoredBacklog:
    """One shard. Used by the coordinator's thread; what it asks of the store, and `flush`, raise as the store does.

    `found` is what the done log said when the shard was taken over.
    """

    def __init__(self, shard: ShardBacklog, quarantine: TargetQuarantine, found: DoneRead) -> None:
        self._shard = shard
        self._quarantine = quarantine
        self.set_aside = SetAside[_Waiting]()
        self._waiting: dict[str, _Waiting] = {}
        self._orders = count()
        #: Below it, all of the done log is settled, save for what is under way.
        self.done_end = found.end
        # What was taken to go with the others, and is not settled or set aside: a later one that shares a place with
        # it must not be tried before.
        self._taken: dict[str, _Taken] = {}
        # By topic, why what waits for its sake waits, as the store knows it.
        self._explained: dict[str, str] = {}
        # What is to be noted in the store.
        self._notes: deque[Callable[[], object]] = deque()
        if found.ids:
            self._notes.append(partial(shard.published, sorted(found.ids)))

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
        go: list[Publishable] = []
        stopped: list[_Waiting] = []
        for entry in self._shard.take(limit, room_bytes):
            waiting = self._waiting.get(entry.transaction_id)
            if waiting is None:
                topic, taken = blocking(entry.messages), self._note(entry)
                if topic is None and not self.set_aside.is_behind(taken):
                    go.append(entry)
                    continue
                waiting = self._put_aside(entry, taken, topic)
            stopped.append(waiting)
        self._hold(stopped)
        return StoredBatch(go, self._shard.wants_visible(go), is_trial=False) if go else None

    def _note(self, entry: Publishable) -> _Taken:
        taken = self._taken.get(entry.transaction_id)
        if taken is None:
            taken = self._taken[entry.transaction_id] = _Taken(entry.places, next(self._orders))
        return taken

    def _first_taken(self) -> Callable[[int], float]:
        """Return what tells, of a place, the order of the first that was taken there."""
        first: dict[int, float] = {}
        for taken in self._taken.values():
            for place in taken.places:
                first[place] = min(taken.order, first.get(place, _NEVER))
        return lambda place: first.get(place, _NEVER)

    def _put_aside(self, entry: Publishable, taken: _Taken, topic: str | None) -> _Waiting:
        addresses = tuple((message.topic, message.partition) for message in entry.messages)
        del self._taken[entry.transaction_id]
        waiting = _Waiting(entry.transaction_id, taken.places, addresses, taken.order)
        self._waiting[waiting.transaction_id] = waiting
        self.set_aside.add(waiting, topic)
        return waiting

    def trial(
        self,
        waiting: Sequence[_Waiting],
        now: float,  # noqa: ARG002 - the store has its own
        fits: Callable[[Publishable], bool],
    ) -> StoredBatch | None:
        """Take the first of what is set aside, up to one that the store does not give now, or that does not fit."""
        first_taken = self._first_taken()
        waiting = list(takewhile(lambda held: held.order < min(map(first_taken, held.places), default=_NEVER), waiting))
        found = self._shard.take_held([held.transaction_id for held in waiting]) if waiting else {}
        # Discarded, and perhaps settled as such.
        self._remove(name for name, entry in found.items() if entry is None)
        chosen: list[Publishable] = []
        for held in waiting:
            if held.transaction_id not in self.set_aside:
                continue
            entry = found.get(held.transaction_id)
            if entry is None:
                break
            if not fits(entry):
                self._hold([held])
                break
            chosen.append(entry)
        batch = StoredBatch(chosen, bool(chosen) and self._shard.wants_visible(chosen), is_trial=True)
        left = {name for name, entry in found.items() if entry is not None}.difference(batch.names)
        if left:
            self._notes.append(partial(self._shard.put_back, left))
        return batch if chosen else None

    def began(self, batch: StoredBatch) -> None:
        """Note that it is under way; the store leaves what was taken alone."""
        self._mark(batch, in_flight=True)

    def settled(self, batch: StoredBatch, done_end: int | None) -> list[str]:
        """Have what was published settled in the store."""
        self.done_end = max(self.done_end, done_end or 0)
        return self._published(batch, batch.names)

    def failed(self, batch: StoredBatch) -> None:
        """Give back what was taken."""
        self._give_back(batch, batch.names)

    def learned(self, batch: StoredBatch, found: DoneRead) -> list[str]:
        """Settle what the done log has, and give the rest back."""
        self.done_end = max(self.done_end, found.end)
        self._give_back(batch, [name for name in batch.names if name not in found.ids])
        return self._published(batch, [name for name in batch.names if name in found.ids])

    def release(self, topic: str, is_refused: Callable[[str], bool]) -> None:
        """Let what was set aside for a topic's sake go with the others, save what is refused."""
        self._let_go(self.set_aside.release(topic, lambda waiting: is_refused(waiting.transaction_id)))

    def explain(self) -> None:
        """Note why things wait, where the reason of their topic is another one by now."""
        for topic in self.set_aside.topics():
            why = self._why(topic)
            if self._explained.get(topic) != why:
                self._explained[topic] = why
                self._hold(list(self.set_aside.fronts(topic)))

    def _published(self, batch: StoredBatch, names: list[str]) -> list[str]:
        self._mark(batch, in_flight=False)
        if not names:
            return []
        self._notes.append(partial(self._shard.published, names))
        discarded = [entry.discards for entry in batch.decided if entry.discards and entry.transaction_id in names]
        for name in (*names, *discarded):
            self._taken.pop(name, None)
        if self._waiting:
            self._remove((*names, *discarded))
        return names + discarded

    def _give_back(self, batch: StoredBatch, names: list[str]) -> None:
        self._mark(batch, in_flight=False)
        if not names:
            return
        self._notes.append(partial(self._shard.put_back if batch.is_trial else self._shard.release, names))
        self._hold([waiting for name in names if (waiting := self._waiting.get(name)) is not None])

    def _mark(self, batch: StoredBatch, *, in_flight: bool) -> None:
        for name in batch.names if batch.is_trial else ():
            waiting = self._waiting.get(name)
            if waiting is not None:
                waiting.in_flight = in_flight

    def _remove(self, names: Iterable[str]) -> None:
        """Take out what waits no longer: what only stood behind it goes with the others again."""
        freed: list[_Waiting] = []
        for name in list(names):
            waiting = self._waiting.pop(name, None)
            if waiting is not None:
                freed += self.set_aside.remove(waiting)
        self._let_go(freed)

    def _let_go(self, freed: Sequence[_Waiting]) -> None:
        for waiting in freed:
            del self._waiting[waiting.transaction_id]
            # It comes again with the next take, and keeps its place until then.
            self._taken[waiting.transaction_id] = _Taken(waiting.places, waiting.order)
        if freed:
            self._notes.append(partial(self._shard.release, [waiting.transaction_id for waiting in freed]))

    def _hold(self, some: Sequence[_Waiting]) -> None:
        if some:
            reasons = {waiting.transaction_id: self._reason(waiting) for waiting in some}
            self._notes.append(partial(self._shard.hold, reasons))

    def _reason(self, waiting: _Waiting) -> str:
        refused = self._quarantine.why_refused(waiting.transaction_id)
        if refused is not None:
            return refused
        before = self.set_aside.behind(waiting)
        if before is None:
            return self._why(self.set_aside.topic(waiting.transaction_id) or "")
        why = self._quarantine.why_refused(before.transaction_id) or "which waits, too"
        return f"transaction {before.transaction_id}, before it in its key: {why}"

    def _why(self, topic: str) -> str:
        return f"{topic}: {self._quarantine.why(topic) or 'it is not known yet'}"
