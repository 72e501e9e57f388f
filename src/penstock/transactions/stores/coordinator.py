"""The public `Coordinator` of transactional messages. Its engine depends on the kind of store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from penstock.clients.transactional.settings import MOST_S
from penstock.errors import ConfigurationError
from penstock.fleet_member import (
    CommandSettings,
    FleetMember,
    Outcome,
    Service,
    StoreOperator,
    command_settings,
    sender_of,
)
from penstock.options import ClientConfig
from penstock.transactions.model import CoordinatorStatistics, DiscardPolicy, PendingTransaction
from penstock.transactions.operator.administration import Administration, outcome_text
from penstock.transactions.stores.kafka.administration import KafkaAdministration
from penstock.transactions.stores.kafka.coordinator.coordinator import KafkaCoordinator
from penstock.transactions.stores.relayed_store import RelayedStore
from penstock.transactions.stores.shard_coordinator import ShardCoordinator
from penstock.transactions.stores.store_coordinator import CoordinatorOptions, StoreCoordinator
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import DEFAULT_PARTITIONS

if TYPE_CHECKING:
    from penstock.telemetry import Telemetry

_TARGET_LATENCY_S = 0.02
#: Seconds to wait until a commanded decision takes effect: the sender of the command waits for an answer.
_EFFECT_BUDGET_S = 8.0
_DECISIONS = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK, "discard": Verdict.DISCARD}


def _operator(administration: Callable[[], AbstractContextManager[Administration]]) -> StoreOperator:
    """Return the operator's acts on a store as commands; they are in the store's audit log, too."""

    def settle(transaction_id: str, decision: str, actor: str, why: str) -> tuple[Outcome, str]:
        verdict = _DECISIONS[decision]
        with administration() as store:
            waits = store.decide(transaction_id, verdict, actor, why, _EFFECT_BUDGET_S)
        outcome = Outcome.SENT if waits else Outcome.DONE
        return outcome, f"transaction {transaction_id}: {outcome_text(verdict, waits)}"

    def resume(transaction_id: str, actor: str, why: str) -> str:
        with administration() as store:
            store.resume(transaction_id, actor, why)
        return f"transaction {transaction_id} was brought back, undecided; its group is asked again"

    return StoreOperator(settle, resume)


def operator_in_kafka(bootstrap_servers: str, prefix: str, config: ClientConfig) -> StoreOperator:
    """Return the operator's acts on a store in Kafka as commands."""
    return _operator(partial(KafkaAdministration, bootstrap_servers, prefix, config))


