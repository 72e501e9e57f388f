"""A batch: messages that are handed over in one call, with what they were fetched with."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from penstock.consumer.assignments import ConsumerRun, Fetch, Item
from penstock.consumer.lanes.admission import Admission
from penstock.message import Message, Record


class Batch:
    """Messages in the order in which they are handed over.

    Kept by stretches: as a rule a batch is made of them and completed by them, with no step for a message alone.
    `key in batch` tells whether there is a message of that key.
    """

    __slots__ = ("_keys", "_stretches", "_unkeyed", "messages", "records")

    def __init__(self) -> None:
        #: What the handler is given. It may change the list.
        self.messages: list[Message] = []
        self.records: list[Record] = []
        # Messages in a row that were fetched together: the fetch, and their places in its block.
        self._stretches: list[tuple[Fetch, list[int]]] = []
        # The keys of the messages, save those of stretches that nobody has asked for yet.
        self._keys: set[Hashable] = set()
        self._unkeyed: list[tuple[Fetch, list[int], list[Record]]] = []

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, key: object) -> bool:
        while self._unkeyed:
            fetch, indexes, records = self._unkeyed.pop()
            # Its indexes may go on with messages that were added one by one.
            self._keys.update(Admission.identity((fetch, *place)) for place in zip(indexes, records, strict=False))
        return key in self._keys

    def add_stretch(self, run: ConsumerRun, messages: Sequence[Message]) -> None:
        """Add the next messages of a run, as they were prepared, and move the run on."""
        first, stop = run.next, run.next + len(messages)
        if first == stop:
            return
        indexes, records = run.indexes[first:stop], run.records[first:stop]
        self._stretches.append((run.owner, indexes))
        self._unkeyed.append((run.owner, indexes, records))
        self.messages += messages
        self.records += records
        run.next = stop

    def add(self, key: Hashable, item: Item, message: Message) -> None:
        """Add a message of a key."""
        fetch, index, record = item
        if self._stretches and self._stretches[-1][0] is fetch:
            self._stretches[-1][1].append(index)
        else:
            self._stretches.append((fetch, [index]))
        self._keys.add(key)
        self.messages.append(message)
        self.records.append(record)

    @property
    def fetches(self) -> list[Fetch]:
        """What the messages were fetched with."""
        return [fetch for fetch, _ in self._stretches]

    def items(self) -> Iterator[Item]:
        """Yield the messages as items."""
        records = iter(self.records)
        for fetch, indexes in self._stretches:
            for index in indexes:
                yield fetch, index, next(records)

    def of_active(self) -> Batch:
        """Return the messages of assignments that are active."""
        left = Batch()
        for item, message in zip(self.items(), self.messages, strict=True):
            if item[0].assignment.active:
                left.add(Admission.identity(item), item, message)
        return left

    def complete(self) -> None:
        """Complete all messages."""
        for fetch, indexes in self._stretches:
            fetch.assignment.tracker.complete(fetch.block, indexes)
