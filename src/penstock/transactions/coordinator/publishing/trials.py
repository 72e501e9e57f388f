"""What failed before is tried apart from the common transactions, a few topics at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.transactions.coordinator.partitions.counts import Counts
from penstock.transactions.coordinator.partitions.half_partition import HalfPartition
from penstock.transactions.coordinator.publishing.group_commit import Flight, FlightState, GroupCommit
from penstock.transactions.coordinator.publishing.group_gate import GroupGate
from penstock.transactions.coordinator.publishing.publisher import InDoubtError, NotPublishedError, TooLargeError
from penstock.transactions.coordinator.publishing.publisher_slot import CommitResult, PublisherSlot
from penstock.transactions.coordinator.publishing.target_gate import TargetGate, size_of
from penstock.transactions.coordinator.publishing.targets import NOT_KNOWN
from penstock.transactions.coordinator.state.pending.ready_queue import CommitBatch
from penstock.transactions.rationed_log import RationedLog

_log = logging.getLogger("penstock.transactions")

#: Seconds between two tries where the coordinator itself lacks a right.
LACKING_S = 1.0
_NO_END = (
    "the broker cannot end a Kafka transaction there: its max.message.bytes may be smaller than the marker that ends "
    "one; mend that, and restart the broker that leads it"
)


class _Trial(Flight):
    """A slot for what is tried apart, and what is under way there."""

    def __init__(self, slot: PublisherSlot) -> None:
        super().__init__(slot)
        #: What it tried last, until it is known whether that could be ended, and ids that the slot had lost by then.
        self.topic = ""
        self.lost_ids = 0


class Trials:
    """Tries what is set aside. Used by the coordinator's thread; waits for nothing.

    `under_way` returns the targets of the common transaction under way, or in doubt.
    """

    def __init__(
        self,
        slots: Sequence[PublisherSlot],
        *,
        targets: TargetGate,
        owned: Mapping[int, HalfPartition],
        group_metadata: Callable[[], Any],
        gate: GroupGate,
        under_way: Callable[[], set[str]],
        counts: Counts,
        ration: RationedLog,
    ) -> None:
        self._trials = [_Trial(slot) for slot in slots]
        self._targets = targets
        self._quarantine = targets.quarantine
        self._owned = owned
        self._group_metadata = group_metadata
        self._gate = gate
        self._under_way = under_way
        self._counts = counts
        self._ration = ration

    @property
    def slots(self) -> list[PublisherSlot]:
        """The slots that have something to look after."""
        return [one.slot for one in self._trials if not one.is_idle or one.slot.is_used]

    @property
    def is_flying(self) -> bool:
        """Whether a trial is under way."""
        return any(one.state is FlightState.IN_FLIGHT for one in self._trials)

    def close(self, deadline: float, wait_s: float) -> None:
        """Let what is under way end, until a monotonic second, and have the producers closed by their threads."""
        while self.is_flying and time.monotonic() < deadline:
            self.take_results(time.monotonic())
            time.sleep(wait_s)
        for one in self._trials:
            one.slot.close()

    def begin(self, now: float) -> None:
        """Begin to try what is set aside, as far as there are slots for it."""
        waiting: set[str] | None = None
        for trial in self._trials:
            if not trial.is_idle:
                continue
            if waiting is None:
                waiting = {topic for p in self._owned.values() for topic in p.state.queue.set_aside.topics()}
            if not waiting:
                return
            if trial.slot.lost_ids > trial.lost_ids:
                trial.lost_ids = trial.slot.lost_ids
                if trial.topic:
                    self._quarantine.fail(trial.topic, _NO_END, now)
                trial.topic = ""
            if not trial.slot.is_ready:
                # It opens a producer when it is needed first.
                trial.slot.poll(now)
                continue
            # Its last one was ended under the same id: an end that was once too slow for us came through this time.
            self._quarantine.passed(trial.topic, _NO_END, now)
            trial.topic = ""
            topic = self._quarantine.next_topic(waiting, now)
            if topic is None:
                return
            self._begin(trial, topic, now)

    def _begin(self, trial: _Trial, topic: str, now: float) -> None:
        missing = self._targets.missing(topic, now)
        if missing is NOT_KNOWN:
            self._quarantine.postpone(topic, now)
            return
        if missing is not None:
            self._targets.is_absent(topic, missing, now)
            return
        batches = self._chosen(topic, now)
        if not batches:
            self._quarantine.end_try(topic)
            self._quarantine.postpone(topic, now)
            return
        commit_topics = {half.topic for batch in batches.values() for p in batch.decided for half in p.halves}
        if not commit_topics.isdisjoint(self._under_way()):
            # What was there before it entered quarantine goes first.
            self._quarantine.end_try(topic)
            return
        trial.topic = topic
        trial.begin(trial.slot, GroupCommit.of(self._owned, batches, topic), self._group_metadata())

    def _chosen(self, topic: str, now: float) -> dict[int, CommitBatch]:
        """Return what is tried for a topic's sake: what was refused, one alone; or what was not, as many as may be."""
        width = self._quarantine.begin_try(topic, now)
        refused = self._targets.refused_longest(topic) if self._quarantine.retries(topic, now) else None
        if refused is not None:
            number, pending = refused
            is_there = self._owned[number].in_memory([pending], now)
            return {number: CommitBatch([pending], [], -1, -1, moves=False)} if is_there else {}
        batches: dict[int, CommitBatch] = {}
        for number, partition in self._owned.items():
            chosen = partition.in_memory(self._targets.candidates(partition, topic, width), now)
            chosen = self._targets.without_too_large(chosen, now)
            width -= len(chosen)
            if chosen:
                batches[number] = CommitBatch(chosen, [], -1, -1, moves=False)
            if width <= 0:
                break
        return batches

    def take_results(self, now: float) -> None:
        """Take in how trials ended."""
        for trial in self._trials:
            learned = trial.learned()
            if learned is not None:
                commit, found = learned
                self._counts.recoveries += 1
                self._targets.settled(commit.learn(found, self._owned))
                self._quarantine.end_try(commit.topic)
            ended = trial.ended()
            if ended is not None:
                self._ended(trial, *ended, now)

    def _ended(self, trial: _Trial, commit: GroupCommit, result: CommitResult, now: float) -> None:
        topic, error = commit.topic, result.error
        if isinstance(error, InDoubtError):
            _log.warning("%s; its producer is replaced and the done log asked", error)
            self._gate.shut()
            self._quarantine.fail(topic, str(error), now)
            trial.doubt(commit)
            return
        self._quarantine.end_try(topic)
        if error is None:
            names = [pending.half.transaction_id for pending in commit.decided()]
            self._quarantine.succeeded(topic, names, now)
            self._targets.settled(commit.committed())
            self._counts.groups += 1
            self._counts.recoveries += result.is_replaced
            return
        commit.failed()
        if isinstance(error, TooLargeError) and commit.count() == 1:
            for pending in commit.decided():
                self._targets.refuse(pending.half.transaction_id, topic, str(error), now)
        elif error.failed:
            self._refuse_all(commit, error, topic, now)
        else:
            self._failed(commit, error, topic, now)

    def _failed(self, commit: GroupCommit, error: NotPublishedError, topic: str, now: float) -> None:
        """Take in that a trial failed for no message of it."""
        if not error.targets:
            self._gate.shut()
        if error.rights:
            # The topic is not to blame, and the coordinator has said what it lacks.
            self._quarantine.postpone(topic, now + LACKING_S)
            return
        for other, other_why in error.targets.items():
            if other != topic:
                self._quarantine.suspect(other, other_why, now)
                _refile(commit, other)
        if not error.targets or topic in error.targets:
            why = error.targets.get(topic, str(error))
            pause_s = self._quarantine.fail(topic, why, now)
            text = "topic %s takes no message: %s; what is for it waits, the next try is in %g s"
            self._ration.warn(f"target {topic}", text, topic, why, pause_s)

    def _refuse_all(self, commit: GroupCommit, error: NotPublishedError, topic: str, now: float) -> None:
        """Take in which ones the broker refused."""
        for pending in commit.decided():
            why = error.failed.get(pending.half.transaction_id)
            if why is not None:
                is_size = pending.half.transaction_id in error.too_large
                size = max(map(size_of, pending.halves)) if is_size else None
                self._targets.refuse(pending.half.transaction_id, topic, why, now, size)


def _refile(commit: GroupCommit, topic: str) -> None:
    """Have those wait for a topic's sake that go there, too: it was that topic's fault."""
    for partition, batch in commit.batches.values():
        set_aside = partition.state.queue.set_aside
        for pending in batch.decided:
            if pending.half.transaction_id in set_aside and any(half.topic == topic for half in pending.halves):
                set_aside.refile(pending, topic)
