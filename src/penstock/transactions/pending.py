"""A transaction that is not settled: its halves, its decision if there is one, and its checks.

Pure. Most transactions have one half. One of several messages has several, all in one half partition, and can commit
only when all of them are there.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.transactions.done_records import Carried, Carry, Note
from penstock.transactions.records import BY_OPERATOR, EXHAUSTED, Author, Half, Op, Verdict

#: A place in the op log that is none.
NOWHERE = (-1, 0)
#: What a carried header takes beside its name and content; what penstock's own fields take, generously.
_HEADER_BYTES = 8
_FIELDS_BYTES = 1_000


def size_of(half: Half) -> int:
    """Return the bytes of a half, headers included, about as the done log would hold it."""
    named = sum(len(name) + len(content or b"") + _HEADER_BYTES for name, content in half.headers)
    return len(half.key or b"") + len(half.value or b"") + named + _FIELDS_BYTES


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

    def stored(self) -> list[tuple[int, Half]]:
        """Return offsets and halves, in the order of the parts."""
        return [one for one in self._halves if one is not None]


class Pending:
    """A transaction that is not settled. Used by the coordinator's thread."""

    __slots__ = (
        "answered_at",
        "answered_ms",
        "author",
        "birth_ms",
        "carried_at",
        "check_count",
        "check_due",
        "decided_at",
        "decided_index",
        "half",
        "held",
        "in_flight",
        "is_op_open",
        "is_unaskable",
        "last_offset",
        "offset",
        "parts",
        "requested",
        "verdict",
    )

    def __init__(self, half: Half, offset: int) -> None:
        #: The half that was read first.
        self.half = half
        #: Lowest offset among its halves.
        self.offset = offset
        #: Highest offset of a half record with its id, be it one of its own or one that was refused.
        self.last_offset = offset
        #: The first decision, or None.
        self.verdict: Verdict | None = None
        #: Who decided; None where nobody did, or the done log told of it, which does not say.
        self.author: Author | None = None
        #: Place of the decision: offset of the op record, and index in it.
        self.decided_at = -1
        self.decided_index = 0
        #: That record is needed until the transaction is settled, or carried with its decision.
        self.is_op_open = False
        #: Answered checks, and the append time of the last answer in milliseconds.
        self.check_count = 0
        self.answered_ms = 0
        #: Place of that answer: what lies at or below it was judged before.
        self.answered_at = NOWHERE
        #: Number of the check that was asked last; 0 when none was.
        self.requested = 0
        #: The client library refused a question about it, and that was said.
        self.is_unaskable = False
        #: When the next check is due, in the broker's seconds.
        self.check_due = 0.0
        #: Its target cannot take it now, or it stands behind one that cannot be published: it waits aside.
        self.held = False
        #: A Kafka transaction is under way that settles it, or writes it down again.
        self.in_flight = False
        #: Append time of its first half in milliseconds, by the broker's clock.
        self.birth_ms = 0
        #: The done log holds it whole at or above this offset; None: only the half log does.
        self.carried_at: int | None = None
        #: Its halves, where it is a transaction of several messages.
        self.parts: Parts | None = None
        if half.part is not None:
            self.parts = Parts(half.part[1])
            self.parts.add(offset, half)

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
        return sum(map(size_of, self.halves))

    @property
    def is_complete(self) -> bool:
        """Whether all its halves are there and fit together."""
        return self.parts is None or (not self.parts.missing and not self.parts.is_spoiled)

    @property
    def discard_reason(self) -> str:
        """Why it goes to the discarded topic, where it does."""
        return BY_OPERATOR if self.author is Author.OPERATOR else EXHAUSTED

    def add_part(self, offset: int, half: Half) -> bool:
        """Take another half with its id in, and tell whether it is one of its own."""
        self.last_offset = max(self.last_offset, offset)
        if self.parts is None or self.verdict is not None:
            return False
        if half.group != self.half.group:
            self.parts.is_spoiled = True
            return False
        return self.parts.add(offset, half)

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
        return Note(
            self.half.transaction_id,
            self.last_offset,
            self.verdict,
            self.check_count,
            self.answered_ms,
            self.decided_at,
            self.decided_index,
        )

    def carry(self) -> Carry:
        """Return all of it, to be written down again."""
        places = zip(self.offsets, self.halves, strict=True)
        return Carry(self.note(), tuple(Carried(offset, self.birth_ms, half) for offset, half in places))


__all__ = ["NOWHERE", "Parts", "Pending", "size_of"]
