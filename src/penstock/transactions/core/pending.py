"""A pending transaction: its halves, its decision if there is one, and its checks.

Pure. Most transactions have one half. A transaction of several messages has several halves, all in one half partition,
and can commit only when all of them are there. Payloads (keys, values and headers) may be dropped from memory and read
again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from penstock.transactions.wire.done_records import Note, Snapshot, StoredHalf
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

#: Bytes of a header in a snapshot besides its name and content; bytes of penstock's own fields, a generous estimate.
_HEADER_BYTES = 8
_FIELDS_BYTES = 1_000
#: Bytes of memory of a payload besides its content, a generous estimate.
OBJECT_BYTES = 200


def payload_of(half: Half) -> int:
    """Return the bytes of the key, the value and the headers of a half."""
    size = len(half.key or b"") + len(half.value or b"")
    if half.headers:
        size += sum(len(name) + len(content or b"") + _HEADER_BYTES for name, content in half.headers)
    return size


def size_of(half: Half) -> int:
    """Return the approximate bytes of a half in the done log, penstock's headers included."""
    return payload_of(half) + _FIELDS_BYTES


def without_payload(half: Half) -> Half:
    """Return a half without key, value and headers."""
    # Most halves share these texts: keep one copy of each.
    group, topic = sys.intern(half.group), sys.intern(half.topic)
    return half._replace(group=group, topic=topic, key=None, value=None, headers=())


def key_hashes(halves: Sequence[Half]) -> tuple[int, ...]:
    """Return a hash for each target and key, valid in this process. Messages with the same hash keep their order."""
    return tuple({hash((half.topic, half.key)) for half in halves if half.key is not None})


class Parts:
    """The halves of a transaction of several messages, as far as they were read."""

    __slots__ = ("_halves", "is_spoiled", "missing")

    def __init__(self, count: int) -> None:
        self._halves: list[tuple[int, Half] | None] = [None] * count
        #: How many were not read yet.
        self.missing = count
        #: Whether a half contradicted the others. Nobody knows which are true, so the transaction cannot be published.
        self.is_spoiled = False

    def add(self, offset: int, half: Half) -> bool:
        """Add a half. Tell whether it fits the others."""
        number, count = half.part or (0, 0)
        if count != len(self._halves) or self._halves[number - 1] is not None:
            self.is_spoiled = True
            return False
        self._halves[number - 1] = (offset, half)
        self.missing -= 1
        return True

    def replace(self, halves: Sequence[Half]) -> None:
        """Replace the halves that are there, in the order of the parts."""
        places = [(number, stored[0]) for number, stored in enumerate(self._halves) if stored is not None]
        for (number, offset), half in zip(places, halves, strict=True):
            self._halves[number] = offset, half

    def stored(self) -> list[tuple[int, Half]]:
        """Return offsets and halves, in the order of the parts."""
        return [stored for stored in self._halves if stored is not None]


