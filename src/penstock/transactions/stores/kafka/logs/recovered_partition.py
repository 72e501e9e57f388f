"""The start state of a half partition: computed from committed positions and the done log. Pure.

A position is valid only for the topic it was committed for. A topic that was deleted and created again begins at offset
0, and may have grown past an old position before anyone looks. So the topic ids are committed with each position. The
broker forgets the positions of a deleted topic, so each of the three positions has the ids of all three topics. The
position of the half log also names its committer, by transactional ids.
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

#: The logs of a half partition, by their names in the metadata of positions.
HALF, OP, DONE = "half", "op", "done"
LOGS = (HALF, OP, DONE)
#: At most this many transactional ids are read from a position: no version writes more.
_NAMES = 8


class Fate(Enum):
    """A log's change since it was read."""

    INTACT = "unchanged"
    CUT = "needed records were deleted"
    REPLACED = "it was deleted and created again, or its end was truncated"


class Committed(NamedTuple):
    """A committed position of a log, the log's current bounds, and the topic ids committed with the position.

    The position is the next offset to read, or None if none is committed; for the done log, the lowest needed offset.
    """

    position: int | None
    low: int
    end: int
    ids: Mapping[str, str]

    def fate(self, *, is_other: bool) -> Fate:
        """Return the log's change; `is_other`: another topic id shows that it was replaced."""
        position = self.low if self.position is None else self.position
        if is_other or position > self.end:
            return Fate.REPLACED
        return Fate.CUT if position < self.low else Fate.INTACT

    def explained(self, log: str, place: str, fate: Fate) -> str:
        """Return the change, its consequence and the next step as text; `place` is its topic and partition."""
        known = "" if self.position is None else f" (it was known to offset {self.position})"
        what = (
            f" was deleted and made again, or its end was cut off{known}; it has offsets {self.low} to {self.end} now."
        )
        if fate is Fate.CUT:
            what = f": records below offset {self.low} were deleted by another client, and were needed{known}."
        return f"{place}{what} {_MEANS[log]} Check the retention of the topic, and who may delete it or from it."


_MEANS = {
    HALF: (
        "Transactions whose halves were there and were not read, or not saved in the done log, are lost, also "
        "acknowledged ones: send them again. All records there now are read."
    ),
    OP: (
        "Decisions that were there and were not read, or had not taken effect, are lost: the producers of their "
        "transactions are checked. All records there now are read."
    ),
    DONE: (
        "Its records of settled transactions are lost: those with halves or decisions above the committed positions "
        "may be published a second time. Delayed or undecided transactions that only this log held are lost. Compare "
        "what consumers received, by key or transaction."
    ),
}


def names_of(topics: StoreTopics) -> dict[str, str]:
    """Return the topics of the logs, by log."""
    return {HALF: topics.half, OP: topics.op, DONE: topics.done}


def encode_ids(ids: Mapping[str, str]) -> str:
    """Return the metadata of a position: the known topic ids by log."""
    return " ".join(f"{log}={ids[log]}" for log in LOGS if log in ids)


def decode_ids(metadata: str | None) -> dict[str, str]:
    """Return the topic ids in the metadata of a position, by log; other words are ignored."""
    pairs = (word.partition("=") for word in (metadata or "").split(" "))
    return {name: topic_id for name, _, topic_id in pairs if name in LOGS and topic_id}


def committed_at(place: TopicPartition, low: int, end: int) -> Committed:
    """Return the client library's committed position with the bounds of its log."""
    return Committed(None if place.offset == OFFSET_INVALID else place.offset, low, end, decode_ids(place.metadata))


def log_positions(topics: StoreTopics, batches: Mapping[int, CommitBatch], ids: Sequence[str]) -> list[TopicPartition]:
    """Return the positions that one Kafka transaction commits, with the transactional ids of the committer."""
    claim = " ".join(ids)
    positions: list[TopicPartition] = []
    for number, batch in batches.items():
        metadata = f"{claim} {batch.log_ids}".rstrip()
        positions.append(TopicPartition(topics.half, number, batch.half_checkpoint, metadata))
        positions.append(TopicPartition(topics.op, number, batch.op_checkpoint, batch.log_ids))
        positions.append(TopicPartition(topics.done, number, batch.done_checkpoint, batch.log_ids))
    return positions


def decode_claim(topics: StoreTopics, claim: str | None) -> list[str]:
    """Return the transactional ids in the metadata of a position; only ids of this store's coordinators."""
    begin = f"{topics.coordinators}."
    return [name for name in (claim or "").split(" ") if name.startswith(begin)][:_NAMES]


