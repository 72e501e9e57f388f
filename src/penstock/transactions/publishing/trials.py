"""What failed before is tried apart from the common transactions, a few topics at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.transactions.core.commit_batch import DecidedBatch
from penstock.transactions.core.pending import Pending
from penstock.transactions.publishing.flight import Backlog, Flight, FlightState, GroupCommit
from penstock.transactions.publishing.publisher import InDoubtError, NotPublishedError, Proof, TooLargeError
from penstock.transactions.publishing.publisher_slot import CommitResult, PublisherSlot
from penstock.transactions.publishing.targets import NOT_KNOWN, BrokerGate, TargetGate
from penstock.transactions.rationed_log import RationedLog

_log = logging.getLogger("penstock.transactions")

#: Seconds between two tries where the coordinator itself lacks a right.
LACKING_S = 1.0
#: Bytes of messages that are tried together.
_MOST_BYTES = 4 << 20
_NO_END = (
    "the broker cannot end a Kafka transaction there: its max.message.bytes may be smaller than the marker that ends "
    "one; mend that, and restart the broker that leads it"
)


#: Proves the ownership of the partitions that a Kafka transaction settles something of, by what goes into it for that.
Prove = Callable[[Mapping[int, Any]], Proof | None]


class _Trial(Flight):
    """A slot for what is tried apart, and what is under way there."""

    def __init__(self, slot: PublisherSlot) -> None:
        super().__init__(slot)
        #: What it tried last, until it is known whether that could be ended, and ids that the slot had lost by then.
        self.topic = ""
        self.lost_ids = 0


class Trials:
    """Tries what is set aside. Used by the engine's thread; waits for nothing.

    `under_way` returns the targets of the common transaction under way, or in doubt.
    """

    def __init__(
        self,
        slots: Sequence[PublisherSlot],
        *,
        targets: TargetGate,
        owned: Mapping[int, Backlog],
        prove: Prove,
        gate: BrokerGate,
        under_way: Callable[[], set[str]],
        ration: RationedLog,
    ) -> None:
        self._trials = [_Trial(slot) for slot in slots]
        self._targets = targets
        self._quarantine = targets.quarantine
        self._owned = owned
        self._prove = prove
        self._gate = gate
        self._under_way = under_way
        self._ration = ration
        #: Kafka transactions that were committed; ends that were in doubt, or may come twice.
        self.groups = self.recoveries = 0

    @property
    def slots(self) -> list[PublisherSlot]:
        """The slots that have something to look after."""
        return [trial.slot for trial in self._trials if not trial.is_idle or trial.slot.is_used]

    @property
    def commits(self) -> list[GroupCommit]:
        """What is under way or in doubt."""
        return [trial.commit for trial in self._trials if trial.commit is not None]

    @property
    def is_flying(self) -> bool:
        """Whether a trial is under way."""
        return any(trial.state is FlightState.IN_FLIGHT for trial in self._trials)

    def close(self, deadline: float, wait_s: float) -> None:
        """Let what is under way end, until a monotonic second, and have the producers closed by their threads."""
        while self.is_flying and time.monotonic() < deadline:
            self.take_results(time.monotonic())
            time.sleep(wait_s)
        for trial in self._trials:
            trial.slot.close()

    def begin(self, now: float) -> None:
        """Begin to try what is set aside, as far as there are slots for it."""
        waiting: set[str] | None = None
        for trial in self._trials:
            if not trial.is_idle:
                continue
            if waiting is None:
                waiting = {topic for backlog in self._owned.values() for topic in backlog.set_aside.topics()}
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
        width = self._quarantine.begin_try(topic, now)
        candidates = self._candidates(topic, width, now)
        topics = {target for some in candidates.values() for waiting in some for target in waiting.topics}
        if not topics.isdisjoint(self._under_way()):
            # What was there before it entered quarantine goes first.
            self._quarantine.end_try(topic)
            return
        try:
            batches = self._batches(candidates)
        except Exception:
            # The store fails for a moment, and the topic is tried again.
            self._quarantine.end_try(topic)
            raise
        if not batches:
            self._quarantine.end_try(topic)
            self._quarantine.postpone(topic, now)
            return
        trial.topic = topic
        commit = GroupCommit.of(self._owned, batches, topic)
        trial.begin(trial.slot, commit, self._prove(batches))

    def _candidates(self, topic: str, width: int, now: float) -> dict[int, list[Pending]]:
        """Return what is tried for a topic's sake: what was refused, one alone; or what was not, as many as may be."""
        refused = self._targets.refused_longest(topic) if self._quarantine.retries(topic, now) else None
        if refused is not None:
            number, waiting = refused
            return {number: [waiting]}
        found: dict[int, list[Pending]] = {}
        for number, backlog in self._owned.items():
            some = self._targets.candidates(backlog, topic, width)
            width -= len(some)
            if some:
                found[number] = some
            if width <= 0:
                break
        return found

    def _batches(self, candidates: Mapping[int, list[Pending]]) -> dict[int, DecidedBatch]:
        """Return those whose messages are there, as far as they go together: one, or so many bytes."""
        batches: dict[int, DecidedBatch] = {}
        chosen: list[int] = []

        def fits(entry: Pending) -> bool:
            chosen.append(entry.payload_bytes)
            return len(chosen) == 1 or sum(chosen) <= _MOST_BYTES

        for number, some in candidates.items():
            batch = self._owned[number].trial(some, fits)
            if batch is not None:
                batches[number] = batch
        return batches

    def take_results(self, now: float) -> None:
        """Take in how trials ended."""
        for trial in self._trials:
            learned = trial.learned()
            if learned is not None:
                commit, found = learned
                self.recoveries += 1
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
            names = [entry.transaction_id for entry in commit.decided()]
            self._quarantine.succeeded(topic, names, now)
            self._targets.settled(commit.committed(result.done_ends))
            self.groups += 1
            self.recoveries += result.is_replaced
            return
        if isinstance(error, TooLargeError) and commit.count() == 1:
            for entry in commit.decided():
                self._targets.refuse(entry.transaction_id, topic, str(error), now)
        elif error.failed:
            self._refuse_all(commit, error, topic, now)
        else:
            self._failed(commit, error, topic, now)
        commit.failed()

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
        for entry in commit.decided():
            refused = error.failed.get(entry.transaction_id)
            if refused is not None:
                self._targets.refuse(entry.transaction_id, topic, refused[1], now)


def _refile(commit: GroupCommit, topic: str) -> None:
    """Have those wait for a topic's sake that go there, too: it was that topic's fault."""
    for backlog, batch in commit.batches.values():
        for entry in batch.decided:
            if any(message.topic == topic for message in entry.addressed):
                backlog.set_aside.refile(entry.transaction_id, topic)
