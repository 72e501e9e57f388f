"""The coordinator's loop: read what is there, ask what is due, publish what is decided.

One thread does all of it, round by round, save the Kafka transactions themselves: they have threads of their own, in
`slot`, which the loop never waits for. There is one common transaction at a time; while it is under way the next
decisions are read, so the size of a group adapts to the load by itself, up to what ends within the target latency.
Beside it, what failed before is tried apart, a few topics at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient

from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.kafka import hidden_topics, partition_counts, reason
from penstock.clients.rights import Operation, group_right, is_missing_right, topic_right
from penstock.transactions.coordinator.checks.check_scheduler import CheckScheduler
from penstock.transactions.coordinator.half_partition import Counts, HalfPartition
from penstock.transactions.coordinator.log_reader import is_out_of_range
from penstock.transactions.coordinator.log_upkeep import LogUpkeep
from penstock.transactions.coordinator.membership import Membership
from penstock.transactions.coordinator.publishing.group_gate import GroupGate
from penstock.transactions.coordinator.publishing.publisher import InDoubtError, NotPublishedError, TooLargeError
from penstock.transactions.coordinator.publishing.publisher_slot import SLOW_S, CommitResult, PublisherSlot
from penstock.transactions.coordinator.publishing.targets import NOT_KNOWN, Targets
from penstock.transactions.coordinator.state.pending import Pending
from penstock.transactions.coordinator.state.ready.batch_limit import BatchLimit, message_bytes
from penstock.transactions.coordinator.state.ready.ready_queue import CommitBatch
from penstock.transactions.coordinator.status import Status
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing.missing_rights import MissingRights
from penstock.transactions.writing.target_quarantine import TargetQuarantine

_log = logging.getLogger("penstock.transactions")

#: Seconds the loop waits for records before it serves its membership again.
_IDLE_S = 0.05
#: Seconds it waits for records while more is to be published, but not before a while is over.
_BUSY_S = 0.001
#: Seconds between two reads while a Kafka transaction is under way.
_ALOFT_S = 0.005
#: Seconds between two looks whether a topic may leave quarantine.
_RELEASE_S = 0.25
#: Seconds between two looks whether there is something to tell operators.
_STATUS_S = 1.0
_ANSWER_S = 5.0
_BACK_OFF_S = 0.2
#: Seconds between two tries where the coordinator itself lacks a right.
_LACKING_S = 1.0
#: Seconds that transactions under way may take to end when the coordinator stops.
_LAST_S = 8.0
_NO_END = (
    "the broker cannot end a Kafka transaction there: its max.message.bytes may be smaller than the marker that ends "
    "one; mend that, and restart the broker that leads it"
)
#: Failures in a row that nobody was named for, after which all targets of the group are tried apart.
_UNNAMED = 3


@dataclass(frozen=True, slots=True)
class _Flight:
    """A Kafka transaction under way.

    Attributes:
        batches: what it settles, with the objects they were taken from: by the time it ends a partition may be lost, or
            lost and taken again.
        done_from: where the done logs ended, or before, as it began: its records come behind.
        topic: for whose sake it is tried apart; None for the common one.
    """

    batches: Mapping[int, tuple[HalfPartition, CommitBatch]]
    done_from: Mapping[int, int]
    topic: str | None = None

    def count(self) -> int:
        """Return how many transactions it settles."""
        return sum(len(batch.decided) for _, batch in self.batches.values())

    def decided(self) -> Iterable[Pending]:
        """Yield the transactions that it settles."""
        return (pending for _, batch in self.batches.values() for pending in batch.decided)

    def size_bytes(self) -> int:
        """Return how large the messages are that it publishes."""
        return sum(map(message_bytes, self.decided()))

    def mark(self, *, in_flight: bool) -> None:
        """Note on all that it settles or writes down again that it is under way, or is not any more."""
        for partition, batch in self.batches.values():
            for pending in batch.decided:
                pending.in_flight = in_flight
            for snapshot in batch.snapshots:
                snapshotted = partition.state.pending.get(snapshot.note.transaction_id)
                if snapshotted is not None:
                    snapshotted.in_flight = in_flight


@dataclass(slots=True)
class _Lane:
    """A slot for what is tried apart, and what is under way there.

    Attributes:
        slot: the slot.
        flight: what is under way.
        doubted: what ended in doubt, and waits for the done log.
        topic: what it tried last.
        lost_ids: transactional ids that the slot had lost by then.
    """

    slot: PublisherSlot
    flight: _Flight | None = None
    doubted: _Flight | None = None
    topic: str = ""
    lost_ids: int = 0


class CoordinatorLoop:
    """What the coordinator's thread does. Used by that thread alone.

    Args:
        bootstrap_servers: Kafka's addresses, for errors.
        topics: the store's topics.
        admin: an admin client.
        membership: which partitions are owned, and their records.
        slots: for the common transactions, in turns: after a Kafka transaction has ended the broker writes its markers,
            and refuses the next begin of the same producer for some milliseconds; and one that failed is made anew
            while the others go on.
        apart: slots for what is tried apart.
        gate: says whether the group's coordinator answers.
        left: counts threads that were left behind.
        limit: how many decisions go into one common transaction.
        questions: checks.
        status: takes what there is to tell operators.
        counts: where to count.
        ration: where to say what bad input could repeat without end.
        rights: what the coordinator lacks.
        stopping: set when the coordinator ends.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        topics: StoreTopics,
        admin: AdminClient,
        membership: Membership,
        slots: Sequence[PublisherSlot],
        apart: Sequence[PublisherSlot],
        gate: GroupGate,
        left: LeftBehind,
        limit: BatchLimit,
        questions: CheckScheduler,
        status: Callable[[Status, float], None],
        counts: Counts,
        ration: RationedLog,
        rights: MissingRights,
        stopping: threading.Event,
    ) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._topics = topics
        self._admin = admin
        self._membership = membership
        self._owned = membership.owned
        self._slots = slots
        self._apart = [_Lane(slot) for slot in apart]
        self._gate = gate
        self._left = left
        self._limit = limit
        # The common transaction under way, and its slot; or the one that ended in doubt, whose slot is asked.
        self._flight: _Flight | None = None
        self._doubted: _Flight | None = None
        self._asked = slots[0]
        self._turn = 0
        # Partitions beside whose positions the name of this coordinator stands.
        self._claimed: dict[int, HalfPartition] = {}
        # Nothing is published before, in monotonic seconds: what was aborted is not tried again at once.
        self._not_before = 0.0
        self._unnamed = 0
        self._questions = questions
        self._tell = status
        self._told_at = 0.0
        self._counts = counts
        self._ration = ration
        self._rights = rights
        self._stopping = stopping
        self._targets = Targets(
            lambda: partition_counts(admin, bootstrap_servers, _ANSWER_S),
            topics.prefix,
            lambda missed: self._hidden(hidden_topics(admin, missed, _ANSWER_S)),
        )
        self._quarantine = TargetQuarantine()
        # Topics that were found to be missing.
        self._absent: set[str] = set()
        self._tending = LogUpkeep(admin, topics, membership.logs, counts, ration, rights=rights, begun=time.monotonic())
        self._released = time.monotonic()

    def round(self) -> None:
        """Do once what the coordinator does for ever."""
        now = time.monotonic()
        self._tend_slots(now)
        if self._flight is not None:
            # Nothing can be published before it lands, so what comes meanwhile is read in larger pieces.
            self._land(self._flight, _ALOFT_S)
        self._membership.serve()
        if self._membership.was_cut_off():
            self._gate.shut()
        # What waits to be published goes first: whoever reads all that is there reads for ever, and publishes little.
        if not self._is_crowded():
            self._read(self._patience_s())
        now = time.monotonic()
        self._tending.look(self._owned, now)
        self._targets.look_now_and_then(now)
        for partition in self._owned.values():
            self._questions.ask(partition, now)
        if now - self._released >= _RELEASE_S and self._quarantine:
            self._released = now
            self._release(now)
        self._settle(now)
        self._tell_status(now)

    def _tell_status(self, now: float) -> None:
        """Tell operators what hinders publication, where they look."""
        if now - self._told_at >= _STATUS_S:
            self._told_at = now
            self._tell(
                Status(
                    self._slots[0].name,
                    int(time.time() * 1000),
                    (*self._owned, *self._membership.recoveries.partitions),
                    self._counts.slow_call,
                    self._counts.slow_call_s,
                    self._counts.left_behind,
                    self._quarantine.reasons(),
                    self._quarantine.refusals(),
                    self._rights.told(),
                ),
                now,
            )

    def _settle(self, now: float) -> None:
        """Begin what is to be published next, and look after the logs in between."""
        # Not while a common transaction is under way or in doubt: tending takes the end of the done log for known, and
        # what that transaction wrote there would never be looked for.
        if self._flight is None and self._doubted is None:
            self._tending.tend(self._owned, now)
            slot = self._slots[self._turn]
            if self._gate.is_open and self._targets.were_heard and now >= self._not_before and slot.is_ready:
                self._publish(slot)
        if self._gate.is_open:
            self._try_apart(now)

    def close(self) -> None:
        """Let what is under way end, for a while, and have the producers closed by their threads."""
        deadline = time.monotonic() + _LAST_S
        while self._flight is not None and time.monotonic() < deadline:
            self._land(self._flight, _ALOFT_S)
        while any(lane.flight is not None for lane in self._apart) and time.monotonic() < deadline:
            self._land_apart(time.monotonic())
            time.sleep(_ALOFT_S)
        for slot in (*self._slots, *(lane.slot for lane in self._apart)):
            slot.close()
        self._gate.close()

    def _tend_slots(self, now: float) -> None:
        """Open producers that have to be, learn what became of transactions in doubt, and tell of calls that hang."""
        slots = [*self._slots, *(lane.slot for lane in self._apart if lane.flight or lane.doubted or lane.slot.is_used)]
        if self._gate.tend(now):
            # A producer that was there while the group's coordinator was away hangs when it needs it next (librdkafka
            # 2.16, seen after each restart of a broker).
            for slot in slots:
                slot.renew()
        for slot in slots:
            slot.tend(now)
        # Whichever is ready next; one that failed is made anew meanwhile.
        if self._flight is None and not self._slots[self._turn].is_ready:
            self._turn = next((n for n, slot in enumerate(self._slots) if slot.is_ready), self._turn)
        if self._doubted is not None and self._learn(self._asked, self._doubted):
            self._doubted = None
        self._land_apart(now)
        self._counts.left_behind = self._left.hanging
        calls = [slot.slow_call() for slot in slots]
        taking = self._membership.recoveries.slow_call(now)
        if taking[1] >= SLOW_S:
            calls.append(taking)
        self._counts.slow_call, self._counts.slow_call_s = max(calls, key=lambda one: one[1], default=("", 0.0))

    def _learn(self, slot: PublisherSlot, flight: _Flight) -> bool:
        """Take in what became of a transaction in doubt, if that is known by now."""
        found = slot.answer()
        if found is None:
            return False
        self._counts.recoveries += 1
        flight.mark(in_flight=False)
        for number, (partition, batch) in flight.batches.items():
            if self._owned.get(number) is partition:
                done = found[number]
                # Others may be there that are under way, or have landed meanwhile: they are told of elsewhere.
                ids = {one.half.transaction_id for one in (*batch.decided, *batch.answered)}
                snapshotted = {snapshot.note.transaction_id for snapshot in batch.snapshots}
                outcome = partition.state.settle(
                    [note for note in done.notes if note.transaction_id in ids],
                    [one for one in done.snapshots if one[1].note.transaction_id in snapshotted],
                )
                partition.settled_in_doubt(done.end, outcome)
                for pending in outcome[0]:
                    self._quarantine.forget(pending.half.transaction_id)
        return True

    def _patience_s(self) -> float:
        """Return how long to wait for records."""
        if self._flight is not None:
            return 0
        if self._doubted is not None or any(lane.flight is not None for lane in self._apart):
            return _ALOFT_S
        if not any(p.state.has_work for p in self._owned.values()):
            return _IDLE_S
        is_late = time.monotonic() < self._not_before or not (self._gate.is_open and self._slots[self._turn].is_ready)
        return _BUSY_S if is_late else 0

    def _is_crowded(self) -> bool:
        """Tell whether as much as the next Kafka transaction takes waits for it already."""
        under_way = 0 if self._flight is None else self._flight.count()
        return sum(p.state.queue.ready for p in self._owned.values()) - under_way >= self._limit.decisions

    def _read(self, timeout_s: float) -> None:
        half_topic = self._topics.half
        # In pieces of what one Kafka transaction settles: what is read beyond that waits here instead of in the logs.
        limit = self._limit.decisions
        undecided = sum(len(p.state.pending) - len(p.state.decided) for p in self._owned.values())
        for_halves = any(p.waits_for_halves for p in self._owned.values())
        records = self._membership.logs.read(timeout_s, limit, for_halves=for_halves, full=undecided >= 2 * limit)
        now = time.monotonic()
        for message in records:
            error = message.error()
            if error is not None:
                self._tell_not_read(message.topic() or "", error)
                if is_out_of_range(error):
                    self._tending.stands_still(message, now)
                continue
            partition = self._owned.get(message.partition() or 0)
            if partition is None:
                continue
            if message.topic() == half_topic:
                partition.feed_half(message, now)
            else:
                partition.feed_op(message, now)
        for partition in self._owned.values():
            partition.note_progress(now)

    def _tell_not_read(self, topic: str, error: KafkaError) -> None:
        if is_missing_right(error):
            is_group = error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
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
            batch = partition.next_batch(limit, self._out, room_bytes)
            if batch is not None:
                batches[number] = batch
                if len(batch.decided) >= self._limit.decisions:
                    # It may be that not even two of them fit into the client's buffer.
                    break
            elif self._claimed.get(number) is not partition:
                # Nothing to settle: what is written is who owns it now, for those who may have to take it over.
                batches[number] = partition.claim()
        if not batches:
            return
        self._flight = self._taking_off(batches, None)
        self._asked = slot
        slot.begin(batches, self._membership.group_metadata())

    def _taking_off(self, batches: Mapping[int, CommitBatch], topic: str | None) -> _Flight:
        flight = _Flight(
            {number: (self._owned[number], batch) for number, batch in batches.items()},
            {number: self._owned[number].done_end for number in batches},
            topic,
        )
        flight.mark(in_flight=True)
        return flight

    def _land(self, flight: _Flight, timeout_s: float) -> None:
        """Take in how the common transaction under way ended, if it has, or does so in time."""
        slot = self._asked
        result = slot.land(timeout_s)
        if result is None:
            return
        self._flight = None
        self._turn = (self._turn + 1) % len(self._slots)
        if result.error is None:
            self._unnamed = 0
            self._settled(flight)
            self._counts.groups += flight.count() > 0
            self._limit.measured(flight.count(), flight.size_bytes(), result.took_s)
            for number, (partition, _) in flight.batches.items():
                self._claimed[number] = partition
            return
        if isinstance(result.error, InDoubtError):
            _log.warning("%s; its producer is replaced and the done log asked", result.error)
            self._gate.shut()
            self._doubted = flight
            slot.ask(flight.done_from)
            return
        flight.mark(in_flight=False)
        self._not_published(result.error, flight)

    def _settled(self, flight: _Flight) -> None:
        """Take in that a transaction was committed."""
        flight.mark(in_flight=False)
        for partition, batch in flight.batches.values():
            partition.settled(batch)
        if self._quarantine:
            for pending in flight.decided():
                self._quarantine.forget(pending.half.transaction_id)

    def _out(self, pending: Pending) -> str | None:
        """Name the topic for whose sake a transaction cannot be published with the others, or return None."""
        if pending.verdict is Verdict.DISCARD:
            return self._topics.discarded if self._quarantine.is_out(self._topics.discarded) else None
        for half in pending.halves:
            # One whose payload is not in memory has no size: it is looked at again once it is there.
            wanted = 1 if half.partition is None else half.partition + 1
            if not self._targets.has(half.topic, wanted) or self._quarantine.is_out(half.topic):
                return half.topic
            if self._quarantine and self._quarantine.is_too_large(half.topic, _size(half)):
                # With those that are under way to the topic it must not change places.
                self._quarantine.suspect(half.topic, self._quarantine.why(half.topic), time.monotonic())
                return half.topic
        return None

    def _not_published(self, error: NotPublishedError, flight: _Flight) -> None:
        """Keep out of the next common transactions what this one failed for."""
        now = time.monotonic()
        if error.rights:
            # The targets are not to blame, and the coordinator has said what it lacks.
            self._gate.shut()
            self._not_before = now + _LACKING_S
            return
        if isinstance(error, TooLargeError):
            if not self._limit.refused(flight.count(), flight.size_bytes()):
                for pending in flight.decided():
                    self._refuse(pending.half.transaction_id, _target(pending, self._topics), str(error), now)
                    self._quarantine.suspect(_target(pending, self._topics), str(error), now)
            return
        named = dict(error.targets)
        for pending in flight.decided():
            why = error.failed.get(pending.half.transaction_id)
            if why is not None:
                # The library fails whole batches for one message: who it is shows where each is a batch.
                named.setdefault(_target(pending, self._topics), why)
        if not named:
            self._ration.warn("aborted", "%s; it is tried again", error)
            self._gate.shut()
            self._not_before = now + _BACK_OFF_S
            self._unnamed += 1
            if self._unnamed < _UNNAMED:
                return
            named = {_target(pending, self._topics): str(error) for pending in flight.decided() if _publishes(pending)}
            self._unnamed = 0
        for topic, why in named.items():
            self._quarantine.suspect(topic, why, now)
            text = "topic %s does not take all that is for it: %s; what is for it is tried apart from the others"
            self._ration.warn(f"target {topic}", text, topic, why)

    def _release(self, now: float) -> None:
        """Let topics out of quarantine that are well again, and try those at once that have come back."""
        if self._absent:
            self._targets.look(now)
            for topic in [topic for topic in self._absent if self._targets.has(topic, 1)]:
                self._absent.discard(topic)
                self._quarantine.try_now(topic, now)
        for topic in self._quarantine.release(self._has_unrefused, now):
            for partition in self._owned.values():
                partition.state.queue.release(topic)

    def _has_unrefused(self, topic: str) -> bool:
        """Tell whether something waits for a topic's sake that was not refused."""
        return any(self._candidates(partition, topic, 1) for partition in self._owned.values())

    def _candidates(self, partition: HalfPartition, topic: str, most: int) -> list[Pending]:
        is_refused = self._quarantine.is_refused
        return partition.state.queue.set_aside.take(
            topic, most, lambda pending: is_refused(pending.half.transaction_id)
        )

    def _retried(self, topic: str) -> tuple[int, Pending] | None:
        """Return the refused one of a topic that was not tried for longest, with its partition."""
        found = [
            (self._quarantine.tried_at(pending.half.transaction_id), number, pending)
            for number, partition in self._owned.items()
            for pending in partition.state.queue.set_aside.fronts(topic)
            if not pending.in_flight and self._quarantine.is_refused(pending.half.transaction_id)
        ]
        return min(found, key=lambda one: one[0])[1:] if found else None

    def _try_apart(self, now: float) -> None:
        """Begin to try what is set aside, as far as there are slots for it."""
        waiting: set[str] | None = None
        for lane in self._apart:
            if lane.flight is not None or lane.doubted is not None:
                continue
            if waiting is None:
                waiting = {t for p in self._owned.values() for t in p.state.queue.set_aside.topics()}
            if not waiting:
                return
            if lane.slot.lost_ids > lane.lost_ids:
                lane.lost_ids = lane.slot.lost_ids
                self._quarantine.fail(lane.topic, _NO_END, now)
            if not lane.slot.is_ready:
                # It opens a producer when it is needed first.
                lane.slot.tend(now)
                continue
            topic = self._quarantine.next_topic(waiting, now)
            if topic is None:
                return
            self._begin_apart(lane, topic, now)

    def _begin_apart(self, lane: _Lane, topic: str, now: float) -> None:
        missing = next(filter(None, (self._missing(topic, one) for one in self._owned.values())), None)
        if missing is NOT_KNOWN:
            self._quarantine.postpone(topic, now)
            return
        if missing is not None:
            self._absent.add(topic)
            self._quarantine.fail(topic, missing, now)
            return
        width = self._quarantine.begin_try(topic, now)
        batches: dict[int, CommitBatch] = {}
        retried = self._retried(topic) if self._quarantine.retries(topic, now) else None
        if retried is not None:
            number, pending = retried
            if self._owned[number].in_memory([pending], now):
                batches[number] = CommitBatch([pending], [], -1, -1, moves=False)
        else:
            for number, partition in self._owned.items():
                chosen = partition.in_memory(self._candidates(partition, topic, width), now)
                chosen = self._not_too_large(chosen, now)
                width -= len(chosen)
                if chosen:
                    batches[number] = CommitBatch(chosen, [], -1, -1, moves=False)
                if width <= 0:
                    break
        if not batches:
            self._quarantine.end_try(topic)
            self._quarantine.postpone(topic, now)
            return
        if self._is_under_way({half.topic for batch in batches.values() for p in batch.decided for half in p.halves}):
            # What was there before it entered quarantine goes first.
            self._quarantine.end_try(topic)
            return
        lane.flight, lane.topic = self._taking_off(batches, topic), topic
        lane.slot.begin(batches, self._membership.group_metadata())

    def _is_under_way(self, topics: set[str]) -> bool:
        """Tell whether the common transaction under way, or in doubt, has messages for one of these topics."""
        flights = [flight for flight in (self._flight, self._doubted) if flight is not None]
        return any(half.topic in topics for flight in flights for p in flight.decided() for half in p.halves)

    def _not_too_large(self, chosen: list[Pending], now: float) -> list[Pending]:
        """Leave out what is as large as one that was refused for its size, and what stands behind it."""
        for at, pending in enumerate(chosen):
            for half in pending.halves if pending.verdict is Verdict.COMMIT else ():
                if self._quarantine.is_too_large(half.topic, _size(half)):
                    why = self._quarantine.why(half.topic)
                    self._refuse(pending.half.transaction_id, half.topic, why, now, _size(half))
                    return chosen[:at]
        return chosen

    def _missing(self, topic: str, partition: HalfPartition) -> str | None:
        """Say why nothing need be tried: the topic is not there."""
        for pending in partition.state.queue.set_aside.fronts(topic):
            for half in pending.halves if pending.verdict is Verdict.COMMIT else ():
                wanted = 1 if half.partition is None else half.partition + 1
                why = self._targets.missing(half.topic, wanted, time.monotonic())
                if why is not None and half.topic == topic:
                    if why is not NOT_KNOWN:
                        text = "transaction %s is committed and waits: topic %s %s"
                        self._ration.warn(f"target {topic}", text, pending.half.transaction_id, topic, why)
                    return why
            return None
        return None

    def _land_apart(self, now: float) -> None:
        """Take in how transactions ended that were tried apart."""
        for lane in self._apart:
            if lane.doubted is not None and self._learn(lane.slot, lane.doubted):
                self._quarantine.end_try(lane.doubted.topic or "")
                lane.doubted = None
            flight = lane.flight
            result = None if flight is None else lane.slot.land()
            if flight is None or result is None:
                continue
            lane.flight = None
            self._landed_apart(lane, flight, result, now)

    def _landed_apart(self, lane: _Lane, flight: _Flight, result: CommitResult, now: float) -> None:
        topic, error = flight.topic or "", result.error
        if isinstance(error, InDoubtError):
            _log.warning("%s; its producer is replaced and the done log asked", error)
            self._gate.shut()
            self._quarantine.fail(topic, str(error), now)
            lane.doubted = flight
            lane.slot.ask(flight.done_from)
            return
        flight.mark(in_flight=False)
        self._quarantine.end_try(topic)
        if error is None:
            names = [pending.half.transaction_id for pending in flight.decided()]
            self._settled_apart(flight, topic, names, now)
            return
        if isinstance(error, TooLargeError) and flight.count() == 1:
            for pending in flight.decided():
                self._refuse(pending.half.transaction_id, topic, str(error), now)
            return
        if error.failed:
            self._refuse_all(flight, error, topic, now)
            return
        if not error.targets:
            self._gate.shut()
        if error.rights:
            # The topic is not to blame, and the coordinator has said what it lacks.
            self._quarantine.postpone(topic, now + _LACKING_S)
        elif self._is_blamed(topic, flight, error, now):
            self._took_nothing(topic, error, now)

    def _is_blamed(self, topic: str, flight: _Flight, error: NotPublishedError, now: float) -> bool:
        """Tell whether a topic is to blame for a failed try of what is for it, and blame the others that are."""
        for other, other_why in error.targets.items():
            if other != topic:
                self._quarantine.suspect(other, other_why, now)
                self._refile(flight, other)
        return not error.targets or topic in error.targets

    def _took_nothing(self, topic: str, error: NotPublishedError, now: float) -> None:
        why = error.targets.get(topic, str(error))
        pause_s = self._quarantine.fail(topic, why, now)
        text = "topic %s takes no message: %s; what is for it waits, the next try is in %g s"
        self._ration.warn(f"target {topic}", text, topic, why, pause_s)

    def _refile(self, flight: _Flight, topic: str) -> None:
        """Have those wait for a topic's sake that go there, too: it was that topic's fault."""
        for partition, batch in flight.batches.values():
            aside = partition.state.queue.set_aside
            for pending in batch.decided:
                if pending.half.transaction_id in aside and any(half.topic == topic for half in pending.halves):
                    aside.refile(pending, topic)

    def _refuse_all(self, flight: _Flight, error: NotPublishedError, topic: str, now: float) -> None:
        """Take in which ones the broker refused."""
        for pending in flight.decided():
            why = error.failed.get(pending.half.transaction_id)
            if why is not None:
                is_size = pending.half.transaction_id in error.too_large
                size = max(map(_size, pending.halves)) if is_size else None
                self._refuse(pending.half.transaction_id, topic, why, now, size)

    def _settled_apart(self, flight: _Flight, topic: str, names: Sequence[str], now: float) -> None:
        self._quarantine.succeeded(topic, names, now)
        self._settled(flight)
        self._counts.groups += 1

    def _refuse(self, transaction_id: str, topic: str, why: str, now: float, too_large: int | None = None) -> None:
        if self._quarantine.refuse(transaction_id, topic, why, now, too_large):
            _log.error(
                "transaction %s is committed and refused by %s: %s; it is tried again, and holds later ones of its key "
                "and target; see `penstock tx show`, and discard it by `penstock tx discard` if it cannot be mended",
                transaction_id,
                topic,
                why,
            )


def _publishes(pending: Pending) -> bool:
    return pending.verdict is Verdict.COMMIT or pending.verdict is Verdict.DISCARD


def _size(half: Half) -> int:
    return len(half.key or b"") + len(half.value or b"") + sum(len(n) + len(v or b"") for n, v in half.headers)


def _target(pending: Pending, topics: StoreTopics) -> str:
    """Return where a transaction goes: of several messages, the first one's target."""
    return topics.discarded if pending.verdict is Verdict.DISCARD else pending.half.topic


__all__ = ["CoordinatorLoop"]
