"""A transaction that is not settled: its halves, its decision if there is one, and its checks.

Pure. Most transactions have one half. One of several messages has several, all in one half partition, and can commit
only when all of them are there. Their payloads (keys, values and headers) may be dropped from memory and read again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from penstock.transactions.wire.done_records import Note, Snapshot, SnapshotHalf
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Op, Verdict

#: What a snapshotted header takes beside its name and content; what penstock's own fields take, generously.
_HEADER_BYTES = 8
_FIELDS_BYTES = 1_000
#: What payloads take in memory beside their content, generously.
OBJECT_BYTES = 200


def payload_of(half: Half) -> int:
    """Return the bytes of the key, the value and the headers of a half."""
    size = len(half.key or b"") + len(half.value or b"")
    if half.headers:
        size += sum(len(name) + len(content or b"") + _HEADER_BYTES for name, content in half.headers)
    return size


def size_of(half: Half) -> int:
    """Return the bytes of a half, headers included, about as the done log would hold it."""
    return payload_of(half) + _FIELDS_BYTES


def without_payload(half: Half) -> Half:
    """Return a half without key, value and headers, as it stays in memory."""
    # Texts that most halves share are there once.
    group, topic = sys.intern(half.group), sys.intern(half.topic)
    return half._replace(group=group, topic=topic, key=None, value=None, headers=())


def key_hashes(halves: Sequence[Half]) -> tuple[int, ...]:
    """Return a number for each key and its target, good within this process: what shares one may not be reordered."""
    return tuple({hash((half.topic, half.key)) for half in halves if half.key is not None})


class Parts:
    """The halves of a transaction of several messages, as far as they were read."""

    __slots__ = ("_halves", "is_spoiled", "missing")

    def __init__(self, count: int) -> None:
        self._halves: list[tuple[int, Half] | None] = [None] * count
        #: How many were not read yet.
        self.missing = count
        #: A half contradicted the others: which of them are true is not known, so nothing of it may be published.
        self.is_spoiled = False

    def add(self, offset: int, half: Half) -> bool:
        """Take a half in, and tell whether it fits the others."""
        number, count = half.part or (0, 0)
        if count != len(self._halves) or self._halves[number - 1] is not None:
            self.is_spoiled = True
            return False
        self._halves[number - 1] = (offset, half)
        self.missing -= 1
        return True

    def replace(self, halves: Sequence[Half]) -> None:
        """Put others in the place of those that are there, in the order of the parts."""
        places = [(number, stored[0]) for number, stored in enumerate(self._halves) if stored is not None]
        for (number, offset), half in zip(places, halves, strict=True):
            self._halves[number] = offset, half

    def stored(self) -> list[tuple[int, Half]]:
        """Return offsets and halves, in the order of the parts."""
        return [stored for stored in self._halves if stored is not None]


class Pending:
    """A transaction that is not settled. Used by the coordinator's thread.

    Nearly all are decided and settled within moments. What only the others need stands on the class, and on an object
    of its own (its `__dict__`, made then) once it differs.
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
        "verdict",
    )

    #: Answered checks, and the append time of the last answer in milliseconds.
    check_count: int = 0
    answered_ms: int = 0
    #: Place of that answer: what lies at or below it was judged before.
    answered_at: tuple[int, int] = (-1, 0)
    #: Number of the check that was asked last; 0 when none was.
    requested: int = 0
    #: How often its producers were asked since this coordinator has it: each time another one is.
    attempts: int = 0
    #: It cannot be published with the others now, or stands behind one that cannot: it is set aside.
    held: bool = False
    #: The done log holds it whole at or above this offset; None: only the half log does.
    snapshot_at: int | None = None
    #: Its name in the done log of a store outside Kafka, where that is not its id.
    done_name: str = ""
    #: None: its payloads are in memory. Else they are not, its halves have none, and this is what `keys` was.
    dropped: tuple[int, ...] | None = None
    #: Whoever publishes it reads payloads that are not in memory then: nothing waits for them.
    is_at_hand: bool = False

    def __init__(self, half: Half, offset: int, birth_ms: int = 0) -> None:
        #: The half that was read first.
        self.half = half
        #: Lowest offset among its halves.
        self.offset = offset
        #: Highest offset of a half record with its id, be it one of its own or one that was refused.
        self.last_offset = offset
        #: The first decision, or None.
        self.verdict: Verdict | None = None
        #: Who decided; None where nobody did, or it was read from the done log, which does not say.
        self.author: Author | None = None
        #: Place of the decision: offset of the op record, and index in it.
        self.decided_at = -1
        self.decided_index = 0
        #: That record is needed until the transaction is settled, or snapshotted with its decision.
        self.is_op_open = False
        #: When the next check is due, in the broker's seconds.
        self.check_due = 0.0
        #: A Kafka transaction is under way that settles it, or writes it down again.
        self.in_flight = False
        #: Its place among those that could be published.
        self.sequence = 0
        #: Append time of its first half in milliseconds, by the broker's clock.
        self.birth_ms = birth_ms
        #: Bytes of its payloads, whether they are in memory or not; about what they take in the client's buffer.
        self.payload_bytes = payload_of(half)
        #: Its halves, where it is a transaction of several messages.
        self.parts: Parts | None = None
        if half.part is not None:
            self.parts = Parts(half.part[1])
            self.parts.add(offset, half)

    @property
    def transaction_id(self) -> str:
        """The id that all its halves have."""
        return self.half.transaction_id

    @property
    def group(self) -> str:
        """The producer group of its halves."""
        return self.half.group

    @property
    def halves(self) -> Sequence[Half]:
        """What it publishes, in the order of its parts."""
        if self.parts is None:
            return (self.half,)
        return [half for _, half in self.parts.stored()]

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offsets of its halves, in the order of its parts."""
        if self.parts is None:
            return (self.offset,)
        return tuple(offset for offset, _ in self.parts.stored())

    @property
    def size_bytes(self) -> int:
        """Bytes of its messages, headers included, about as the done log would hold them."""
        return self.payload_bytes + _FIELDS_BYTES * len(self.halves)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that its payloads take, about, while they are there."""
        return self.payload_bytes + OBJECT_BYTES

    @property
    def keys(self) -> tuple[int, ...]:
        """A number for each of its keys with its target, as `key_hashes` gives them."""
        return key_hashes(self.halves) if self.dropped is None else self.dropped

    @property
    def addressed(self) -> Sequence[Half]:
        """The messages that go to their targets: none where it is rolled back or discarded."""
        return self.halves if self.verdict is Verdict.COMMIT else ()

    @property
    def topics(self) -> tuple[str, ...]:
        """Their targets."""
        return tuple(dict.fromkeys(half.topic for half in self.addressed))

    @property
    def places(self) -> tuple[int, ...]:
        """The lines in which it stands while it is set aside: what is discarded has no order."""
        return self.keys if self.verdict is Verdict.COMMIT else ()

    def partitions_wanted(self, topic: str) -> int:
        """Return how many partitions a target must have at least; 0 where nothing goes there."""
        wanted = (1 if half.partition is None else half.partition + 1 for half in self.addressed if half.topic == topic)
        return max(wanted, default=0)

    def drop(self) -> None:
        """Keep no payloads in memory; they can be read again where its halves stand."""
        if self.dropped is None:
            self.dropped = self.keys
            self._replace([without_payload(half) for half in self.halves])

    def load(self, halves: Sequence[tuple[int, Half]]) -> bool:
        """Take the payloads in as they were read again, by offset, and tell whether they are its own."""
        found = dict(halves)
        own = [found.get(offset) for offset in self.offsets]
        whole = [half for half in own if half is not None and half.transaction_id == self.half.transaction_id]
        if self.dropped is None or len(whole) != len(own):
            return False
        self._replace(whole)
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
        """Take another half with its id in, and tell whether it is one of its own."""
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

    def is_named_by(self, op: Op) -> bool:
        """Tell whether an op names its halves, and no others.

        Its producer's COMMIT names all of them. A check or an operator knows of some.
        """
        if self.parts is None:
            return op.half_offsets == (self.offset,)
        if op.author is Author.PRODUCER and op.verdict is Verdict.COMMIT:
            return op.half_offsets == self.offsets
        return set(op.half_offsets) <= set(self.offsets)

    def count(self) -> Note:
        """Return what the done log shall say of its checks; even if it is decided, this is not its end."""
        checks = self.check_count, self.answered_ms
        return Note(self.half.transaction_id, self.last_offset, Verdict.UNKNOWN, *checks, *self.answered_at)

    def remember_checks(self, note: Note) -> None:
        """Take in what a note says of its checks."""
        self.check_count = self.requested = note.check_count
        self.answered_ms = note.answered_ms
        if note.verdict is Verdict.UNKNOWN:
            self.answered_at = note.op_offset, note.op_index

    def note(self) -> Note:
        """Return what the done log shall say of its end, or of its checks while it is not decided."""
        if self.verdict is None:
            return self.count()
        checks = self.check_count, self.answered_ms
        place = self.decided_at, self.decided_index
        # What `Note(...)` does, in half the time: thousands are made a second.
        return tuple.__new__(Note, (self.half.transaction_id, self.last_offset, self.verdict, *checks, *place))

    def snapshot(self) -> Snapshot:
        """Return all of it, to be written down again."""
        places = zip(self.offsets, self.halves, strict=True)
        return Snapshot(self.note(), tuple(SnapshotHalf(offset, self.birth_ms, half) for offset, half in places))
