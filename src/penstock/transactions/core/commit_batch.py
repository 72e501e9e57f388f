"""What one Kafka transaction settles of a partition. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.transactions.core.pending import Pending, size_of
from penstock.transactions.wire.done_records import Note, Snapshot, encode_done
from penstock.transactions.wire.half import BY_OPERATOR, EXHAUSTED, encode_discarded, message_of
from penstock.transactions.wire.ops import Author, Verdict

#: Completions in one done record: half a megabyte.
_NOTES_PER_RECORD = 8_000
#: Approximate bytes of snapshots in one done record. A larger snapshot has a record of its own.
_SNAPSHOT_BYTES = 512 << 10

#: A message to write: topic, partition, key, value and headers.
Written = tuple[str, int | None, bytes | None, bytes | None, Sequence[tuple[str, str | bytes | None]]]

# Looking up a member of an enumeration is slow, and every transaction comes through here.
_COMMIT = Verdict.COMMIT


@dataclass(slots=True)
class DecidedBatch(ABC):
    """What one Kafka transaction publishes of a partition of any store.

    Attributes:
        decided: the transactions that it settles, in the order of publication.
        discarded_to: the topic of discarded messages.
        is_watched: whether a caller waits until a read_committed reader can see one of them.
    """

    decided: list[Pending]
    discarded_to: str = field(default="", kw_only=True)
    is_watched: bool = field(default=False, kw_only=True)

    def topics(self) -> set[str]:
        """Return the topics that it publishes to."""
        found: set[str] = set()
        for pending in self.decided:
            if pending.verdict is _COMMIT and pending.parts is None:
                # The usual case. This runs often while something is tried separately.
                found.add(pending.half.topic)
            elif pending.verdict is _COMMIT:
                found.update(pending.topics)
            elif pending.verdict is Verdict.DISCARD:
                found.add(self.discarded_to)
        return found

    def messages(self) -> Iterator[tuple[str, Iterable[Written]]]:
        """Yield the messages to publish, by transaction. Called by the publishing thread."""
        for pending in self.decided:
            half, verdict = pending.half, pending.verdict
            if verdict is _COMMIT:
                messages = (message_of(half),) if pending.parts is None else map(message_of, pending.halves)
                yield half.transaction_id, messages
            elif verdict is Verdict.DISCARD:
                yield half.transaction_id, self._discarded(pending)

    @abstractmethod
    def records(self) -> Iterator[bytes]:
        """Yield the records for the done log. Called by the publishing thread."""

    def _discarded(self, pending: Pending) -> list[Written]:
        reason = BY_OPERATOR if pending.author is Author.OPERATOR else EXHAUSTED
        topic, checks = self.discarded_to, pending.check_count
        return [(topic, None, half.key, half.value, encode_discarded(half, reason, checks)) for half in pending.halves]


@dataclass(slots=True)
class CommitBatch(DecidedBatch):
    """What one Kafka transaction settles of a half partition.

    Attributes:
        half_checkpoint: the half log is read from here once it is committed; negative: it commits no positions.
        op_checkpoint: the same for the op log.
        done_checkpoint: the offset of the done log below which nothing is needed.
        done_from: an offset of the done log at or below its records.
        log_ids: topic ids of the logs, as committed with the positions.
        counts: answered checks of pending transactions when it was chosen; more answers may arrive meanwhile.
        snapshots: pending transactions as they were then, for the done log, so that the checkpoints pass them.
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
        """Whether it commits positions. A batch that is tried separately does not."""
        return self.half_checkpoint >= 0

    def records(self) -> Iterator[bytes]:
        """Yield the records for the done log."""
        notes = self.notes()
        for start in range(0, len(notes), _NOTES_PER_RECORD):
            yield encode_done(notes[start : start + _NOTES_PER_RECORD])
        for snapshots in _in_records(self.snapshots):
            yield encode_done((), snapshots)

    def notes(self) -> list[Note]:
        """Return its notes for the done log."""
        return [pending.note() for pending in self.decided] + self.counts


def _in_records(snapshots: Sequence[Snapshot]) -> Iterator[Sequence[Snapshot]]:
    """Group the snapshots by done record."""
    group: list[Snapshot] = []
    size = 0
    for snapshot in snapshots:
        snapshot_bytes = sum(size_of(half) for _, _, half in snapshot.halves)
        if group and size + snapshot_bytes > _SNAPSHOT_BYTES:
            yield group
            group, size = [], 0
        group.append(snapshot)
        size += snapshot_bytes
    if group:
        yield group
