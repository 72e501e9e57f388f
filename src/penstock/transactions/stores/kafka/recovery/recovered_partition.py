"""What the owner of a half partition starts from, of positions and of what the done log says. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from confluent_kafka import TopicPartition

from penstock.transactions.core.recovered_state import live_snapshots
from penstock.transactions.stores.kafka.logs.log_identity import (
    DONE,
    HALF,
    OP,
    Committed,
    Fate,
    Start,
    decode_ids,
    explained,
    known_ids,
    starts_of,
)
from penstock.transactions.wire.done_records import Done, Note, Snapshot

_log = logging.getLogger("penstock.transactions")

_INVALID = -1001


@dataclass(frozen=True, slots=True)
class RecoveredPartition:
    """What the owner of a half partition starts from.

    Attributes:
        half_end: the end of the half log when it was recovered.
        op_end: the end of the op log then.
        done_end: the end of the done log when it was read.
        snapshots: pending transactions that the done log holds whole, each with the offset of its record.
        done_position: the offset below which the done log is known not to be needed.
        ids: topic ids of the three logs, as far as they are known.
        lost: records that are gone and were not read, at least.
        unreadable: how many records of the done log do not read.
    """

    half_position: int
    op_position: int
    half_end: int
    op_end: int
    notes: list[Note]
    done_end: int
    snapshots: list[tuple[int, Snapshot]] = field(default_factory=list)
    done_position: int = 0
    ids: Mapping[str, str] = field(default_factory=dict)
    lost: int = 0
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class DoneRead:
    """What was read of the done log of one half partition, to where it ended.

    Records have their offsets; of those that do not read there is the offset alone.
    """

    end: int
    records: list[tuple[int, Done]]
    unreadable: list[int] = field(default_factory=list)

    @property
    def notes(self) -> list[Note]:
        """Ends and counts, in their order."""
        return [note for _, record in self.records for note in record.notes]

    @property
    def snapshots(self) -> list[tuple[int, Snapshot]]:
        """Transactions that are pending still and written down whole."""
        return live_snapshots(self.records)


def committed_at(place: TopicPartition, low: int, end: int) -> Committed:
    """Return a committed position as the client library tells it, with the bounds of its log."""
    return Committed(None if place.offset == _INVALID else place.offset, low, end, decode_ids(place.metadata))


def report_log(names: Mapping[str, str], partition: int, log: str, found: Committed, start: Start) -> None:
    """Log that a log is not as it was; `names` are those of the topics, by log."""
    _log.error(explained(log, f"{names[log]}[{partition}]", found, start.fate))


def recovered_partition(
    committed: Mapping[str, Committed],
    ids: Mapping[str, str],
    done: DoneRead,
    tell: Callable[[str, Committed, Start], None],
) -> RecoveredPartition:
    """Return what a half partition starts from. Pure.

    `committed` is how far each log was read; `ids` are those of the logs as they are now; `tell` is called for each log
    that is not as it was.
    """
    starts = starts_of(committed, ids)
    for log, start in starts.items():
        if start.fate is not Fate.INTACT:
            tell(log, committed[log], start)
    notes, snapshots = done.notes, done.snapshots
    # What it says of a log that is gone would be taken for the new one: offsets begin again there.
    if starts[HALF].fate is Fate.ANEW:
        notes = [note._replace(half_offset=-1) for note in notes]
    if starts[OP].fate is Fate.ANEW:
        notes = [note._replace(op_offset=-1) for note in notes]
        snapshots = [
            (place, snapshot._replace(note=snapshot.note._replace(op_offset=-1))) for place, snapshot in snapshots
        ]
    # Decisions on the new halves may have been read, and refused as unknown.
    op_position = committed[OP].low if starts[HALF].fate is Fate.ANEW else starts[OP].offset
    return RecoveredPartition(
        starts[HALF].offset,
        op_position,
        committed[HALF].end,
        committed[OP].end,
        notes,
        done.end,
        snapshots,
        starts[DONE].offset,
        {**known_ids(committed), **ids},
        sum(start.lost for start in starts.values()),
        len(done.unreadable),
    )
