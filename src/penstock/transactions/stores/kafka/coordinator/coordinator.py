"""The coordinator of a store in Kafka: it settles the transactions of all producers that share a prefix.

One thread runs the rounds: it reads the logs, sends due checks and starts Kafka transactions. The publishing engine
runs these on threads of its own. The rounds never wait for them; meanwhile they read the next decisions. `membership`
knows the owned partitions.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from confluent_kafka import KafkaException, Message, TopicPartition

from penstock import clients
from penstock.clients.bounded_calls import CLOSE_S, end_within
from penstock.clients.kafka_errors import ErrorKind, kind_of, reason
from penstock.clients.rights import MissingRightError
from penstock.clients.topics import single_copies
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig, positive_int, reserved, seconds
from penstock.transactions.acked_producer import ANY_SIZE, AckedProducer
from penstock.transactions.core.commit_batch import CommitBatch
from penstock.transactions.model import CoordinatorStatistics, PendingTransaction
from penstock.transactions.operator.administration import shown
from penstock.transactions.publishing.engine import IN_FLIGHT_S, Engine
from penstock.transactions.publishing.publisher import Proof
from penstock.transactions.publishing.publisher_slot import SLOW_S, PublisherSlot
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.checks import CheckScheduler, Liveness
from penstock.transactions.stores.kafka.coordinator.coordinator_sends import CoordinatorSends, StatusLog
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition, held_in
from penstock.transactions.stores.kafka.coordinator.log_upkeep import LogUpkeep
from penstock.transactions.stores.kafka.coordinator.membership import Membership
from penstock.transactions.stores.kafka.coordinator.payload_reader import PayloadReader
from penstock.transactions.stores.kafka.logs.recovered_partition import DoneRead, log_positions
from penstock.transactions.stores.kafka.logs.recovery import Recoveries, RecoveryReader
from penstock.transactions.stores.kafka.logs.topic_settings import check_settings
from penstock.transactions.stores.kafka.status import Status, waits_for
from penstock.transactions.stores.store_coordinator import CoordinatorOptions, StoreCoordinator
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.topics import COORDINATOR_NEEDS, StoreTopics, open_topics

_log = logging.getLogger("penstock.transactions")
#: Seconds until a check or a decision of the coordinator counts as not stored; and the wait for them at the stop.
_SEND_TIMEOUT_S = 15.0
_LAST_SENDS_BUDGET_S = 5.0
#: Seconds for open Kafka transactions to end when the coordinator stops.
_STOP_BUDGET_S = 8.0
#: Seconds that a round waits for records at most; and seconds between two status updates.
_POLL_S = 0.05
_STATUS_INTERVAL_S = 1.0
#: Operations whose missing permission does not stop publication: truncating logs, seeing the members of groups.
_HARMLESS = ("Delete", "Describe")
#: What a decided transaction waits for if nothing hinders it.
_ITS_TURN = "its turn to be published"

_INSTANCE = re.compile(r"[A-Za-z0-9._-]{1,100}")

_OWNED = {
    "group.instance.id": "it follows from instance; give that",
    "session.timeout.ms": "it is session_timeout, in seconds; give that",
    "group.id": "it is <prefix>.coordinator; choose another prefix",
    "transactional.id": "it follows from instance, or is made again for each coordinator; leave it out",
    "transaction.timeout.ms": "it is 10 s, so that a dead coordinator holds readers back no longer; leave it out",
    "enable.auto.commit": "positions are committed with what they settle; leave it out",
    "isolation.level": "each log is read as it must be; leave it out",
}


class KafkaCoordinator(StoreCoordinator):
    """Settles the transactions of a store in Kafka. Any number may run; they share the partitions. Thread-safe.

    Arguments and units are those of `Coordinator`. A wrong one raises `ConfigurationError`.
    """

    in_kafka = True

    def __init__(
        self,
        bootstrap_servers: str,
        options: CoordinatorOptions,
        *,
        prefix: str,
        partitions: int,
        target_latency: float,
        instance: str | None,
        config: ClientConfig | None,
    ) -> None:
        positive_int("partitions", partitions)
        seconds("target_latency", target_latency)
        if instance is not None and not _INSTANCE.fullmatch(instance):
            raise ConfigurationError(
                f"instance must be up to 100 letters, digits, '.', '_' or '-', but is {instance!r}; choose such a name"
            )
        settings = config or {}
        reserved(settings, _OWNED, "the coordinator")
        self._context = CoordinatorContext(bootstrap_servers, settings, options.policy, StoreTopics(prefix, partitions))
        label = f"the coordinator of {prefix}"
        super().__init__(label, prefix, self._context.rights, self._context.left, options)
        self._instance = instance
        self._target_latency = target_latency
        self._admin = clients.admin(bootstrap_servers, settings)
        # Made by start(), then used by the coordinator's thread.
        self._name: str
        self._membership: Membership
        self._engine: Engine
        self._upkeep: LogUpkeep
        self._checks: CheckScheduler
        self._sends: AckedProducer
        self._payloads: PayloadReader
        self._status: StatusLog
        self._status_at = 0.0
        # Written by the coordinator's thread, read by any thread; empty before the start.
        self._owned: Mapping[int, HalfPartition] = {}
        self._current: Status | None = None

    def _held(self, *, own: bool) -> CoordinatorStatistics:  # noqa: ARG002 - it only knows its own partitions
        # list() of a dict's values is atomic under the interpreter lock: the coordinator cannot change it meanwhile.
        return self._context.counts.statistics(lambda: held_in(list(self._owned.values()), time.monotonic()))

    def pending(self, most: int) -> Sequence[PendingTransaction]:
        """Return up to `most` of the oldest pending transactions in its partitions. Any thread."""
        status, now_ms = self._current, self._context.clock.now_ms(time.monotonic())
        # `waits_for` finds the owner by a partition; any of the owned partitions does.
        statuses, number = ([], 0) if status is None else ([status], next(iter(status.partitions), 0))
        oldest = (pending for partition in list(self._owned.values()) for pending in partition.oldest(most))
        chosen = sorted(oldest, key=lambda pending: pending.birth_ms)[:most]
        return [shown(p, now_ms, None, waits_for(p, number, statuses), _ITS_TURN) for p in chosen]

    def waits(self) -> list[str]:
        """Return sentences that say what pending transactions wait for besides their decisions. Any thread."""
        return super().waits() if self._current is None else self._current.lines()

    def _open(self) -> None:
        context, options, admin = self._context, self._options, self._admin
        servers, config = context.bootstrap_servers, context.config
        try:
            topics = open_topics(admin, self._prefix, context.topics.partitions)
        except MissingRightError as error:
            # A store of an earlier version has no status topic, and this client may not create it.
            needs = {name: operations for name, operations in COORDINATOR_NEEDS.items() if name != "status"}
            topics = open_topics(admin, self._prefix, context.topics.partitions, needs=needs)
            _log.warning("%s; the coordinator runs without it, so that `penstock tx ls` shows less", error)
        context.topics = topics
        check_settings(admin, topics)
        for found in single_copies(admin, topics.all):
            _log.warning("%s", found)

        publishing = self._publishing_clients(
            servers, config, admin, (topics.done, topics.discarded), f"{topics.coordinators}."
        )

        def own_ids() -> list[str]:
            return [slot.transactional_id for slot in slots]

        recovery = RecoveryReader(context, own_ids)
        recoveries = Recoveries(context, recovery.recover, self._stopping.is_set)

        def read_done(starts: Mapping[int, int]) -> Mapping[int, DoneRead]:
            return recovery.done(starts, starts, recoveries.require_running)

        name = f"{topics.coordinators}.{self._instance or new_id()}"
        slots = [PublisherSlot(publishing, f"{name}.{at}", read_done, is_trial=at in "xyz") for at in "abcxyz"]
        self._name, self._payloads = slots[0].name, PayloadReader(context)
        membership = self._membership = Membership(
            context,
            recoveries,
            instance=self._instance,
            session_timeout_s=options.session_timeout,
        )

        def prove(batches: Mapping[int, CommitBatch]) -> Proof:
            if any(batch.moves for batch in batches.values()):
                positions = log_positions(topics, batches, own_ids())
            else:  # a trial moves no positions; this one is never read, but has the broker refuse a zombie
                positions = [TopicPartition(*topics.trial_place(number), 0) for number in batches]
            return Proof(topics.coordinators, membership.group_metadata(), positions)

        self._engine = Engine(
            membership.owned,
            publishing,
            recovery.await_coordinator,
            self._target_latency,
            slots=slots,
            prove=prove,
        )
        # A check request is a half with some more headers: it may be larger than the limit of its producer's client.
        self._sends = AckedProducer(servers, {**ANY_SIZE, **config}, _SEND_TIMEOUT_S, f"coordinator-{self._prefix}")
        sends, liveness = (
            CoordinatorSends(context, self._sends),
            Liveness(context, partial(clients.admin, servers, config)),
        )
        self._status = StatusLog(topics.status, sends)
        self._upkeep = LogUpkeep(context, admin, begun=time.monotonic())
        self._checks = CheckScheduler(context, liveness, sends, self._discarding)
        self._owned = membership.owned

    def _begin(self) -> None:
        # Not in `_open`: if start() fails, a joined member would keep partitions that no thread serves.
        self._sends.start()
        self._membership.join()

    def _round(self) -> None:
        engine, now = self._engine, time.monotonic()
        engine.poll(now)
        # Nothing can be published before it ends, so records are read in larger pieces meanwhile.
        has_ended = engine.take_result(IN_FLIGHT_S)
        self._count(now)
        self._membership.serve()
        if self._membership.was_cut_off():
            engine.shut()
        owned = self._membership.owned
        # Publishing goes first: reading all available records would never end, and little would be published.
        if not engine.is_crowded(sum(p.state.queue.ready for p in owned.values())):
            self._read(0.0 if has_ended else self._read_timeout_s(time.monotonic()))
        now = time.monotonic()
        self._upkeep.look(owned, now)
        engine.targets.look_now_and_then(now)
        for partition in owned.values():
            self._checks.run(partition, now)
        # Its Kafka transaction must have ended: this coordinator is also the next owner, and does not fence itself.
        for number in [number for number, p in owned.items() if p.is_given_up and not engine.has_part(number)]:
            self._membership.give_up(number)
        engine.begin(now)
        self._update_status(now)

    def _count(self, now: float) -> None:
        counts, recovering = self._context.counts, self._membership.recoveries.slow_call(now)
        counts.groups, counts.recoveries = self._engine.groups, self._engine.recoveries
        none = "", 0.0
        slow = self._engine.slow_call(), recovering if recovering[1] >= SLOW_S else none
        counts.slow_call, counts.slow_call_s = max(slow, key=lambda call: call[1])

    def _update_status(self, now: float) -> None:
        """Write the reasons why transactions wait into the status topic, for operators."""
        if now - self._status_at < _STATUS_INTERVAL_S:
            return
        self._status_at = now
        quarantine, call, missing = self._engine.quarantine, self._context.counts.slow_call, self._rights.missing()
        lacking = {name: text for name, text in missing.items() if not name.startswith(_HARMLESS)}
        halts = [f"a permission that the coordinator lacks: {text}" for text in dict.fromkeys(lacking.values())]
        self._current = Status(
            self._name,
            int(time.time() * 1000),
            (*self._membership.owned, *self._membership.recoveries.partitions),
            quarantine.refusing() | quarantine.reasons(),
            self._checks.unasked(self._membership.owned),
            (*halts, *([f"Kafka: {call} has not returned for more than {SLOW_S:g} s"] if call else ())),
            tuple(dict.fromkeys(text for name, text in missing.items() if name not in lacking)),
        )
        self._status.write(self._current, now)

    def _read_timeout_s(self, now: float) -> float:
        """Return the seconds to wait for records."""
        engine = self._engine
        if engine.is_in_flight:
            return 0.0
        if engine.is_busy or not engine.is_idle:
            return IN_FLIGHT_S
        if not any(p.state.has_work for p in self._membership.owned.values()):
            return _POLL_S
        # If the engine is not ready, it waits for a time or an answer. If it is, payloads are being read.
        return IN_FLIGHT_S if engine.is_ready(now) else _POLL_S

    def _read(self, timeout_s: float) -> None:
        # As many records as one Kafka transaction settles: more would wait in memory instead of in the logs.
        limit, owned = self._engine.decisions, self._membership.owned.values()
        undecided = sum(len(p.state.pending) - len(p.state.queue.all) for p in owned)
        waits_for_halves = any(p.feed.waiting for p in owned)
        records = self._membership.logs.read(
            timeout_s, limit, waits_for_halves=waits_for_halves, has_enough_halves=undecided >= 2 * limit
        )
        self._feed(records, time.monotonic())

    def _feed(self, records: Iterable[Message], now: float) -> None:
        half_topic, owned = self._context.topics.half, self._membership.owned
        for message in records:
            error = message.error()
            partition = owned.get(message.partition() or 0)
            if error is not None:
                topic = message.topic() or half_topic
                if not self._context.note_unreadable(error, f"the log {topic} cannot be read", topic):
                    text = "the half and op logs cannot be read: %s; trying again"
                    self._context.ration.warn("read", text, reason(error))
                if kind_of(error) is ErrorKind.OUT_OF_RANGE and partition is not None:
                    # The reader cannot continue: the log does not have the next offset.
                    partition.give_up(f"{message.topic()} does not have the next offset")
            elif partition is not None and message.topic() == half_topic:
                partition.feed.take_half(message, now)
            elif partition is not None:
                partition.feed.take_op(message, now)
        for number, partition in owned.items():
            partition.note_progress(now)
            self._membership.logs.limit_waiting(number, partition.feed.waiting)
        self._payloads.poll(owned, now)

    def _end(self) -> None:
        """Let open Kafka transactions end and leave the group. Every client call has a time limit."""
        self._payloads.close()
        try:
            self._engine.close(_STOP_BUDGET_S)
        finally:
            try:
                end_within(CLOSE_S, f"leaving the group {self._prefix}.coordinator", self._membership.leave)
            except KafkaException as error:
                _log.warning("the coordinator of %s ends all the same: %s", self._prefix, reason(error))
            self._sends.stop(_LAST_SENDS_BUDGET_S)
