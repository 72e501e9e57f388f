"""What the owner of a half partition starts from, of positions and of what the done log says. Pure.

First of all: are the logs still those that the committed positions belong to? A topic that was deleted and made again
begins at offset 0, and may have grown past an old position by the time somebody looks: so the ids of the three topics
are committed with each position. The broker forgets the positions of a topic that is deleted, which is why each of the
three positions has the ids of all. With the position of the half log stands who committed it, by transactional ids.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from confluent_kafka import OFFSET_INVALID, TopicPartition

from penstock.transactions.core.checkpoints import Mark
from penstock.transactions.core.commit_batch import CommitBatch
from penstock.transactions.core.recovered_state import live_snapshots
from penstock.transactions.core.state import PartitionState
from penstock.transactions.wire.done_records import Done, Note, Snapshot
from penstock.transactions.wire.topics import StoreTopics

_log = logging.getLogger("penstock.transactions")

#: Names of the logs of a half partition, as they are committed with positions.
HALF, OP, DONE = "half", "op", "done"
LOGS = (HALF, OP, DONE)
#: Transactional ids that are read with a position: more are not written by any version.
_NAMES = 8


class Fate(Enum):
    """What became of a log since it was read."""

    INTACT = "as it was"
    CUT = "records were deleted that were needed"
    REPLACED = "it was deleted and made again, or its end was cut off"


class Committed(NamedTuple):
    """How far a log was read, where it begins and ends now, and the topic ids that were committed with the position.

    The position is the next offset to be read, or None where none is written down; of the done log, the lowest needed.
    """

    position: int | None
    low: int
    end: int
    ids: Mapping[str, str]

    def fate(self, *, is_other: bool) -> Fate:
        """Tell what became of the log; `is_other`: it is known to be another one."""
        position = self.low if self.position is None else self.position
        if is_other or position > self.end:
            return Fate.REPLACED
        return Fate.CUT if position < self.low else Fate.INTACT

    def explained(self, log: str, place: str, fate: Fate) -> str:
        """Say what became of the log, what that means, and what to do; `place` is its topic and partition."""
        known = "" if self.position is None else f" (it was known to offset {self.position})"
        what = f" was deleted and made again, or its end was cut off{known}; it goes from {self.low} to {self.end} now."
        if fate is Fate.CUT:
            what = f": records below offset {self.low} were deleted by somebody else, and were needed{known}."
        return f"{place}{what} {_MEANS[log]} Check the retention of the topic, and who may delete it or from it."


_MEANS = {
    HALF: (
        "Transactions whose halves lay there and were not read, or not written down in the done log, are gone, "
        "acknowledged ones among them: send them again. All that lies there now is read."
    ),
    OP: (
        "Decisions that lay there and were not read, or had not taken effect, are gone: the producers of their "
        "transactions are asked. All that lies there now is read."
    ),
    DONE: (
        "What it said of settled transactions is gone: those whose halves or decisions lie above the committed "
        "positions may be published a second time by whoever starts from there, and delayed or undecided ones that "
        "only it held are gone. Compare what consumers got, by key or transaction."
    ),
}


def names_of(topics: StoreTopics) -> dict[str, str]:
    """Return the topics of the logs, by log."""
    return {HALF: topics.half, OP: topics.op, DONE: topics.done}


def encode_ids(ids: Mapping[str, str]) -> str:
    """Return what is committed with a position: topic ids by log, without those that are not known."""
    return " ".join(f"{log}={ids[log]}" for log in LOGS if log in ids)


def decode_ids(metadata: str | None) -> dict[str, str]:
    """Return the topic ids that were committed with a position, by log. What is none of them is left out."""
    pairs = (word.partition("=") for word in (metadata or "").split(" "))
    return {name: topic_id for name, _, topic_id in pairs if name in LOGS and topic_id}


def committed_at(place: TopicPartition, low: int, end: int) -> Committed:
    """Return a committed position as the client library tells it, with the bounds of its log."""
    return Committed(None if place.offset == OFFSET_INVALID else place.offset, low, end, decode_ids(place.metadata))


def log_positions(topics: StoreTopics, batches: Mapping[int, CommitBatch], ids: Sequence[str]) -> list[TopicPartition]:
    """Return the positions of a common Kafka transaction, with the transactional ids of who commits them."""
    claim = " ".join(ids)
    positions: list[TopicPartition] = []
    for number, batch in batches.items():
        metadata = f"{claim} {batch.log_ids}".rstrip()
        positions.append(TopicPartition(topics.half, number, batch.half_checkpoint, metadata))
        positions.append(TopicPartition(topics.op, number, batch.op_checkpoint, batch.log_ids))
        positions.append(TopicPartition(topics.done, number, batch.done_checkpoint, batch.log_ids))
    return positions


def decode_claim(topics: StoreTopics, claim: str | None) -> list[str]:
    """Return the ids that were committed with a position. What is no id of a coordinator of this store is left out."""
    begin = f"{topics.coordinators}."
    return [name for name in (claim or "").split(" ") if name.startswith(begin)][:_NAMES]


def known_ids(committed: Mapping[str, Committed]) -> dict[str, str]:
    """Return the topic ids of the logs that were read. All positions are written together, with the ids of all logs."""
    return {log: topic_id for found in committed.values() for log, topic_id in found.ids.items()}


def fates_of(committed: Mapping[str, Committed], ids: Mapping[str, str]) -> dict[str, Fate]:
    """Tell what became of the three logs of a half partition, by the topic ids of the logs as they are now."""
    were = known_ids(committed)
    return {
        log: found.fate(is_other=log in were and ids.get(log, were[log]) != were[log])
        for log, found in committed.items()
    }


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


@dataclass(frozen=True, slots=True)
class RecoveredPartition:
    """What the owner of a half partition starts from.

    Attributes:
        state: with all that the done log says; it is fed the half and op logs from their positions there.
        starts: by log, from where it is read; of the done log, below which it is known not to be needed.
        ends: where the logs ended when it was recovered.
        known: the end of the done log, with positions above all that it speaks of.
        ids: topic ids of the three logs, as far as they are known.
        lost: records that are gone and were not read, at least.
        forged: how many records and snapshots of the done log are none that count.
    """

    state: PartitionState
    starts: Mapping[str, int]
    ends: Mapping[str, int]
    known: Mark
    ids: Mapping[str, str] = field(default_factory=dict)
    lost: int = 0
    forged: int = 0


def recovered_partition(
    topics: StoreTopics, number: int, committed: Mapping[str, Committed], ids: Mapping[str, str], done: DoneRead
) -> RecoveredPartition:
    """Return what a half partition starts from; a log that is not as it was is named in an error line.

    `committed` is how far the logs were read, and `ids` are those of the topics as they are now, each by log.

    Where the half or op log is not as it was, both are read from where they begin: decisions on new halves may have
    been read, and refused as unknown. What is settled the done log tells wherever reading begins. Where that one is not
    as it was, what it said is gone, and reading goes on.
    """
    fates, lost = fates_of(committed, ids), 0
    for log, fate in fates.items():
        found = committed[log]
        if fate is not Fate.INTACT:
            lost += found.low - found.position if fate is Fate.CUT and found.position is not None else 1
            _log.error("%s", found.explained(log, f"{names_of(topics)[log]}:{number}", fate))
    notes, snapshots = done.notes, done.snapshots
    # What it says of a log that is gone would be taken for the new one: offsets begin again there.
    if fates[HALF] is Fate.REPLACED:
        notes = [note._replace(half_offset=-1) for note in notes]
    if fates[OP] is Fate.REPLACED:
        notes = [note._replace(op_offset=-1) for note in notes]
        snapshots = [(place, it._replace(note=it.note._replace(op_offset=-1))) for place, it in snapshots]
    reads_on = {DONE: fates[DONE] is Fate.INTACT} | dict.fromkeys((HALF, OP), fates[HALF] is fates[OP] is Fate.INTACT)
    starts = {
        log: found.position if reads_on[log] and found.position is not None else found.low
        for log, found in committed.items()
    }
    ends = {log: found.end for log, found in committed.items()} | {DONE: done.end}
    # Whatever notes of strangers say, nothing lies above the ends.
    halves = min(max((note.half_offset for note in notes), default=-1) + 1, ends[HALF])
    ops = min(max((note.op_offset for note in notes), default=-1) + 1, ends[OP])
    state = PartitionState(starts[HALF], starts[OP])
    allowed = [(place, it) for place, it in snapshots if _may_restore(topics, it)]
    if refused := len(snapshots) - len(allowed):
        text = (
            "%s:%d: %d transactions that it holds whole are refused: they are addressed to a topic of the store or of "
            "Kafka itself; see who may write to it"
        )
        _log.warning(text, topics.done, number, refused)
    state.remember(notes, allowed)
    known = Mark(done.end, halves, ops)
    return RecoveredPartition(
        state, starts, ends, known, {**known_ids(committed), **ids}, lost, len(done.unreadable) + refused
    )


def _may_restore(topics: StoreTopics, snapshot: Snapshot) -> bool:
    """Tell whether a snapshot may be published: its halves are judged as those of the half log are."""
    return all(topics.may_publish_to(stored.half.topic) for stored in snapshot.halves)
