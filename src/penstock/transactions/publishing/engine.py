"""The engine: publishes the decided transactions of all partitions that a store owns, for every store.

One common Kafka transaction runs at a time. While it is under way, the next decisions arrive. So the size of a group
follows the load, up to what ends within the target latency. Separately, trials publish what failed before (`trials`).
Each Kafka transaction has a slot with its own thread, and the engine never waits for it. The store's thread calls the
engine in rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.clients.gc_pause import CollectionThreshold
from penstock.transactions.core.commit_batch import DecidedBatch
from penstock.transactions.publishing.batch_limit import BatchLimit
from penstock.transactions.publishing.group_commit import Backlog, GroupCommit
from penstock.transactions.publishing.publisher import (
    InDoubtError,
    NotPublishedError,
    Proof,
    PublishingClients,
    TooLargeError,
)
from penstock.transactions.publishing.publisher_slot import CommitResult, PublisherSlot
from penstock.transactions.publishing.targets import BrokerGate
from penstock.transactions.publishing.trials import LACKING_S, Trials
from penstock.transactions.rationed_log import RationedLog

#: Seconds between two looks at a Kafka transaction under way.
IN_FLIGHT_S = 0.005
#: Seconds between two rounds if nothing wakes the store's thread: without work, and while something waits for a time.
_IDLE_INTERVAL_S = 1.0
_WAITING_INTERVAL_S = 0.05
_RETRY_DELAY_S = 0.2
#: Failures in a row without a named cause, after which all targets of the group are tried separately.
_MAX_UNNAMED = 3


#: Returns the proof that the owner owns the partitions in a Kafka transaction, given their batches.
Prove = Callable[[Mapping[int, Any]], Proof | None]


class Engine:
    """Publishes the partitions in `owned`, which their owner changes. Used by one thread; it never waits for Kafka.

    Args:
        ask: returns once the brokers that a Kafka transaction needs have answered, or raises `KafkaException`.
        target_latency_s: seconds from the beginning of a group until its end is answered, at most.
        slots: the slots for common transactions take turns. After the end of a Kafka transaction the broker writes its
            markers and refuses the next beginning of the same producer for some milliseconds; and a failed producer is
            replaced while the others go on. The slots with `is_trial` run trials.
        prove: returns the proof of ownership for the broker.
    """

    def __init__(
        self,
        owned: Mapping[int, Backlog],
        clients: PublishingClients,
        ask: Callable[[], object],
        target_latency_s: float,
        *,
        slots: Sequence[PublisherSlot],
        prove: Prove = lambda _batches: None,
    ) -> None:
        self._owned = owned
        self._all_slots = slots
        self._slots = [slot for slot in slots if not slot.is_trial]
        self._trial_slots = [slot for slot in slots if slot.is_trial]
        self._prove = prove
        self._gate = BrokerGate(ask, clients.left)
        self._limit = BatchLimit(target_latency_s)
        self._collection = CollectionThreshold()
        self._ration = RationedLog()
        # The slot of the last common transaction, and the index of the next slot.
        self._slot = self._slots[0]
        self._next = 0
        # Targets of a common transaction that failed, until each partition has chosen its next batch: trials must not
        # pass the messages that it gave back.
        self._given_back: set[str] = set()
        # Monotonic second of the next common transaction at the earliest, after a failure.
        self._not_before = 0.0
        self._unnamed = 0
        self.targets = clients.targets
        self._trials = Trials(clients.targets, owned, clients.discarded)
        #: What is tried separately.
        self.quarantine = self._trials.quarantine
        # By slot: the topic of the last trial, until its end in Kafka is known, and the number of lost ids then.
        self._tried: dict[PublisherSlot, tuple[str, int]] = {}
        #: Committed Kafka transactions; ends that were in doubt or may be repeated.
        self.groups = self.recoveries = 0

    @property
    def is_idle(self) -> bool:
        """Whether no common transaction is under way or in doubt."""
        return self._slot.commit is None

    @property
    def is_in_flight(self) -> bool:
        """Whether a common transaction is under way."""
        return self._slot.is_in_flight

    @property
    def is_busy(self) -> bool:
        """Whether any Kafka transaction is under way: it ends by itself, within its limits."""
        return any(slot.is_in_flight for slot in self._all_slots)

    @property
    def _commits(self) -> list[GroupCommit]:
        """The commits that are under way or in doubt."""
        return [slot.commit for slot in self._all_slots if slot.commit is not None]

    def is_ready(self, now: float) -> bool:
        """Tell whether a common transaction may begin."""
        may = self.is_idle and self._gate.is_open and self.targets.were_heard
        return may and now >= self._not_before and self._slots[self._next].is_ready

    def is_crowded(self, ready: int) -> bool:
        """Tell whether the next Kafka transaction will be full, given how many transactions are ready."""
        commit = self._slot.commit
        under_way = commit.count() if commit is not None and self.is_in_flight else 0
        return ready - under_way >= self._limit.decisions

    @property
    def decisions(self) -> int:
        """Most decisions of the next Kafka transaction."""
        return self._limit.decisions

    def slow_call(self) -> tuple[str, float]:
        """Return the call that hangs for longest, and its age in seconds; an empty name if none hangs."""
        return max((slot.slow_call() for slot in self._all_slots), key=lambda call: call[1])

    def has_part(self, number: int) -> bool:
        """Tell whether a partition takes part in a Kafka transaction that is under way or in doubt."""
        return any(number in commit.batches for commit in self._commits)

    def floor(self, number: int) -> int:
        """Return the lowest offset of a partition's done log at which an open Kafka transaction may write."""
        floors = (commit.done_from[number] for commit in self._commits if number in commit.done_from)
        return min(floors, default=self._owned[number].done_end)

    def wait_s(self) -> float:
        """Return the seconds until the next round if nothing wakes the owner before."""
        is_calm = self.is_idle and self._gate.is_open and self._slots[self._next].is_ready
        return (
            _IDLE_INTERVAL_S
            if is_calm and not any(backlog.set_aside for backlog in self._owned.values())
            else _WAITING_INTERVAL_S
        )

    def shut(self) -> None:
        """Begin nothing before the brokers have answered: they seem to have been away."""
        self._gate.shut()

    def poll(self, now: float) -> None:
        """Open producers, and take the outcomes of transactions in doubt and of trials."""
        # The slots for trials open when they are first needed.
        slots = [*self._slots, *(slot for slot in self._trial_slots if slot.is_used)]
        if self._gate.poll(now):
            # A producer from before an absence of the group's coordinator hangs when it next needs it (librdkafka 2.16,
            # seen after each restart of a broker).
            for slot in slots:
                slot.renew()
        for slot in slots:
            slot.poll(now)
        for commit, found in filter(None, (slot.learned() for slot in self._all_slots)):
            self.recoveries += 1
            self._trials.settled(commit.learn(found, self._owned))
            self.quarantine.end_try(commit.topic)
        # Use the next slot that is ready, while failed producers are replaced.
        if not self.is_in_flight and not self._slots[self._next].is_ready:
            self._next = next((n for n, slot in enumerate(self._slots) if slot.is_ready), self._next)
        self._take_trials(now)

    def begin(self, now: float) -> bool:
        """Begin the next common transaction and trials, if possible. Tell whether a common one has begun."""
        self._collection.note_in_flight(sum(len(backlog.queue.all) for backlog in self._owned.values()), now)
        self._trials.release(now)
        has_begun = self.is_ready(now) and self._publish(self._slots[self._next])
        if self._gate.is_open:
            self._begin_trials(now)
        return has_begun

    def close(self, limit_s: float) -> None:
        """Let open Kafka transactions end within so many seconds, then have each thread close its producer."""
        deadline = time.monotonic() + limit_s
        while self.is_busy and time.monotonic() < deadline:
            if not self.take_result(IN_FLIGHT_S):
                time.sleep(IN_FLIGHT_S)
            self._take_trials(time.monotonic())
        for slot in self._all_slots:
            slot.close()
        self._collection.restore()

    def _publish(self, slot: PublisherSlot) -> bool:
        """Begin the next common transaction, if there is anything to publish."""
        batches: dict[int, DecidedBatch] = {}
        # Each partition has a share of the group, so that a full partition leaves room for the others.
        shares = max(1, len(self._owned))
        limit, room_bytes = max(1, self._limit.decisions // shares), max(1, self._limit.bytes // shares)
        for number, backlog in self._owned.items():
            batch = backlog.next_batch(limit, self._trials.blocking, room_bytes)
            if batch is not None:
                batches[number] = batch
                if len(batch.decided) >= self._limit.decisions:
                    # The limit may be one, if two transactions do not fit into the client's buffer.
                    break
        else:
            self._given_back = set()
        if batches:
            self._slot = slot
            slot.begin(GroupCommit.of(self._owned, batches), self._prove(batches))
        return bool(batches)

    def _begin_trials(self, now: float) -> None:
        """Begin trials of set-aside transactions, as far as there are slots."""
        if not (waiting := self._trials.waiting()):
            return
        for slot in self._trial_slots:
            if slot.commit is not None:
                continue
            last, lost_ids = self._tried.get(slot, ("", 0))
            if last and (slot.is_ready or slot.lost_ids > lost_ids):
                del self._tried[slot]
                self._trials.ended(last, now, could_end=slot.lost_ids == lost_ids)
            if not slot.is_ready:
                # A slot for trials opens a producer when it is first needed.
                slot.poll(now)
                continue
            commit = None
            while commit is None and (topic := self.quarantine.next_topic(waiting, now)) is not None:
                # A topic with nothing to try now does not delay the trials of others.
                waiting.discard(topic)
                commit = self._trials.next_commit(topic, self._targets_under_way, now)
            if commit is None:
                return
            self._tried[slot] = commit.topic, slot.lost_ids
            slot.begin(commit, self._prove({number: batch for number, (_, batch) in commit.batches.items()}))

    def _targets_under_way(self) -> set[str]:
        commit = self._slot.commit
        return self._given_back if commit is None else self._given_back | commit.topics()

    def take_result(self, timeout_s: float = 0.0) -> bool:
        """Take the outcome of the common transaction, if it ends within the time. Tell whether it has ended."""
        result = self._slot.result(timeout_s)
        if result is None:
            return False
        commit, error = result.commit, result.error
        self._next = (self._next + 1) % len(self._slots)
        if error is None:
            self._unnamed = 0
            self._committed(result)
            self._limit.measured(commit.count(), commit.size_bytes(), result.took_s)
        elif isinstance(error, InDoubtError):
            self._gate.shut()
        else:
            self._given_back |= commit.topics()
            self._not_published(error, commit)
            commit.failed()
        return True

    def _take_trials(self, now: float) -> None:
        """Take the outcomes of trials."""
        for slot in self._trial_slots:
            result = slot.result()
            if result is None:
                continue
            commit, error = result.commit, result.error
            if error is None:
                self._trials.succeeded(commit, now)
                self._committed(result)
                continue
            if not (error.blamed or isinstance(error, TooLargeError)):
                self._gate.shut()
            if isinstance(error, InDoubtError):
                # The trial goes on until the done log is read.
                self.quarantine.fail(commit.topic, str(error), now)
            else:
                self._trials.failed(commit, error, now)
                commit.failed()

    def _committed(self, result: CommitResult) -> None:
        self.recoveries += result.is_replaced
        self._trials.settled(result.commit.committed(result.done_ends))
        self.groups += result.commit.count() > 0

    def _not_published(self, error: NotPublishedError, commit: GroupCommit) -> None:
        """Keep the cause of a failure out of the next common transactions."""
        now = time.monotonic()
        if error.rights:
            # Not the targets' fault. The coordinator has logged the missing right.
            self._gate.shut()
            self._not_before = now + LACKING_S
            return
        if isinstance(error, TooLargeError):
            if not self._limit.refused(commit.count(), commit.size_bytes()):
                self._trials.refuse_too_large(commit, error, now)
            return
        named = error.blamed
        if not named:
            self._ration.warn("aborted", "%s; it is tried again", error)
            self._gate.shut()
            self._not_before = now + _RETRY_DELAY_S
            self._unnamed += 1
            if self._unnamed < _MAX_UNNAMED:
                return
            named = dict.fromkeys(commit.topics(), str(error))
            self._unnamed = 0
        self._trials.blame(named, now)
