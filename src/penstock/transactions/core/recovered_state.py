"""Recovery: what the done log tells a new owner of a half partition. Pure.

A note records the end of a transaction, or a count of its answered checks. It applies to halves at or below its offset.
An id may have had an earlier life: a message that is brought back from the discarded topic keeps its id. The halves of
its next life lie above the end of the earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.transactions.core.pending import Pending, key_hashes, payload_of, without_payload
from penstock.transactions.wire.done_records import Done, Note, Snapshot, UnloadedPayloads
from penstock.transactions.wire.ops import Verdict


@dataclass(slots=True)
class RecoveredNotes:
    """Notes on halves that will be read again, and places of decisions that will be read again.

    Attributes:
        notes: by transaction id, one for each life of the id that may be read again, by rising offsets.
        places: offset and index of each decision of a settled transaction, with its id.
    """

    notes: dict[str, list[Note]] = field(default_factory=dict)
    places: dict[tuple[int, int], str] = field(default_factory=dict)
    _notes_end: int = 0
    _places_end: int = 0

    def remember(self, notes: Iterable[Note], half_position: int, op_position: int) -> None:
        """Keep what concerns a reader that starts at these positions. Notes come in the order of the done log."""
        for note in notes:
            if note.op_offset >= op_position and note.verdict is not Verdict.UNKNOWN:
                self.places[note.op_offset, note.op_index] = note.transaction_id
                self._places_end = max(self._places_end, note.op_offset + 1)
            if note.half_offset < half_position:
                continue
            self._notes_end = max(self._notes_end, note.half_offset + 1)
            lives = self.notes.setdefault(note.transaction_id, [])
            # A later note replaces a count. An end is final for its life.
            if lives and lives[-1].verdict is Verdict.UNKNOWN:
                lives[-1] = note
            elif not lives or note.half_offset > lives[-1].half_offset:
                lives.append(note)

    def note_on(self, transaction_id: str, offset: int) -> Note | None:
        """Return the note on the half at an offset, which is read now. Forget notes that no later half needs."""
        lives = self.notes.get(transaction_id, ())
        found = next((note for note in lives if note.half_offset >= offset), None)
        self.pass_halves(offset)
        return found

    def pass_halves(self, offset: int) -> None:
        """Forget all notes once the last half that they concern was read."""
        if self.notes and offset + 1 >= self._notes_end:
            self.notes.clear()

    def pass_ops(self, op_position: int) -> None:
        """Forget all places once the last of them was read."""
        if self.places and op_position >= self._places_end:
            self.places.clear()


def live_snapshots(records: Iterable[tuple[int, Done]]) -> list[tuple[int, Snapshot]]:
    """Return the snapshots of transactions that have not ended, each with the offset of its last snapshot.

    The records are those of the done log in its order, with their offsets.
    """
    live: dict[str, tuple[int, Snapshot]] = {}
    for offset, record in records:
        for note in record.notes:
            place, snapshot = live.get(note.transaction_id, (0, None))
            if snapshot is None or note.half_offset < snapshot.note.half_offset:
                continue
            if note.verdict is not Verdict.UNKNOWN:
                del live[note.transaction_id]
            elif snapshot.note.verdict is Verdict.UNKNOWN:
                # A count that was written after the snapshot.
                live[note.transaction_id] = place, snapshot._replace(note=note)
        for snapshot in record.snapshots:
            live[snapshot.note.transaction_id] = offset, snapshot
    return list(live.values())


def without_payloads(record: Done) -> Done:
    """Return a record of the done log without the payloads of its snapshots. They are read again when needed."""
    if not record.snapshots:
        return record
    return Done(record.notes, [_without_payload(snapshot) for snapshot in record.snapshots])


def _without_payload(snapshot: Snapshot) -> Snapshot:
    if snapshot.dropped is not None:
        return snapshot
    halves = [stored.half for stored in snapshot.halves]
    dropped = UnloadedPayloads(sum(map(payload_of, halves)), key_hashes(halves))
    stubs = tuple(stored._replace(half=without_payload(stored.half)) for stored in snapshot.halves)
    return Snapshot(snapshot.note, stubs, dropped)


def restored(place: int, snapshot: Snapshot) -> Pending:
    """Return the pending transaction of a snapshot. `place` is the offset of the snapshot in the done log."""
    note = snapshot.note
    # The half that was read first has the lowest offset; the parts have their own order.
    halves = sorted(snapshot.halves, key=lambda half: half.offset)
    first = halves[0]
    pending = Pending(first.half, first.offset, first.birth_ms)
    for offset, _, half in halves[1:]:
        pending.add_part(offset, half)
    if snapshot.dropped is not None:
        pending.payload_bytes, pending.dropped = snapshot.dropped
    pending.last_offset = note.half_offset
    pending.remember_checks(note)
    pending.snapshot_at = place
    if note.verdict is not Verdict.UNKNOWN:
        pending.verdict = note.verdict
        pending.decided_at, pending.decided_index = note.op_offset, note.op_index
    return pending
