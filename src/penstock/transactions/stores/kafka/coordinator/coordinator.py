"""The coordinator: settles the transactions of all producers that share a prefix.

This is its face: arguments, start and stop, statistics. What it does is in `loop`, one thread's loop; which
partitions it owns, in `membership`.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from confluent_kafka import KafkaException

from penstock import clients
from penstock.clients.bounded_calls import CLOSE_S, end_within
from penstock.clients.kafka_errors import reason
from penstock.clients.requests.group_requests import GroupAdmin
from penstock.clients.requests.topics import single_copies
from penstock.clients.rights import principal_of, transactional_right
from penstock.clients.transactional.pace import Pace
from penstock.errors import ConfigurationError, StoppedError, raised
from penstock.options import ClientConfig, positive, positive_int, reserved
from penstock.transactions.core.discard import Discarding
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.quarantine import TargetQuarantine
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.publishing.backlog import Proof
from penstock.transactions.publishing.batch_limit import BatchLimit
from penstock.transactions.publishing.broker_gate import BrokerGate
from penstock.transactions.publishing.engine import Engine
from penstock.transactions.publishing.publisher import Publisher
from penstock.transactions.publishing.publisher_slot import PublisherSlot
from penstock.transactions.publishing.targets import cluster_targets
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.check_scheduler import CheckScheduler
from penstock.transactions.stores.kafka.coordinator.check_sender import CheckSender
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition
from penstock.transactions.stores.kafka.coordinator.log_upkeep import LogUpkeep
from penstock.transactions.stores.kafka.coordinator.loop import CoordinatorLoop
from penstock.transactions.stores.kafka.coordinator.membership import Membership
from penstock.transactions.stores.kafka.coordinator.status import Status, StatusLog
from penstock.transactions.stores.kafka.counts import PartitionReading
from penstock.transactions.stores.kafka.logs.payload_reader import PayloadReader
from penstock.transactions.stores.kafka.logs.topic_settings import correct_settings
from penstock.transactions.stores.kafka.recovery.fencing import (
    Fence,
    encode_claim,
    log_positions,
    transactional_names,
    trial_positions,
)
from penstock.transactions.stores.kafka.recovery.recovered_partition import DoneRead
from penstock.transactions.stores.kafka.recovery.recoveries import Recoveries
from penstock.transactions.stores.kafka.recovery.recovery import RecoveryReader
from penstock.transactions.stores.metrics import observe, publication_spans
from penstock.transactions.stores.options import CoordinatorOptions
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.topics import COORDINATOR_NEEDS, StoreTopics, open_topics
from penstock.transactions.writing.acked_producer import ANY_SIZE, AckedProducer

_log = logging.getLogger("penstock.transactions")

#: Seconds that checks and the coordinator's own decisions may take to be stored, and that stopping waits for them.
_SEND_TIMEOUT_S = 15.0
_LAST_SENDS_S = 5.0

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


class KafkaCoordinator:
    """Settles the transactions of a store in Kafka. Any number may run; they share the partitions. Thread-safe.

    Arguments and units are those of `Coordinator`. A wrong one raises `ConfigurationError`; nothing was started.
    """

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
        self._prefix = prefix
        self._instance = instance
        self._target_latency = target_latency
        self._options = options
        self._context = CoordinatorContext(bootstrap_servers, given, options.policy, StoreTopics(prefix, partitions))
        self._admin = clients.admin(bootstrap_servers, given)
        # Set by stop(), read by all threads.
        self._stopping = threading.Event()
        self._start_lock = threading.Lock()
        # Written by start() under its lock.
        self._thread: threading.Thread | None = None
        # Written by the coordinator's thread when it dies of an error, read by stop() after joining it.
        self._failure: BaseException | None = None
        # Made by start() under its lock, then used by the coordinator's thread; others read `owned`.
        self._membership: Membership | None = None
        #: What hinders it, as of its last report. Written by the coordinator's thread, read by any.
        self.status: Status | None = None

    def start(self) -> None:
        """Create the store's topics where they are absent and start settling. Raises as `Coordinator.start`."""
        with self._start_lock:
            if self._stopping.is_set():
                raise StoppedError(f"the coordinator of {self._prefix} was stopped; make a new one")
            if self._thread is None:
                self._thread = self._open()
                self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """Finish the Kafka transaction under way, give the partitions up and end. Raises as `Coordinator.stop`."""
        self._stopping.set()
        # A start under way is waited for: it may start a thread after all, which ends at once.
        has_started = self._start_lock.acquire(timeout=timeout)
        if has_started:
            self._start_lock.release()
        if not has_started or not self.wait(timeout):
            raise StoppedError(f"the coordinator of {self._prefix} did not end within {timeout:g} s; it goes on ending")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise StoppedError(f"the coordinator of {self._prefix} had stopped by itself: {failure}") from failure

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds, and tell whether it has."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def statistics(self) -> CoordinatorStatistics:
        """Return counts since the start and what is pending now. Safe from any thread."""

        def read() -> list[PartitionReading]:
            now = time.monotonic()
            return [partition.reading(now) for partition in self._owned()]

        missing = tuple(self._context.rights.missing().values())
        return replace(self._context.counts.statistics(read), missing_rights=missing)

    def pending(self, most: int) -> list[Pending]:
        """Return the oldest transactions that are pending now, at most so many of each partition. Any thread."""
        return [pending for partition in self._owned() for pending in partition.oldest(most)]

    def now_ms(self) -> int:
        """Return the broker's time in milliseconds since the epoch; 0 as long as no record gave it. Any thread."""
        return self._context.clock.now_ms(time.monotonic())

    def _owned(self) -> list[HalfPartition]:
        membership = self._membership
        # list() of a dict's values is one step under the interpreter lock: the coordinator cannot change it midway.
        return list(membership.owned.values()) if membership is not None else []

    def _open(self) -> threading.Thread:
        """Make all parts and return the thread that drives them, not started yet."""
        context, options, admin = self._context, self._options, self._admin
        servers, config, principal = context.bootstrap_servers, context.config, principal_of(context.config)
        wanted = context.topics.partitions
        topics = open_topics(admin, servers, self._prefix, wanted, needs=COORDINATOR_NEEDS, principal=principal)
        context.topics = topics
        correct_settings(admin, servers, topics, refuses=True, principal=principal)
        for found in single_copies(admin, topics.all):
            _log.warning("%s", found)

        names, pace = transactional_names(topics, self._instance or new_id()), Pace(options.publish_timeout)
        slots: list[PublisherSlot] = []

        def own_ids() -> list[str]:
            return [slot.transactional_id for slot in slots]

        recovery = RecoveryReader(context, self._stopping.is_set, Fence(context, own_ids))

        def read_done(starts: Mapping[int, int]) -> Mapping[int, DoneRead]:
            return recovery.done(starts, starts)

        def make(transactional_id: str, *, apart: bool) -> Publisher:
            return Publisher(
                servers,
                config,
                transactional_id,
                done_topic=topics.done,
                ids_right=transactional_right(f"{topics.coordinators}."),
                rights=context.rights,
                pace=pace,
                apart=apart,
                spans=publication_spans(options.telemetry, self._prefix),
            )

        common = [PublisherSlot(partial(make, apart=False), read_done, it, context.left, pace) for it in names.common]
        apart = [PublisherSlot(partial(make, apart=True), read_done, it, context.left, pace) for it in names.apart]
        slots += common + apart
        payloads = PayloadReader(context)
        membership = self._membership = Membership(
            context,
            Recoveries(context, recovery.recover),
            partial(HalfPartition, context, payloads),
            instance=self._instance,
            session_timeout_s=options.session_timeout,
        )

        def prove(batches: Mapping[int, Any], *, apart: bool) -> Proof:
            claim = encode_claim(own_ids())
            positions = trial_positions(topics, batches) if apart else log_positions(topics, batches, claim)
            return Proof(topics.coordinators, membership.group_metadata(), positions)

        engine = Engine(
            membership.owned,
            slots=common,
            trial_slots=apart,
            quarantine=TargetQuarantine(),
            targets=cluster_targets(admin, servers, self._prefix, context.rights),
            prove=prove,
            gate=BrokerGate(recovery.await_coordinator, context.left),
            limit=BatchLimit(self._target_latency),
            ration=context.ration,
        )
        # A question is a half with a few headers more: it may be larger than what its producer's client let through.
        sends = AckedProducer(servers, {**ANY_SIZE, **config}, _SEND_TIMEOUT_S, f"coordinator-{self._prefix}")
        members = GroupAdmin(partial(clients.admin, servers, config))
        discarding = Discarding(options.discard, options.check_timeout, self._prefix)
        status_log = StatusLog(context, sends)

        def keep_status(status: Status, now: float) -> None:
            self.status = status
            status_log.write(status, now)

        loop = CoordinatorLoop(
            context,
            names.common[0],
            membership=membership,
            engine=engine,
            upkeep=LogUpkeep(context, admin, membership.logs, begun=time.monotonic()),
            checks=CheckScheduler(context, CheckSender(context, members, sends), discarding),
            status=keep_status,
        )
        return threading.Thread(
            target=self._run,
            args=(loop, membership, sends, (discarding.close, payloads.close)),
            name=f"penstock-coordinator-{self._prefix}",
            daemon=True,
        )

    def _run(
        self,
        loop: CoordinatorLoop,
        membership: Membership,
        sends: AckedProducer,
        ends: Iterable[Callable[[], object]],
    ) -> None:
        observed = None
        try:
            observed = observe(self._options.telemetry, self._prefix, self.statistics, in_kafka=True)
            sends.start()
            membership.join()
            while not self._stopping.is_set():
                loop.round()
        except:  # noqa: E722 - see `raised`; kept for stop(), which raises it
            # Bad input never comes here: this is a mistake of penstock or a setting that Kafka refuses for good.
            self._failure = raised()
            _log.error("the coordinator of %s stops", self._prefix, exc_info=self._failure)
        finally:
            self._stopping.set()
            if observed is not None:
                observed.close()
            for end in ends:
                end()
            self._leave(loop, membership, sends)

    def _leave(self, loop: CoordinatorLoop, membership: Membership, sends: AckedProducer) -> None:
        """Let what is under way end and leave the group; no call of the client library keeps this from ending."""
        try:
            loop.close()
        except:  # noqa: E722 - see `raised`; what ended it before counts more
            self._failure = self._failure or raised()
            _log.error("the coordinator of %s did not end well", self._prefix, exc_info=raised())
        try:
            end_within(CLOSE_S, f"leaving the group {self._prefix}.coordinator", membership.leave)
        except KafkaException as error:
            _log.warning("the coordinator of %s ends all the same: %s", self._prefix, reason(error))
        sends.stop(_LAST_SENDS_S)
