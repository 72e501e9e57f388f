"""One Kafka transaction of a coordinator under way: what several partitions settle in it, and how it stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from penstock.transactions.coordinator.partitions.half_partition import HalfPartition
from penstock.transactions.coordinator.publishing.publisher_slot import CommitResult, PublisherSlot
from penstock.transactions.coordinator.recovery.recovered_partition import DoneRead
from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.coordinator.state.pending.ready_queue import CommitBatch


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """What one Kafka transaction settles.

    Attributes:
        batches: by half partition, with the objects they were taken from: by the time it ends a partition may be lost,
            or lost and taken again.
        done_from: where the done logs ended, or before, as it began: its records come behind.
        topic: for whose sake it is tried apart; empty for the common one.
    """

    batches: Mapping[int, tuple[HalfPartition, CommitBatch]]
    done_from: Mapping[int, int]
    topic: str = ""

    @classmethod
    def of(cls, owned: Mapping[int, HalfPartition], batches: Mapping[int, CommitBatch], topic: str = "") -> GroupCommit:
        """Return what these batches are together, marked as under way."""
        made = cls(
            {number: (owned[number], batch) for number, batch in batches.items()},
            {number: owned[number].done_end for number in batches},
            topic,
        )
        made._mark(in_flight=True)
        return made

    def count(self) -> int:
        """Return how many transactions it settles."""
        return sum(len(batch.decided) for _, batch in self.batches.values())

    def decided(self) -> Iterable[Pending]:
        """Yield the transactions that it settles."""
        return (pending for _, batch in self.batches.values() for pending in batch.decided)

    def topics(self) -> set[str]:
        """Return the targets of its messages."""
        return {half.topic for pending in self.decided() for half in pending.halves}

    def size_bytes(self) -> int:
        """Return how large the messages are that it publishes."""
        return sum(pending.payload_bytes for pending in self.decided())

    def failed(self) -> None:
        """Take in that it was aborted."""
        self._mark(in_flight=False)
        self._judge_held()

    def _judge_held(self) -> None:
        """Have the decisions judged that waited for its end."""
        for partition, batch in self.batches.values():
            partition.judge_held(batch)

    def _mark(self, *, in_flight: bool) -> None:
        """Note on all that it settles or takes snapshots of that it is under way, or is not any more."""
        for partition, batch in self.batches.values():
            for pending in batch.decided:
                pending.in_flight = in_flight
            for snapshot in batch.snapshots:
                pending_then = partition.state.pending.get(snapshot.note.transaction_id)
                if pending_then is not None:
                    pending_then.in_flight = in_flight

    def committed(self) -> Iterable[str]:
        """Take in that it was committed; return the ids of what it settled."""
        self._mark(in_flight=False)
        for partition, batch in self.batches.values():
            partition.settled(batch)
        self._judge_held()
        return (pending.half.transaction_id for pending in self.decided())

    def learn(self, found: Mapping[int, DoneRead], owned: Mapping[int, HalfPartition]) -> list[str]:
        """Take in what the done logs say of it after its end was in doubt; return the ids of what is settled.

        Records of others may be there that are under way, or have ended meanwhile: those take in their own.
        """
        self._mark(in_flight=False)
        settled: list[str] = []
        for number, (partition, batch) in self.batches.items():
            if owned.get(number) is not partition:
                continue
            done = found[number]
            ids = {one.half.transaction_id for one in (*batch.decided, *batch.answered)}
            snapshotted = {snapshot.note.transaction_id for snapshot in batch.snapshots}
            outcome = partition.state.settle(
                [note for note in done.notes if note.transaction_id in ids],
                [one for one in done.snapshots if one[1].note.transaction_id in snapshotted],
            )
            partition.settled_in_doubt(done.end, outcome)
            settled += [pending.half.transaction_id for pending in outcome[0]]
        self._judge_held()
        return settled


class FlightState(Enum):
    """How a Kafka transaction stands."""

    #: There is none.
    IDLE = "idle"
    IN_FLIGHT = "in flight"
    #: Its end is not known: a successor of its producer is being opened, and the done log read.
    IN_DOUBT = "in doubt"


class Flight:
    """At most one Kafka transaction at a time, from its begin until it is known what became of it.

    Used by the coordinator's thread alone; waits for nothing, save where a time is given.
    """

    def __init__(self, slot: PublisherSlot) -> None:
        #: The producer in use.
        self.slot = slot
        self.state = FlightState.IDLE
        #: What is under way, or in doubt.
        self.commit: GroupCommit | None = None

    @property
    def is_idle(self) -> bool:
        """Whether another one may begin."""
        return self.state is FlightState.IDLE

    def begin(self, slot: PublisherSlot, commit: GroupCommit, group_metadata: Any) -> None:
        """Begin a Kafka transaction."""
        self.slot, self.commit, self.state = slot, commit, FlightState.IN_FLIGHT
        slot.begin({number: batch for number, (_, batch) in commit.batches.items()}, group_metadata)

    def ended(self, timeout_s: float = 0.0) -> tuple[GroupCommit, CommitResult] | None:
        """Return what was under way and how it ended, once; None while that is not known."""
        if self.state is not FlightState.IN_FLIGHT or self.commit is None:
            return None
        result = self.slot.result(timeout_s)
        if result is None:
            return None
        commit, self.commit, self.state = self.commit, None, FlightState.IDLE
        return commit, result

    def doubt(self, commit: GroupCommit) -> None:
        """Have the done logs read for one that ended in doubt."""
        self.commit, self.state = commit, FlightState.IN_DOUBT
        self.slot.ask(commit.done_from)

    def learned(self) -> tuple[GroupCommit, Mapping[int, DoneRead]] | None:
        """Return one that was in doubt and what the done logs say, once; None while they were not read."""
        if self.state is not FlightState.IN_DOUBT or self.commit is None:
            return None
        found = self.slot.answer()
        if found is None:
            return None
        commit, self.commit, self.state = self.commit, None, FlightState.IDLE
        return commit, found
