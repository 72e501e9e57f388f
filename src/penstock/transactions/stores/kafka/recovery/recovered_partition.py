"""What the owner of a half partition starts from, of positions and of what the done log says. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from confluent_kafka import TopicPartition

from penstock.transactions.core.recovered_state import live_snapshots
from penstock.transactions.stores.kafka.logs.log_identity import (
    DONE,
    HALF,
    OP,
    Committed,
    Fate,
    decode_ids,
    explained,
    fates_of,
    known_ids,
)
from penstock.transactions.wire.done_records import Done, Note, Snapshot

_log = logging.getLogger("penstock.transactions")

#: What the client library says of a position that is not written down.
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


def recovered_partition(
    names: Mapping[str, str], number: int, committed: Mapping[str, Committed], ids: Mapping[str, str], done: DoneRead
) -> RecoveredPartition:
    """Return what a half partition starts from; a log that is not as it was is named in an error line.

    `names` are those of the topics, `committed` is how far they were read, and `ids` are those of the topics as they
    are now, each by log.

    Where the half or op log is not as it was, both are read from where they begin: decisions on new halves may have
    been read, and refused as unknown. What is settled the done log tells wherever reading begins. Where that one is not
    as it was, what it said is gone, and reading goes on.
    """
    fates, lost = fates_of(committed, ids), 0
    for log, fate in fates.items():
        if fate is not Fate.INTACT:
            position, low, _, _ = committed[log]
            lost += low - position if fate is Fate.CUT and position is not None else 1
            _log.error(explained(log, f"{names[log]}[{number}]", committed[log], fate))
    notes, snapshots = done.notes, done.snapshots
    # What it says of a log that is gone would be taken for the new one: offsets begin again there.
    if fates[HALF] is Fate.REPLACED:
        notes = [note._replace(half_offset=-1) for note in notes]
    if fates[OP] is Fate.REPLACED:
        notes = [note._replace(op_offset=-1) for note in notes]
        snapshots = [
            (place, snapshot._replace(note=snapshot.note._replace(op_offset=-1))) for place, snapshot in snapshots
        ]
    reads_on = fates[HALF] is fates[OP] is Fate.INTACT
    return RecoveredPartition(
        _start(committed[HALF], reads_on=reads_on),
        _start(committed[OP], reads_on=reads_on),
        committed[HALF].end,
        committed[OP].end,
        notes,
        done.end,
        snapshots,
        _start(committed[DONE], reads_on=fates[DONE] is Fate.INTACT),
        {**known_ids(committed), **ids},
        lost,
        len(done.unreadable),
    )


def _start(committed: Committed, *, reads_on: bool) -> int:
    return committed.position if reads_on and committed.position is not None else committed.low
