"""The coordinator's loop: read what is there, check what is due, publish what is decided.

One thread does all of it, round by round, save the Kafka transactions themselves: they have threads of their own, in
`publishing.publisher_slot`, which the loop never waits for. There is one common transaction at a time; while it is
under way the next decisions are read, so the size of a group adapts to the load by itself, up to what ends within the
target latency. Beside it, what failed before is tried apart (`publishing.trials`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from confluent_kafka import KafkaError, Message
from confluent_kafka.admin import AdminClient

from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.gc_pause import collection_put_off
from penstock.clients.kafka_errors import ErrorKind, kind_of, reason
from penstock.clients.requests.topics import hidden_topics, partition_counts
from penstock.clients.rights import Operation, group_right, topic_right
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.transactions.coordinator.checks.check_scheduler import CheckScheduler
from penstock.transactions.coordinator.partitions.counts import Counts
from penstock.transactions.coordinator.partitions.half_partition import HalfPartition
from penstock.transactions.coordinator.partitions.log_upkeep import LogUpkeep
from penstock.transactions.coordinator.partitions.membership import Membership
from penstock.transactions.coordinator.publishing.group_commit import Flight, FlightState, GroupCommit
from penstock.transactions.coordinator.publishing.group_gate import GroupGate
from penstock.transactions.coordinator.publishing.publisher import InDoubtError, NotPublishedError, TooLargeError
from penstock.transactions.coordinator.publishing.publisher_slot import SLOW_S, CommitResult, PublisherSlot
from penstock.transactions.coordinator.publishing.target_gate import TargetGate
from penstock.transactions.coordinator.publishing.targets import Targets
from penstock.transactions.coordinator.publishing.trials import LACKING_S, Trials
from penstock.transactions.coordinator.state.pending.batch_limit import BatchLimit
from penstock.transactions.coordinator.state.pending.ready_queue import CommitBatch
from penstock.transactions.coordinator.status import Status
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.wire.topics import StoreTopics

_log = logging.getLogger("penstock.transactions")

#: Seconds the loop waits for records before it serves its membership again.
_IDLE_S = 0.05
#: Seconds it waits for records while more is to be published, but not before a while is over.
_BUSY_S = 0.001
#: Seconds between two reads while a Kafka transaction is under way.
_IN_FLIGHT_S = 0.005
#: Seconds between two status records.
_STATUS_S = 1.0
_ANSWER_S = 5.0
_BACK_OFF_S = 0.2
#: Seconds that transactions under way may take to end when the coordinator stops.
_LAST_S = 8.0
#: Failures in a row that nobody was named for, after which all targets of the group are tried apart.
_UNNAMED = 3


class CoordinatorLoop:
    """What the coordinator's thread does. Used by that thread alone.

    Args:
        slots: for the common transactions, used one after the other: after a Kafka transaction has ended the broker
            writes its markers, and refuses the next begin of the same producer for some milliseconds; and one that
            failed is made anew while the others go on.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        topics: StoreTopics,
        admin: AdminClient,
        membership: Membership,
        slots: Sequence[PublisherSlot],
        trial_slots: Sequence[PublisherSlot],
        gate: GroupGate,
        left: LeftBehind,
        limit: BatchLimit,
        checks: CheckScheduler,
        status: Callable[[Status, float], None],
        counts: Counts,
        ration: RationedLog,
        rights: MissingRights,
    ) -> None:
        self._topics = topics
        self._membership = membership
        self._owned = membership.owned
        self._slots = slots
        self._gate = gate
        self._left = left
        self._limit = limit
        # The common transaction, and the slot for the next.
        self._flight = Flight(slots[0])
        self._next = 0
        # Partitions beside whose positions the name of this coordinator stands.
        self._claimed: dict[int, HalfPartition] = {}
        # Nothing is published before, in monotonic seconds: what was aborted is not tried again at once.
        self._not_before = 0.0
        self._unnamed = 0
        self._checks = checks
        self._write_status = status
        self._status_at = 0.0
        self._counts = counts
        self._ration = ration
        self._rights = rights
        targets = Targets(
            lambda: partition_counts(admin, bootstrap_servers, _ANSWER_S),
            topics.prefix,
            lambda missed: self._hidden(hidden_topics(admin, missed, _ANSWER_S)),
        )
        self._targets = TargetGate(topics, targets, self._owned, ration)
        self._trials = Trials(
            trial_slots,
            targets=self._targets,
            owned=self._owned,
            group_metadata=membership.group_metadata,
            gate=gate,
            under_way=self._targets_under_way,
            counts=counts,
            ration=ration,
        )
        self._upkeep = LogUpkeep(admin, topics, membership.logs, counts, ration, rights=rights, begun=time.monotonic())

    def round(self) -> None:
        """Do once what the coordinator does for ever."""
        self._poll_slots(time.monotonic())
        # Nothing can be published before it ends, so what comes meanwhile is read in larger pieces.
        self._take_result(_IN_FLIGHT_S)
        self._membership.serve()
        if self._membership.was_cut_off():
            self._gate.shut()
        # What waits to be published goes first: whoever reads all that is there reads for ever, and publishes little.
        if not self._is_crowded():
            self._read(self._read_timeout_s())
        now = time.monotonic()
        self._upkeep.look(self._owned, now)
        self._targets.targets.look_now_and_then(now)
        for partition in self._owned.values():
            self._checks.run(partition, now)
        self._targets.release(now)
        self._begin_next(now)
        self._update_status(now)

    def _update_status(self, now: float) -> None:
        """Write down what hinders publication, where operators look."""
        if now - self._status_at >= _STATUS_S:
            self._status_at = now
            quarantine = self._targets.quarantine
            self._write_status(
                Status(
                    self._slots[0].name,
                    int(time.time() * 1000),
                    (*self._owned, *self._membership.recoveries.partitions),
                    self._counts.slow_call,
                    self._counts.slow_call_s,
                    self._counts.left_behind,
                    quarantine.reasons(),
                    quarantine.refusals(),
                    self._rights.missing(),
                    self._checks.unasked(self._owned),
                ),
                now,
            )

    def _begin_next(self, now: float) -> None:
        """Begin what is to be published next, and look after the logs in between."""
        # Not while a common transaction is under way or in doubt: upkeep takes the end of the done log for known, and
        # what that transaction wrote there would never be looked for.
        if self._flight.is_idle:
            self._upkeep.maintain(self._owned, now)
            slot = self._slots[self._next]
            is_heard = self._targets.targets.were_heard
            if self._gate.is_open and is_heard and now >= self._not_before and slot.is_ready:
                with collection_put_off():
                    self._publish(slot)
        if self._gate.is_open:
            self._trials.begin(now)

    def close(self) -> None:
        """Let what is under way end, for a while, and have the producers closed by their threads."""
        deadline = time.monotonic() + _LAST_S
        while self._flight.state is FlightState.IN_FLIGHT and time.monotonic() < deadline:
            self._take_result(_IN_FLIGHT_S)
        self._trials.close(deadline, _IN_FLIGHT_S)
        for slot in self._slots:
            slot.close()
        self._gate.close()

    def _poll_slots(self, now: float) -> None:
        """Open producers that have to be, learn what became of transactions in doubt, and tell of calls that hang."""
        slots = [*self._slots, *self._trials.slots]
        if self._gate.poll(now):
            # A producer that was there while the group's coordinator was away hangs when it needs it next (librdkafka
            # 2.16, seen after each restart of a broker).
            for slot in slots:
                slot.renew()
        for slot in slots:
            slot.poll(now)
        # Whichever is ready next; one that failed is made anew meanwhile.
        if self._flight.state is not FlightState.IN_FLIGHT and not self._slots[self._next].is_ready:
            self._next = next((n for n, slot in enumerate(self._slots) if slot.is_ready), self._next)
        learned = self._flight.learned()
        if learned is not None:
            commit, found = learned
            self._counts.recoveries += 1
            self._targets.settled(commit.learn(found, self._owned))
        self._trials.take_results(now)
        self._counts.left_behind = self._left.hanging
        calls = [slot.slow_call() for slot in slots]
        recovering = self._membership.recoveries.slow_call(now)
        if recovering[1] >= SLOW_S:
            calls.append(recovering)
        self._counts.slow_call, self._counts.slow_call_s = max(calls, key=lambda one: one[1], default=("", 0.0))

    def _read_timeout_s(self) -> float:
        """Return how long to wait for records."""
        if self._flight.state is FlightState.IN_FLIGHT:
            return 0
        if not self._flight.is_idle or self._trials.is_flying:
            return _IN_FLIGHT_S
        if not any(p.state.has_work for p in self._owned.values()):
            return _IDLE_S
        is_late = time.monotonic() < self._not_before or not (self._gate.is_open and self._slots[self._next].is_ready)
        return _BUSY_S if is_late else 0

    def _is_crowded(self) -> bool:
        """Tell whether as much as the next Kafka transaction takes waits for it already."""
        commit = self._flight.commit
        under_way = commit.count() if commit is not None and self._flight.state is FlightState.IN_FLIGHT else 0
        return sum(p.state.queue.ready for p in self._owned.values()) - under_way >= self._limit.decisions

    def _read(self, timeout_s: float) -> None:
        # In pieces of what one Kafka transaction settles: what is read beyond that waits here instead of in the logs.
        limit = self._limit.decisions
        undecided = sum(len(p.state.pending) - len(p.state.decided) for p in self._owned.values())
        for_halves = any(p.feed.waits_for_halves for p in self._owned.values())
        records = self._membership.logs.read(timeout_s, limit, for_halves=for_halves, full=undecided >= 2 * limit)
        with collection_put_off():
            self._feed(records, time.monotonic())

    def _feed(self, records: Iterable[Message], now: float) -> None:
        half_topic = self._topics.half
        for message in records:
            error = message.error()
            if error is not None:
                kind = kind_of(error)
                self._report_not_read(message.topic() or "", error, kind)
                if kind is ErrorKind.OUT_OF_RANGE:
                    # The reader stands still until it is assigned where to go on.
                    self._upkeep.stands_still(message, now)
                continue
            partition = self._owned.get(message.partition() or 0)
            if partition is None:
                continue
            if message.topic() == half_topic:
                partition.feed.half(message, now)
            else:
                partition.feed.op(message, now)
        for partition in self._owned.values():
            partition.note_progress(now)

    def _report_not_read(self, topic: str, error: KafkaError, kind: ErrorKind) -> None:
        if kind in {ErrorKind.MISSING_RIGHT, ErrorKind.GROUP}:
            is_group = kind is ErrorKind.GROUP
            right = group_right(self._topics.coordinators) if is_group else topic_right(Operation.READ, topic)
            self._rights.refused(f"the log {topic or self._topics.half} cannot be read", right)
        else:
            self._ration.warn("read", "the half and op logs cannot be read: %s; trying again", reason(error))

    def _hidden(self, topics: Iterable[str]) -> Mapping[str, str]:
        return {one: self._rights.lacks(topic_right(Operation.WRITE, one)) for one in topics}

    def _publish(self, slot: PublisherSlot) -> None:
        """Begin the next common transaction, if there is something for it."""
        batches: dict[int, CommitBatch] = {}
        # Each partition has its part of the group: one that is crowded does not keep the others out.
        parts = max(1, len(self._owned))
        limit, room_bytes = max(1, self._limit.decisions // parts), max(1, self._limit.bytes // parts)
        for number, partition in self._owned.items():
            batch = partition.next_batch(limit, self._targets.blocking, room_bytes)
            if batch is not None:
                batches[number] = batch
                if len(batch.decided) >= self._limit.decisions:
                    # It may be that not even two of them fit into the client's buffer.
                    break
            elif self._claimed.get(number) is not partition:
                # Nothing to settle: what is written is who owns it now, for those who may have to recover it.
                batches[number] = partition.claim()
        if batches:
            self._flight.begin(slot, GroupCommit.of(self._owned, batches), self._membership.group_metadata())

    def _targets_under_way(self) -> set[str]:
        commit = self._flight.commit
        return set() if commit is None else commit.topics()

    def _take_result(self, timeout_s: float) -> None:
        """Take in how the common transaction under way ended, if it has, or does so in time."""
        ended = self._flight.ended(timeout_s)
        if ended is None:
            return
        commit, result = ended
        self._next = (self._next + 1) % len(self._slots)
        if result.error is None:
            self._counts.recoveries += result.is_replaced
            with collection_put_off():
                self._committed(commit, result)
        elif isinstance(result.error, InDoubtError):
            _log.warning("%s; its producer is replaced and the done log asked", result.error)
            self._gate.shut()
            self._flight.doubt(commit)
        else:
            commit.failed()
            self._not_published(result.error, commit)

    def _committed(self, commit: GroupCommit, result: CommitResult) -> None:
        self._unnamed = 0
        self._targets.settled(commit.committed())
        self._counts.groups += commit.count() > 0
        self._limit.measured(commit.count(), commit.size_bytes(), result.took_s)
        for number, (partition, _) in commit.batches.items():
            self._claimed[number] = partition

    def _not_published(self, error: NotPublishedError, commit: GroupCommit) -> None:
        """Keep out of the next common transactions what this one failed for."""
        now = time.monotonic()
        if error.rights:
            # The targets are not to blame, and the coordinator has said what it lacks.
            self._gate.shut()
            self._not_before = now + LACKING_S
            return
        if isinstance(error, TooLargeError):
            if not self._limit.refused(commit.count(), commit.size_bytes()):
                self._targets.refuse_too_large(error, commit, now)
            return
        named = self._targets.named(error, commit)
        if not named:
            self._ration.warn("aborted", "%s; it is tried again", error)
            self._gate.shut()
            self._not_before = now + _BACK_OFF_S
            self._unnamed += 1
            if self._unnamed < _UNNAMED:
                return
            named = self._targets.all_targets(error, commit)
            self._unnamed = 0
        self._targets.blame(named, now)