class Coordinator:
    """Settles the transactions of one store: publishes committed messages, checks undecided transactions.

    Thread-safe. `start` or the `with` block starts it. A store in Kafka or in a database may have any number of
    coordinators; they share the work. A file store has one coordinator, in its process.

    Args:
        bootstrap_servers: Kafka's addresses.
        prefix: the prefix of the names of the store's topics.
        store: a `SqlStore` or `FileStore` instead of Kafka's topics. Then `bootstrap_servers`, `prefix`, `partitions`,
            `target_latency`, `instance` and `config` belong to the store or have no use, and are refused here.
        transaction_timeout: seconds from the birth of a half to its first check.
        check_interval: seconds between two checks of a half.
        check_max: answered checks after which the discard policy settles a half that is still undecided, one interval
            after the last answer. Counts survive restarts of the coordinator: they are part of the store.
        check_backoff: factor by which the interval grows from check to check, to an hour at most.
        discard: the policy for a half whose checks are exhausted: `"topic"` moves it to `<prefix>.discarded`,
            `"commit"` publishes it, `"rollback"` settles it without a trace. A function returns its decision; UNKNOWN
            means the topic.
        check_timeout: seconds that such a function may take. After that, its answer counts as UNKNOWN.
        publish_timeout: the most seconds that a Kafka transaction may stand still on slow brokers. Time limits start at
            1 to 10 s, and grow with the measured times up to this one.
        partitions: partitions of half, op and done, if they have to be created.
        target_latency: target seconds of a Kafka transaction from its begin to the answer of its end. Under load, a
            Kafka transaction settles as many decisions as fit into this time.
        instance: a name of letters, digits, `.`, `_` and `-`, unique among the running coordinators of the prefix, and
            the same after each restart. With it, a killed coordinator continues as soon as it restarts: it gets its
            partitions back before its session ends, and its start ends its open Kafka transactions. If it does not
            come back, or without this name, another coordinator takes over within the session timeout.
        session_timeout: seconds after which a silent coordinator loses its partitions, or its shards of a database, to
            the other coordinators. Use more than a broker's own session (`broker.session.timeout.ms`, 9 s): while a
            dead broker still counts as in sync, the other brokers answer no heartbeat. The broker's minimum is 6 s.
        telemetry: metrics `penstock.transactions.*`, by OpenTelemetry; None (default) for none, at no cost.
        commands: whether it accepts commands that settle and resume transactions of its store, as the dashboard sends
            them, in the topic `penstock.commands`; or settings with another topic and a token. Anyone with write
            permission on the topic can command it. Its commands name the group `<prefix>.coordinator`.
        config: settings of the Kafka clients, by librdkafka's names.

    Raises:
        ConfigurationError: an argument is wrong. Nothing was started.
    """

    def __init__(
        self,
        *,
        bootstrap_servers: str | None = None,
        prefix: str = "penstock",
        store: RelayedStore | None = None,
        transaction_timeout: float = 6.0,
        check_interval: float = 30.0,
        check_max: int = 15,
        check_backoff: float = 1.0,
        discard: DiscardPolicy = "topic",
        check_timeout: float = 30.0,
        publish_timeout: float = MOST_S,
        partitions: int = DEFAULT_PARTITIONS,
        target_latency: float = _TARGET_LATENCY_S,
        instance: str | None = None,
        session_timeout: float = 10.0,
        telemetry: Telemetry | None = None,
        commands: bool | CommandSettings = False,
        config: ClientConfig | None = None,
    ) -> None:
        options = CoordinatorOptions(
            transaction_timeout=transaction_timeout,
            check_interval=check_interval,
            check_max=check_max,
            check_backoff=check_backoff,
            discard=discard,
            check_timeout=check_timeout,
            publish_timeout=publish_timeout,
            session_timeout=session_timeout,
            telemetry=telemetry,
        )
        if (store is None) == (bootstrap_servers is None):
            raise ConfigurationError("give either bootstrap_servers or a store, not both and not none of them")
        of_kafka = (prefix, partitions, target_latency, instance, config or {})
        if store is not None and of_kafka != ("penstock", DEFAULT_PARTITIONS, _TARGET_LATENCY_S, None, {}):
            raise ConfigurationError(
                "prefix, partitions, target_latency, instance and config are for a store in Kafka: set prefix and "
                "config on the store, and leave the others out"
            )
        self._engine: StoreCoordinator
        if store is not None:
            if not isinstance(store, RelayedStore):
                raise ConfigurationError(f"store must be a SqlStore or FileStore, but is a {type(store).__name__}")
            self._engine, self._prefix = ShardCoordinator(store, options), store.prefix
            cluster = store.bootstrap_servers, store.config
            self._operator = _operator(lambda: nullcontext(store.administration()))
        else:
            cluster, self._prefix = (bootstrap_servers or "", config or {}), prefix
            self._engine = KafkaCoordinator(
                cluster[0],
                options,
                prefix=prefix,
                partitions=partitions,
                target_latency=target_latency,
                instance=instance,
                config=config,
            )
            self._operator = operator_in_kafka(cluster[0], prefix, cluster[1])
        # Its name in reports, and so in commands.
        sender = sender_of(f"{self._prefix}.coordinator", cluster[1])
        self._fleet = FleetMember(sender, *cluster, commands=command_settings(commands))
        # Guards the field below.
        self._lock = threading.Lock()
        self._listener: Service | None = None

    def start(self) -> Self:
        """Connect, create missing topics and begin to settle. Calling it again does nothing.

        Raises:
            BrokerConnectionError: no broker answered within 15 s.
            MissingRightError: the client may not see a topic of the store, or may not create a missing one. Other
                missing permissions are shown in the log, in `statistics` and in `penstock tx ls`; the coordinator
                continues once they are granted.
            ConfigurationError: the client library refused a setting; a topic of the store has a setting that can lose
                transactions; or a file store has a coordinator already.
            StoreConnectionError: the database of a SQL store did not answer.
            StoreInUseError: another process has the file store.
            StoreDamagedError: acknowledged data of a file store is missing or cannot be read.
            StoppedError: it was stopped before.
        """
        self._engine.start()
        with self._lock:
            if self._listener is None:
                self._listener = self._fleet.listener(self._operator)
                if self._listener is not None:
                    self._listener.start()
        return self

    def stop(self, timeout: float = 30.0) -> None:
        """Finish the open Kafka transaction, release the partitions and end, within `timeout` seconds.

        Raises:
            StoppedError: it did not end in time; or an error had ended it before, which is chained as the cause.
        """
        with self._lock:
            if self._listener is not None:
                self._listener.stop()
        self._engine.stop(max(0.0, timeout))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds until it has ended; return whether it has."""
        return self._engine.wait(timeout)

    def statistics(self) -> CoordinatorStatistics:
        """Return counts since the start and the transactions pending now. Safe from any thread.

        For a store in Kafka, `pending` and similar counts cover the partitions of this coordinator; for another store,
        they cover the whole store.
        """
        return self._engine.statistics()

    def waits(self) -> list[str]:
        """Return sentences that say what pending transactions wait for besides decisions. Safe from any thread."""
        return self._engine.waits()

    @property
    def prefix(self) -> str:
        """The prefix of the names of the store's topics."""
        return self._prefix

    @property
    def is_in_kafka(self) -> bool:
        """Whether its store is in Kafka; then any process may settle its transactions."""
        return self._engine.in_kafka

    @property
    def group(self) -> str:
        """The group in its commands, `<prefix>.coordinator`; without an app, it also reports under this group."""
        return self._fleet.sender.group

    @property
    def member(self) -> str:
        """The member name in its commands."""
        return self._fleet.sender.member

    @property
    def hears_commands(self) -> bool:
        """Whether it accepts commands."""
        return self._fleet.commands is not None

    def pending(self, most: int) -> list[PendingTransaction]:
        """Return up to `most` of the oldest pending transactions of its partitions or shards. Safe from any thread."""
        return list(self._engine.pending(most))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
