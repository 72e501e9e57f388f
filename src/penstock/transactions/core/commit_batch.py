"""What one Kafka transaction settles of a half partition. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.transactions.core.pending import Pending, size_of
from penstock.transactions.wire.done_records import Note, Snapshot, encode_done
from penstock.transactions.wire.half import BY_OPERATOR, EXHAUSTED, encode_discarded
from penstock.transactions.wire.ops import Author, Verdict

#: Completions in one done record: half a megabyte.
_NOTES_PER_RECORD = 8_000
#: Bytes of snapshots in one done record, about; one that is larger has a record of its own.
_SNAPSHOT_BYTES = 512 << 10

#: A message as it is written: topic, partition, key, value and headers.
Written = tuple[str, int | None, bytes | None, bytes | None, Sequence[tuple[str, str | bytes | None]]]

# A member of an enumeration is slow to look up, and this is the way of every transaction.
_COMMIT = Verdict.COMMIT


@dataclass(slots=True)
class DecidedBatch(ABC):
    """What one Kafka transaction publishes of a partition of any store.

    Attributes:
        decided: what is settled by it, in the order in which it is published.
        discarded_to: the topic of what is discarded.
        is_watched: whether somebody waits until a committed reader can see one of them.
    """

    decided: list[Pending]
    discarded_to: str = field(default="", kw_only=True)
    is_watched: bool = field(default=False, kw_only=True)

    def topics(self) -> set[str]:
        """Return the topics that it publishes to."""
        found: set[str] = set()
        for pending in self.decided:
            if pending.verdict is _COMMIT and pending.parts is None:
                # Nearly all; it is asked for often while something is tried apart.
                found.add(pending.half.topic)
            elif pending.verdict is _COMMIT:
                found.update(pending.topics)
            elif pending.verdict is Verdict.DISCARD:
                found.add(self.discarded_to)
        return found

    def messages(self) -> Iterator[tuple[str, Sequence[Written]]]:
        """Yield what is published, by transaction. Called by the publishing thread."""
        for pending in self.decided:
            half, verdict = pending.half, pending.verdict
            if verdict is _COMMIT:
                messages = (half.message,) if pending.parts is None else [part.message for part in pending.halves]
                yield half.transaction_id, messages
            elif verdict is Verdict.DISCARD:
                yield half.transaction_id, self._discarded(pending)

    @abstractmethod
    def records(self) -> Iterator[bytes]:
        """Yield what is written into the done log. Called by the publishing thread."""

    def _discarded(self, pending: Pending) -> list[Written]:
        reason = BY_OPERATOR if pending.author is Author.OPERATOR else EXHAUSTED
        topic, checks = self.discarded_to, pending.check_count
        return [(topic, None, half.key, half.value, encode_discarded(half, reason, checks)) for half in pending.halves]


@dataclass(slots=True)
class CommitBatch(DecidedBatch):
    """The part of one half partition in a Kafka transaction.

    Attributes:
        half_checkpoint: where reading of the half log would start once it is committed.
        op_checkpoint: the same for the op log.
        done_checkpoint: the offset of the done log below which nothing is needed.
        done_from: an offset of the done log at or below that of its records.
        log_ids: topic ids of the logs, as they stand beside the positions.
        counts: how many checks of pending transactions were answered when it was chosen: more may be meanwhile.
        snapshots: pending transactions, as they were then, that it writes down whole so that the checkpoints pass them.
    """

    half_checkpoint: int
    op_checkpoint: int
    counts: list[Note] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    done_checkpoint: int = 0
    done_from: int = 0
    log_ids: str = ""

    @property
    def moves(self) -> bool:
        """Whether positions are committed with it: what is tried apart from the others moves none."""
        return self.half_checkpoint >= 0

    def records(self) -> Iterator[bytes]:
        """Yield what is written into the done log."""
        notes = self.notes()
        for start in range(0, len(notes), _NOTES_PER_RECORD):
            yield encode_done(notes[start : start + _NOTES_PER_RECORD])
        for snapshots in _in_records(self.snapshots):
            yield encode_done((), snapshots)

    def notes(self) -> list[Note]:
        """Return what the done log shall say."""
        return [pending.note() for pending in self.decided] + self.counts


def _in_records(snapshots: Sequence[Snapshot]) -> Iterator[Sequence[Snapshot]]:
    """Yield what goes into one done record each."""
    group: list[Snapshot] = []
    size = 0
    for snapshot in snapshots:
        snapshotted = sum(size_of(half) for _, _, half in snapshot.halves)
        if group and size + snapshotted > _SNAPSHOT_BYTES:
            yield group
            group, size = [], 0
        group.append(snapshot)
        size += snapshotted
    if group:
        yield group