class Pending:
    """A transaction that is not settled. Used by the coordinator's thread.

    Nearly all are decided and settled within moments. Attributes that only the others need have defaults on the class.
    An object gets a `__dict__` for them when the first one changes.
    """

    __slots__ = (
        "__dict__",
        "author",
        "birth_ms",
        "check_due",
        "decided_at",
        "decided_index",
        "half",
        "in_flight",
        "is_op_open",
        "last_offset",
        "offset",
        "parts",
        "payload_bytes",
        "sequence",
        "transaction_id",
        "verdict",
    )

    #: Answered checks, and the append time of the last answer in milliseconds.
    check_count: int = 0
    answered_ms: int = 0
    #: Place of that answer in the op log. Answers at or below it were judged before.
    answered_at: tuple[int, int] = (-1, 0)
    #: Number of the last check that was sent; 0 if there was none.
    requested: int = 0
    #: How many checks this coordinator has sent. Each attempt goes to another producer.
    attempts: int = 0
    #: Whether it is set aside: it cannot be published with the others now, or stays behind one that cannot.
    held: bool = False
    #: The done log holds its snapshot at or above this offset. None: only the half log holds it.
    snapshot_at: int | None = None
    #: Its name in the done log of a store outside Kafka; empty if that is its id.
    done_name: str = ""
    #: What `keys` was before its payloads were dropped from memory. None: they are in memory.
    dropped: tuple[int, ...] | None = None
    #: Whether the publisher itself reads dropped payloads: then it need not wait for them.
    is_at_hand: bool = False

    def __init__(self, half: Half, offset: int, birth_ms: int = 0) -> None:
        #: The id of all its halves.
        self.transaction_id = half.transaction_id
        #: The half that was read first.
        self.half = half
        #: Lowest offset of its halves.
        self.offset = offset
        #: Highest offset of a half record with its id, refused ones included.
        self.last_offset = offset
        #: The first decision, or None.
        self.verdict: Verdict | None = None
        #: Who decided. None if it is undecided, or if the decision comes from the done log, which names no author.
        self.author: Author | None = None
        #: Place of the decision: offset of the op record, and index in it.
        self.decided_at = -1
        self.decided_index = 0
        #: Whether that record is still needed: until the transaction is settled, or a snapshot has the decision.
        self.is_op_open = False
        #: When the next check is due, in the broker's seconds.
        self.check_due = 0.0
        #: Whether a Kafka transaction that settles it, or writes its snapshot, is under way.
        self.in_flight = False
        #: Its place among the decided transactions that became ready.
        self.sequence = 0
        #: Append time of its first half in milliseconds, by the broker's clock.
        self.birth_ms = birth_ms
        #: Bytes of its payloads, in memory or not: about their size in the client's buffer.
        self.payload_bytes = payload_of(half)
        #: Its halves, if it is a transaction of several messages.
        self.parts: Parts | None = None
        if half.part is not None:
            self.parts = Parts(half.part[1])
            self.parts.add(offset, half)

    @property
    def group(self) -> str:
        """The producer group of its halves."""
        return self.half.group

    @property
    def halves(self) -> Sequence[Half]:
        """Its halves, in the order of the parts."""
        if self.parts is None:
            return (self.half,)
        return [half for _, half in self.parts.stored()]

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offsets of its halves, in the order of the parts."""
        if self.parts is None:
            return (self.offset,)
        return tuple(offset for offset, _ in self.parts.stored())

    @property
    def size_bytes(self) -> int:
        """Approximate bytes of its halves in the done log, penstock's headers included."""
        return self.payload_bytes + _FIELDS_BYTES * len(self.halves)

    @property
    def held_bytes(self) -> int:
        """Approximate bytes of memory of its payloads while they are in memory."""
        return self.payload_bytes + OBJECT_BYTES

    @property
    def keys(self) -> tuple[int, ...]:
        """The `key_hashes` of its halves."""
        return key_hashes(self.halves) if self.dropped is None else self.dropped

    @property
    def addressed(self) -> Sequence[Half]:
        """The messages for their targets: none if it is rolled back or discarded."""
        return self.halves if self.verdict is Verdict.COMMIT else ()

    @property
    def topics(self) -> tuple[str, ...]:
        """The targets of its messages."""
        return tuple(dict.fromkeys(half.topic for half in self.addressed))

    @property
    def places(self) -> tuple[int, ...]:
        """Its lines while it is set aside. A discarded transaction has no order, so it has none."""
        return self.keys if self.verdict is Verdict.COMMIT else ()

    def partitions_wanted(self, topic: str) -> int:
        """Return the least number of partitions that a target must have; 0 if no message goes there."""
        wanted = (1 if half.partition is None else half.partition + 1 for half in self.addressed if half.topic == topic)
        return max(wanted, default=0)

    def drop(self) -> None:
        """Drop its payloads from memory. They can be read again from its log."""
        if self.dropped is None:
            self.dropped = self.keys
            self._replace([without_payload(half) for half in self.halves])

    def load(self, halves: Sequence[tuple[int, Half]]) -> bool:
        """Put back payloads that were read again, by offset. Tell whether they are its own."""
        found = dict(halves)
        own = [found.get(offset) for offset in self.offsets]
        valid = [half for half in own if half is not None and half.transaction_id == self.transaction_id]
        if self.dropped is None or len(valid) != len(own):
            return False
        self._replace(valid)
        self.dropped = None
        return True

    def _replace(self, halves: Sequence[Half]) -> None:
        if self.parts is None:
            self.half = halves[0]
        else:
            self.half = halves[self.offsets.index(self.offset)]
            self.parts.replace(halves)

    @property
    def is_complete(self) -> bool:
        """Whether all its halves are there and fit together."""
        return self.parts is None or (not self.parts.missing and not self.parts.is_spoiled)

    def add_part(self, offset: int, half: Half) -> bool:
        """Add another half with its id. Tell whether it belongs to this transaction."""
        self.last_offset = max(self.last_offset, offset)
        if self.parts is None or self.verdict is not None:
            return False
        if half.group != self.half.group:
            self.parts.is_spoiled = True
            return False
        if not self.parts.add(offset, half if self.dropped is None else without_payload(half)):
            return False
        self.payload_bytes += payload_of(half)
        if self.dropped is not None:
            self.dropped += key_hashes((half,))
        return True

    def count(self) -> Note:
        """Return the note of its answered checks. It does not end the transaction, even if that is decided."""
        checks = self.check_count, self.answered_ms
        return Note(self.transaction_id, self.last_offset, Verdict.UNKNOWN, *checks, *self.answered_at)

    def remember_checks(self, note: Note) -> None:
        """Load its answered checks from a note."""
        self.check_count = self.requested = note.check_count
        self.answered_ms = note.answered_ms
        if note.verdict is Verdict.UNKNOWN:
            self.answered_at = note.op_offset, note.op_index

    def note(self) -> Note:
        """Return the note of its end, or of its checks while it is undecided."""
        if self.verdict is None:
            return self.count()
        checks, answered_ms, at, index = self.check_count, self.answered_ms, self.decided_at, self.decided_index
        fields = (self.transaction_id, self.last_offset, self.verdict, checks, answered_ms, at, index)
        # The same as `Note(...)` in half the time: thousands are made a second.
        return tuple.__new__(Note, fields)

    def snapshot(self) -> Snapshot:
        """Return its snapshot for the done log: its note and its halves."""
        stored = zip(self.offsets, self.halves, strict=True)
        return Snapshot(self.note(), tuple(StoredHalf(offset, self.birth_ms, half) for offset, half in stored))
