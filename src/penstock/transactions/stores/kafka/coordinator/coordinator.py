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

from confluent_kafka import KafkaException

from penstock import clients
from penstock.clients.bounded_calls import CLOSE_S, end_within
from penstock.clients.groups import GroupAdmin
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
from penstock.transactions.stores.kafka.coordinator.checks import CheckScheduler, CheckSender
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition, held_in
from penstock.transactions.stores.kafka.coordinator.log_upkeep import LogUpkeep
from penstock.transactions.stores.kafka.coordinator.loop import CoordinatorLoop
from penstock.transactions.stores.kafka.coordinator.membership import Membership
from penstock.transactions.stores.kafka.coordinator.status import Status, StatusLog, described_pending, waits_for
from penstock.transactions.stores.kafka.logs.fencing import (
    Fence,
    encode_claim,
    log_positions,
    transactional_names,
    trial_positions,
)
from penstock.transactions.stores.kafka.logs.payload_reader import PayloadReader
from penstock.transactions.stores.kafka.logs.recovered_partition import DoneRead
from penstock.transactions.stores.kafka.logs.recovery import Recoveries, RecoveryReader
from penstock.transactions.stores.kafka.logs.topic_lookup import correct_settings
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
        # What hinders it, as of its last report. Written by the coordinator's thread, read by any.
        self._status: Status | None = None

    def _held(self, *, own: bool) -> CoordinatorStatistics:  # noqa: ARG002 - it knows of its partitions alone
        def read() -> dict[str, Any]:
            now = time.monotonic()
            return held_in([partition.reading(now) for partition in self._owned()])

        return self._context.counts.statistics(read)

    def pending(self, most: int) -> Sequence[PendingTransaction]:
        """Return the oldest transactions that are pending in its partitions, at most so many. Any thread."""
        status, now_ms = self._status, self._context.clock.now_ms(time.monotonic())
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
        return super().waits() if self._status is None else self._status.lines()

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
        correct_settings(admin, servers, topics, refuses=True, principal=principal)
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
        names = transactional_names(topics, self._instance or new_id())

        def own_ids() -> list[str]:
            return [slot.transactional_id for slot in (*common, *apart)]

        recovery = RecoveryReader(context, self._stopping.is_set, Fence(context, own_ids))

        def read_done(starts: Mapping[int, int]) -> Mapping[int, DoneRead]:
            return recovery.done(starts, starts)

        common = [publishing.slot(name, read_done, apart=False) for name in names.common]
        apart = [publishing.slot(name, read_done, apart=True) for name in names.apart]
        self._payloads = PayloadReader(context)
        membership = self._membership = Membership(
            context,
            Recoveries(context, recovery.recover),
            partial(HalfPartition, context, self._payloads),
            instance=self._instance,
            session_timeout_s=options.session_timeout,
        )

        def prove(batches: Mapping[int, CommitBatch]) -> Proof:
            is_common = any(batch.moves for batch in batches.values())
            claim = encode_claim(own_ids())
            positions = log_positions(topics, batches, claim) if is_common else trial_positions(topics, batches)
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
        name = f"coordinator-{self._prefix}"
        self._sends = AckedProducer(servers, {**ANY_SIZE, **config}, _SEND_TIMEOUT_S, name)
        members = GroupAdmin(partial(clients.admin, servers, config))
        status_log = StatusLog(context, self._sends)

        def keep_status(status: Status, now: float) -> None:
            self._status = status
            status_log.write(status, now)

        self._loop = CoordinatorLoop(
            context,
            names.common[0],
            membership=membership,
            engine=self._engine,
            upkeep=LogUpkeep(context, admin, membership.logs, begun=time.monotonic()),
            checks=CheckScheduler(context, CheckSender(context, members, self._sends), self._discarding),
            status=keep_status,
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
