"""The engine: publishes what the partitions of a store have decided, for all stores.

There is one common Kafka transaction at a time; while it is under way the next decisions come in, so the size of a
group adapts to the load by itself, up to what ends within the target latency. Separately, what failed before is tried
apart (`trials`). The Kafka transactions have threads of their own, in `publisher_slot`, which the engine never waits
for. The store's thread calls it round by round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.gc_pause import collection_put_off
from penstock.clients.rights import transactional_right
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.settings import Pace
from penstock.clients.transactional.writer import PublicationSpans
from penstock.options import ClientConfig
from penstock.transactions.core.commit_batch import DecidedBatch
from penstock.transactions.core.quarantine import TargetQuarantine
from penstock.transactions.publishing.batch_limit import BatchLimit
from penstock.transactions.publishing.flight import Backlog, Flight, FlightState, GroupCommit
from penstock.transactions.publishing.publisher import (
    InDoubtError,
    NotPublishedError,
    Publisher,
    TooLargeError,
    Visibility,
)
from penstock.transactions.publishing.publisher_slot import CommitResult, PublisherSlot, ReadDone
from penstock.transactions.publishing.targets import BrokerGate, TargetGate, Targets
from penstock.transactions.publishing.trials import LACKING_S, Prove, Trials
from penstock.transactions.rationed_log import RationedLog

_log = logging.getLogger("penstock.transactions")

#: Seconds between two looks at what is under way.
IN_FLIGHT_S = 0.005
#: Seconds between two rounds where nothing wakes the store's thread: all is well; or something waits for a time.
_IDLE_INTERVAL_S = 1.0
_WAITING_INTERVAL_S = 0.05
_RETRY_DELAY_S = 0.2
#: Failures in a row that nobody was named for, after which all targets of the group are tried apart.
_UNNAMED = 3


@dataclass(frozen=True, slots=True)
class PublishingClients:
    """What the engines of one coordinator make their Kafka clients of, and what they share.

    Attributes:
        done_topic: the log of what was settled, in which each partition of the store has one.
        discarded: the topic of what is discarded.
        ids_begin: what all transactional ids begin with.
        left: counts threads that are abandoned.
        spans: makes what makes the spans of one publisher.
        wake: called by any thread when a call has ended.
    """

    bootstrap_servers: str
    config: ClientConfig = field(repr=False)
    done_topic: str
    discarded: str
    ids_begin: str
    rights: MissingRights
    pace: Pace
    targets: Targets
    left: LeftBehind
    spans: Callable[[], PublicationSpans | None] = lambda: None
    wake: Callable[[], object] = lambda: None

    def slot(
        self,
        name: str,
        read_done: ReadDone,
        *,
        apart: bool,
        may_open: Callable[[], bool] = lambda: True,
        visibility: Callable[[], Visibility | None] = lambda: None,
    ) -> PublisherSlot:
        """Return a place for a Kafka transaction; arguments are those of `PublisherSlot` and `Publisher`."""

        def make(transactional_id: str) -> Publisher:
            return Publisher(
                self.bootstrap_servers,
                self.config,
                transactional_id,
                done_topic=self.done_topic,
                ids_right=transactional_right(self.ids_begin),
                rights=self.rights,
                pace=self.pace,
                apart=apart,
                spans=self.spans(),
                visibility=visibility(),
            )

        return PublisherSlot(make, read_done, name, self.left, self.pace, may_open=may_open, wake=self.wake)


class Engine:
    """Publishes the partitions in `owned`, which their owner changes. Used by one thread, which it never holds.

    Args:
        ask: returns once the brokers that a Kafka transaction needs have answered, or raises `KafkaException`.
        target_latency_s: seconds that a group may take from its begin until its end is answered.
        slots: for the common transactions, used one after the other: after a Kafka transaction has ended the broker
            writes its markers, and refuses the next begin of the same producer for some milliseconds; and one that
            failed is made again while the others go on.
        trial_slots: for what is tried apart.
        prove: proves the ownership to the broker.
    """

    def __init__(
        self,
        owned: Mapping[int, Backlog],
        clients: PublishingClients,
        ask: Callable[[], object],
        target_latency_s: float,
        *,
        slots: Sequence[PublisherSlot],
        trial_slots: Sequence[PublisherSlot],
        prove: Prove = lambda _batches: None,
    ) -> None:
        self._owned = owned
        self._slots = slots
        self._prove = prove
        self._gate = gate = BrokerGate(ask, clients.left)
        self._limit = BatchLimit(target_latency_s)
        self._ration = ration = RationedLog()
        # The common transaction, and the slot for the next.
        self._flight = Flight(slots[0])
        self._next = 0
        # Targets of a common transaction that came to nothing, until each partition has looked at what it gave back:
        # what is tried apart must not pass it.
        self._given_back: set[str] = set()
        # Nothing is published before, in monotonic seconds: what was aborted is not tried again at once.
        self._not_before = 0.0
        self._unnamed = 0
        #: What is tried apart. Others read its `reasons` and `refusals`.
        self.quarantine = TargetQuarantine()
        self.targets = clients.targets
        self._targets = TargetGate(clients.targets, owned, self.quarantine, ration, clients.discarded)
        self._trials = Trials(
            trial_slots,
            targets=self._targets,
            owned=owned,
            prove=prove,
            gate=gate,
            under_way=self._targets_under_way,
            ration=ration,
        )
        self._groups = self._recoveries = 0

    @property
    def groups(self) -> int:
        """Kafka transactions that were committed."""
        return self._groups + self._trials.groups

    @property
    def recoveries(self) -> int:
        """Ends of Kafka transactions that were in doubt, or may come twice."""
        return self._recoveries + self._trials.recoveries

    @property
    def is_in_flight(self) -> bool:
        """Whether a common transaction is under way."""
        return self._flight.state is FlightState.IN_FLIGHT

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that ends by itself, within its limits."""
        return self.is_in_flight or self._trials.is_flying

    @property
    def has_doubt(self) -> bool:
        """Whether it is not known how a common transaction ended."""
        return self._flight.state is FlightState.IN_DOUBT

    @property
    def under_way(self) -> int:
        """How many transactions the common one that is under way settles."""
        commit = self._flight.commit
        return commit.count() if commit is not None and self.is_in_flight else 0

    def is_ready(self, now: float) -> bool:
        """Tell whether a common transaction may begin."""
        may = self._flight.is_idle and self._gate.is_open and self.targets.were_heard
        return may and now >= self._not_before and self._slots[self._next].is_ready

    def is_crowded(self, ready: int) -> bool:
        """Tell whether as much as the next Kafka transaction takes waits for it, of so many that could be published."""
        return ready - self.under_way >= self._limit.decisions

    @property
    def decisions(self) -> int:
        """How many decisions the next Kafka transaction takes, at most."""
        return self._limit.decisions

    def slow_call(self) -> tuple[str, float]:
        """Return the call that has not returned for longest, and its age in seconds; an empty name: all return."""
        calls = (slot.slow_call() for slot in (*self._slots, *self._trials.slots))
        return max(calls, key=lambda call: call[1], default=("", 0.0))

    def has_part(self, number: int) -> bool:
        """Tell whether a partition has part in a Kafka transaction that is under way or in doubt."""
        commits = filter(None, (self._flight.commit, *self._trials.commits))
        return any(number in commit.batches for commit in commits)

    def floor(self, number: int) -> int:
        """Return below which offset of a partition's done log no Kafka transaction under way or in doubt writes."""
        commits = filter(None, (self._flight.commit, *self._trials.commits))
        floors = (commit.done_from[number] for commit in commits if number in commit.done_from)
        return min(floors, default=self._owned[number].done_end)

    def wait_s(self) -> float:
        """Return after how many seconds to look again, if nothing wakes its owner before."""
        is_calm = self._flight.is_idle and self._gate.is_open and self._slots[self._next].is_ready
        return (
            _IDLE_INTERVAL_S
            if is_calm and not any(backlog.set_aside for backlog in self._owned.values())
            else _WAITING_INTERVAL_S
        )

    def shut(self) -> None:
        """Let nothing begin before the brokers have answered: they were away, as it seems."""
        self._gate.shut()

    def poll(self, now: float) -> None:
        """Open producers that have to be, and learn what became of transactions in doubt and of trials."""
        slots = [*self._slots, *self._trials.slots]
        if self._gate.poll(now):
            # A producer that was there while the group's coordinator was away hangs when it needs it next (librdkafka
            # 2.16, seen after each restart of a broker).
            for slot in slots:
                slot.renew()
        for slot in slots:
            slot.poll(now)
        # Whichever is ready next; one that failed is made again meanwhile.
        if not self.is_in_flight and not self._slots[self._next].is_ready:
            self._next = next((n for n, slot in enumerate(self._slots) if slot.is_ready), self._next)
        learned = self._flight.learned()
        if learned is not None:
            commit, found = learned
            self._recoveries += 1
            self._targets.settled(commit.learn(found, self._owned))
        self._trials.take_results(now)

    def release(self, now: float) -> None:
        """Let topics out of quarantine that are well again."""
        self._targets.release(now)

    def begin(self, now: float) -> bool:
        """Begin the next common transaction and trials, as far as that can be; tell whether one has begun."""
        has_begun = False
        if self.is_ready(now):
            with collection_put_off():
                has_begun = self._publish(self._slots[self._next])
        if self._gate.is_open:
            self._trials.begin(now)
        return has_begun

    def close(self, limit_s: float) -> None:
        """Let what is under way end, for so many seconds, and have the producers closed by their threads."""
        deadline = time.monotonic() + limit_s
        while self.is_in_flight and time.monotonic() < deadline:
            self.take_result(IN_FLIGHT_S)
        self._trials.close(deadline, IN_FLIGHT_S)
        for slot in self._slots:
            slot.close()

    def _publish(self, slot: PublisherSlot) -> bool:
        """Begin the next common transaction, if there is something for it."""
        batches: dict[int, DecidedBatch] = {}
        # Each partition has its part of the group: one that is crowded does not keep the others out.
        parts = max(1, len(self._owned))
        limit, room_bytes = max(1, self._limit.decisions // parts), max(1, self._limit.bytes // parts)
        for number, backlog in self._owned.items():
            batch = backlog.next_batch(limit, self._targets.blocking, room_bytes)
            if batch is not None:
                batches[number] = batch
                if len(batch.decided) >= self._limit.decisions:
                    # It may be that not even two of them fit into the client's buffer.
                    break
        else:
            self._given_back = set()
        if batches:
            self._flight.begin(slot, GroupCommit.of(self._owned, batches), self._prove(batches))
        return bool(batches)

    def _targets_under_way(self) -> set[str]:
        commit = self._flight.commit
        return self._given_back if commit is None else self._given_back | commit.topics()

    def take_result(self, timeout_s: float = 0.0) -> bool:
        """Take in how the common transaction under way ended, if it has or does so in time; tell whether it has."""
        ended = self._flight.ended(timeout_s)
        if ended is None:
            return False
        commit, result = ended
        self._next = (self._next + 1) % len(self._slots)
        if result.error is None:
            with collection_put_off():
                self._committed(commit, result)
        elif isinstance(result.error, InDoubtError):
            _log.warning("%s; its producer is replaced and the done log asked", result.error)
            self._gate.shut()
            self._flight.doubt(commit)
        else:
            self._given_back |= commit.topics()
            self._not_published(result.error, commit)
            commit.failed()
        return True

    def _committed(self, commit: GroupCommit, result: CommitResult) -> None:
        self._unnamed = 0
        self._recoveries += result.is_replaced
        self._targets.settled(commit.committed(result.done_ends))
        self._groups += commit.count() > 0
        self._limit.measured(commit.count(), commit.size_bytes(), result.took_s)

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
        named = self._targets.named(error)
        if not named:
            self._ration.warn("aborted", "%s; it is tried again", error)
            self._gate.shut()
            self._not_before = now + _RETRY_DELAY_S
            self._unnamed += 1
            if self._unnamed < _UNNAMED:
                return
            named = dict.fromkeys(commit.topics(), str(error))
            self._unnamed = 0
        self._targets.blame(named, now)