def known_ids(committed: Mapping[str, Committed]) -> dict[str, str]:
    """Return the topic ids of the logs that were read. All positions are committed together, with all ids."""
    return {log: topic_id for found in committed.values() for log, topic_id in found.ids.items()}


def fates_of(committed: Mapping[str, Committed], ids: Mapping[str, str]) -> dict[str, Fate]:
    """Return the change of each log of a half partition; `ids` are the current topic ids."""
    old_ids = known_ids(committed)
    return {
        log: found.fate(is_other=log in old_ids and ids.get(log, old_ids[log]) != old_ids[log])
        for log, found in committed.items()
    }


@dataclass(frozen=True, slots=True)
class DoneRead:
    """The done log of one half partition up to `end`: records with offsets, and offsets of unreadable records."""

    end: int
    records: list[tuple[int, Done]]
    unreadable: list[int] = field(default_factory=list)

    @property
    def notes(self) -> list[Note]:
        """Ends of transactions and counts of checks, in log order."""
        return [note for _, record in self.records for note in record.notes]

    @property
    def snapshots(self) -> list[tuple[int, Snapshot]]:
        """Snapshots of transactions that are still pending."""
        return live_snapshots(self.records)


@dataclass(frozen=True, slots=True)
class RecoveredPartition:
    """The start state of a half partition.

    Attributes:
        state: has the content of the done log; the half and op logs are fed to it from its positions.
        starts: the offset by log to read from; for the done log, the lowest needed offset.
        ends: the ends of the logs at recovery.
        known: the end of the done log, with half and op positions above all that it mentions.
        ids: the known topic ids of the three logs.
        lost: the least number of records that were deleted before they were read.
        forged: records and snapshots of the done log that are invalid.
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
    """Return the start state of a half partition; log an error for each changed log.

    `committed` are the positions and `ids` the current topic ids, each by log.

    If the half or op log has changed, both are read from their beginnings: decisions on new halves may have been read
    and refused as unknown. The done log names settled transactions wherever reading begins. If the done log has
    changed, its content is lost, and reading continues at the positions.
    """
    fates, lost = fates_of(committed, ids), 0
    for log, fate in fates.items():
        found = committed[log]
        if fate is not Fate.INTACT:
            lost += found.low - found.position if fate is Fate.CUT and found.position is not None else 1
            _log.error("%s", found.explained(log, f"{names_of(topics)[log]}:{number}", fate))
    notes, snapshots = done.notes, done.snapshots
    # Its offsets in a replaced log are void: offsets of the new log begin at 0 again.
    if fates[HALF] is Fate.REPLACED:
        notes = [note._replace(half_offset=-1) for note in notes]
    if fates[OP] is Fate.REPLACED:
        notes = [note._replace(op_offset=-1) for note in notes]
        snapshots = [(at, snapshot._replace(note=snapshot.note._replace(op_offset=-1))) for at, snapshot in snapshots]
    reads_on = {DONE: fates[DONE] is Fate.INTACT} | dict.fromkeys((HALF, OP), fates[HALF] is fates[OP] is Fate.INTACT)
    starts = {
        log: found.position if reads_on[log] and found.position is not None else found.low
        for log, found in committed.items()
    }
    ends = {log: found.end for log, found in committed.items()} | {DONE: done.end}
    # Forged notes may name any offset; nothing lies above the ends.
    halves = min(max((note.half_offset for note in notes), default=-1) + 1, ends[HALF])
    ops = min(max((note.op_offset for note in notes), default=-1) + 1, ends[OP])
    state = PartitionState(starts[HALF], starts[OP])
    allowed = [(place, it) for place, it in snapshots if _may_restore(topics, it)]
    if refused := len(snapshots) - len(allowed):
        text = (
            "%s:%d: %d snapshots of transactions are refused: their target is a topic of the store or of Kafka itself; "
            "check who may write to this topic"
        )
        _log.warning(text, topics.done, number, refused)
    state.remember(notes, allowed)
    known = Mark(done.end, halves, ops)
    return RecoveredPartition(
        state, starts, ends, known, {**known_ids(committed), **ids}, lost, len(done.unreadable) + refused
    )


def _may_restore(topics: StoreTopics, snapshot: Snapshot) -> bool:
    """Return whether a snapshot may be published: the rule for halves of the half log holds for its halves, too."""
    return all(topics.may_publish_to(stored.half.topic) for stored in snapshot.halves)
