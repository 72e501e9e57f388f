"""The coordinator of a store in Kafka: it settles the transactions of all producers that share a prefix.

Here its parts are made, and its partitions shown. What it does is in `loop`, round by round; which partitions it owns,
in `membership`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import KafkaException, TopicPartition

from penstock import clients
from penstock.clients.bounded_calls import CLOSE_S, end_within
from penstock.clients.kafka_errors import reason
from penstock.clients.rights import principal_of
from penstock.clients.topics import single_copies
from penstock.clients.transactional.messages import Pace
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig, positive, positive_int, reserved
from penstock.transactions.acked_producer import ANY_SIZE, AckedProducer
from penstock.transactions.core.commit_batch import CommitBatch
from penstock.transactions.model import CoordinatorStatistics, PendingTransaction
from penstock.transactions.publishing.engine import Engine, PublishingClients
from penstock.transactions.publishing.publisher import Proof
from penstock.transactions.publishing.targets import cluster_targets
from penstock.transactions.stores.coordination import CoordinatorOptions, StoreCoordinator, publication_spans
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.checks import CheckScheduler, Liveness
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition, held_in
from penstock.transactions.stores.kafka.coordinator.log_upkeep import LogUpkeep
from penstock.transactions.stores.kafka.coordinator.loop import CoordinatorLoop
from penstock.transactions.stores.kafka.coordinator.membership import Membership
from penstock.transactions.stores.kafka.coordinator.own_sends import OwnSends
from penstock.transactions.stores.kafka.coordinator.status import Status, StatusLog, described_pending, waits_for
from penstock.transactions.stores.kafka.logs.fencing import log_positions
from penstock.transactions.stores.kafka.logs.payload_reader import PayloadReader
from penstock.transactions.stores.kafka.logs.recovered_partition import DoneRead
from penstock.transactions.stores.kafka.logs.recovery import Recoveries, RecoveryReader
from penstock.transactions.stores.kafka.logs.topic_settings import check_settings
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.topics import COORDINATOR_NEEDS, StoreTopics, open_topics

_log = logging.getLogger("penstock.transactions")
#: Seconds that checks and the coordinator's own decisions may take to be stored, and that stopping waits for them.
_SEND_TIMEOUT_S = 15.0
_LAST_SENDS_BUDGET_S = 5.0
#: Seconds that transactions under way may take to end when the coordinator stops.
_STOP_BUDGET_S = 8.0
#: What a decided transaction waits for that nothing hinders.
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

    Arguments and units are those of `Coordinator`. A wrong one raises `ConfigurationError`; nothing was started.
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
        positive("target_latency", target_latency)
        if instance is not None and not _INSTANCE.fullmatch(instance):
            raise ConfigurationError(
                f"instance must be up to 100 letters, digits, '.', '_' or '-', but is {instance!r}; choose such a name"
            )
        given = config or {}
        reserved(given, _OWNED, "the coordinator")
        self._context = CoordinatorContext(bootstrap_servers, given, options.policy, StoreTopics(prefix, partitions))
        label = f"the coordinator of {prefix}"
        super().__init__(label, prefix, self._context.rights, self._context.left, options)
        self._instance = instance
        self._target_latency = target_latency
        self._admin = clients.admin(bootstrap_servers, given)
        # Made by start(), then used by the coordinator's thread; others read what is owned.
        self._membership: Membership | None = None
        self._engine: Engine
        self._loop: CoordinatorLoop
        self._sends: AckedProducer
        self._payloads: PayloadReader
        self._status: StatusLog | None = None

    def _held(self, *, own: bool) -> CoordinatorStatistics:  # noqa: ARG002 - it knows of its partitions alone
        def read() -> dict[str, Any]:
            now = time.monotonic()
            return held_in(self._owned(), now)

        return self._context.counts.statistics(read)

    def pending(self, most: int) -> Sequence[PendingTransaction]:
        """Return the oldest transactions that are pending in its partitions, at most so many. Any thread."""
        status, now_ms = self._current_status, self._context.clock.now_ms(time.monotonic())
        # It is one of its own partitions: any of them names its owner.
        statuses, number = ([], 0) if status is None else ([status], next(iter(status.partitions), 0))
        some = (pending for partition in self._owned() for pending in partition.oldest(most))
        return [
            described_pending(
                pending,
                now_ms,
                waits_for(pending, number, statuses) or ("" if pending.verdict is None else _ITS_TURN),
            )
            for pending in sorted(some, key=lambda pending: pending.birth_ms)[:most]
        ]

    def waits(self) -> list[str]:
        """Return in sentences what its pending transactions wait for besides their decisions. Any thread."""
        status = self._current_status
        return super().waits() if status is None else status.lines()

    @property
    def _current_status(self) -> Status | None:
        return self._status.current if self._status is not None else None

    def _owned(self) -> list[HalfPartition]:
        membership = self._membership
        # list() of a dict's values is one step under the interpreter lock: the coordinator cannot change it midway.
        return list(membership.owned.values()) if membership is not None else []

    def _open(self) -> None:
        context, options, admin = self._context, self._options, self._admin
        servers, config, principal = context.bootstrap_servers, context.config, principal_of(context.config)
        wanted = context.topics.partitions
        topics = open_topics(admin, servers, self._prefix, wanted, needs=COORDINATOR_NEEDS, principal=principal)
        context.topics = topics
        check_settings(admin, servers, topics, refuses=True, principal=principal)
        for found in single_copies(admin, topics.all):
            _log.warning("%s", found)

        publishing = PublishingClients(
            servers,
            config,
            topics.done,
            topics.discarded,
            ids_begin=f"{topics.coordinators}.",
            rights=context.rights,
            pace=Pace(options.publish_timeout),
            targets=cluster_targets(admin, servers, self._prefix, context.rights),
            left=context.left,
            spans=lambda: publication_spans(options.telemetry, self._prefix),
        )

        def own_ids() -> list[str]:
            return [slot.transactional_id for slot in (*common, *apart)]

        recovery = RecoveryReader(context, own_ids)
        recoveries = Recoveries(context, recovery.recover, self._stopping.is_set)

        def read_done(starts: Mapping[int, int]) -> Mapping[int, DoneRead]:
            return recovery.done(starts, starts, recoveries.require_running)

        name = f"{topics.coordinators}.{self._instance or new_id()}"
        common = [publishing.slot(f"{name}.{letter}", read_done, apart=False) for letter in "abc"]
        apart = [publishing.slot(f"{name}.{letter}", read_done, apart=True) for letter in "xyz"]
        self._payloads = PayloadReader(context)
        membership = self._membership = Membership(
            context,
            recoveries,
            partial(HalfPartition, context, self._payloads),
            instance=self._instance,
            session_timeout_s=options.session_timeout,
        )

        def prove(batches: Mapping[int, CommitBatch]) -> Proof:
            if any(batch.moves for batch in batches.values()):
                positions = log_positions(topics, batches, own_ids())
            else:  # of what is tried apart nobody reads the positions, but a zombie is refused
                positions = [TopicPartition(topics.discarded, number, 0) for number in batches]
            return Proof(topics.coordinators, membership.group_metadata(), positions)

        self._engine = Engine(
            membership.owned,
            publishing,
            recovery.await_coordinator,
            self._target_latency,
            slots=common,
            trial_slots=apart,
            prove=prove,
        )
        # A question is a half with a few headers more: it may be larger than what its producer's client let through.
        self._sends = AckedProducer(servers, {**ANY_SIZE, **config}, _SEND_TIMEOUT_S, f"coordinator-{self._prefix}")
        sends, liveness = OwnSends(context, self._sends), Liveness(context, partial(clients.admin, servers, config))
        self._status = StatusLog(topics.status, sends)
        self._loop = CoordinatorLoop(
            context,
            common[0].name,
            membership=membership,
            engine=self._engine,
            upkeep=LogUpkeep(context, admin, begun=time.monotonic()),
            checks=CheckScheduler(context, liveness, sends, self._discarding),
            status=self._status,
        )

    def _begin(self) -> None:
        self._sends.start()
        if self._membership is not None:
            self._membership.join()

    def _round(self) -> None:
        self._loop.round()

    def _end(self) -> None:
        """Let what is under way end and leave the group; no call of the client library keeps this from ending."""
        self._payloads.close()
        try:
            self._engine.close(_STOP_BUDGET_S)
        finally:
            try:
                if self._membership is not None:
                    end_within(CLOSE_S, f"leaving the group {self._prefix}.coordinator", self._membership.leave)
            except KafkaException as error:
                _log.warning("the coordinator of %s ends all the same: %s", self._prefix, reason(error))
            self._sends.stop(_LAST_SENDS_BUDGET_S)
