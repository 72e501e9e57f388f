"""The coordinator of transactional messages: one face for every store. The engine behind it is chosen by the store."""

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
from penstock.transactions.stores.coordination import CoordinatorOptions, StoreCoordinator
from penstock.transactions.stores.kafka.administration import KafkaAdministration
from penstock.transactions.stores.kafka.coordinator.coordinator import KafkaCoordinator
from penstock.transactions.stores.relayed_store import RelayedStore
from penstock.transactions.stores.shard_coordinator import ShardCoordinator
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import DEFAULT_PARTITIONS

if TYPE_CHECKING:
    from penstock.telemetry import Telemetry

_TARGET_LATENCY_S = 0.02
#: Seconds to wait until a commanded decision takes effect: whoever asked waits for an answer, and not for ever.
_EFFECT_BUDGET_S = 8.0
_DECISIONS = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK, "discard": Verdict.DISCARD}


def _operator(administration: Callable[[], AbstractContextManager[Administration]]) -> StoreOperator:
    """Return what is done to a store by command: as an operator does it, in the store's own audit, too."""

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
    """Return what is done to a store in Kafka by command."""
    return _operator(partial(KafkaAdministration, bootstrap_servers, prefix, config))


class Coordinator:
    """Settles the transactions of all producers of one store: publishes what committed, asks about what is undecided.

    Thread-safe. Nothing is started before `start` or the `with` block. Of a store in Kafka or in a database any number
    may run; they share the work. A file store has one, in its process.

    Args:
        bootstrap_servers: Kafka's addresses.
        prefix: what the names of the store's topics begin with.
        store: a `SqlStore` or `FileStore`, instead of Kafka's topics; `bootstrap_servers`, `prefix`, `partitions`,
            `target_latency`, `instance` and `config` are its own then, or of no use to it, and refused here.
        transaction_timeout: seconds from the birth of a half to its first check.
        check_interval: seconds between two checks of a half.
        check_max: answered checks after which a half that is still undecided meets the discard policy, one interval
            after the last answer. Counts survive restarts of the coordinator: they are part of the store.
        check_backoff: factor by which the interval grows from check to check, to an hour at most.
        discard: what becomes of a half whose checks are exhausted: `"topic"` moves it to `<prefix>.discarded`,
            `"commit"` publishes it, `"rollback"` settles it without a trace, and a function is asked; its UNKNOWN means
            the topic.
        check_timeout: seconds that such a function may take; one that takes longer has said UNKNOWN.
        publish_timeout: the most seconds that a Kafka transaction may stand still on slow brokers. The limits that fit
            brokers which are well, 1 to 10 s, grow with what is measured, no further than this.
        partitions: partitions of half, op and done, if they have to be created.
        target_latency: seconds that a Kafka transaction may take from its begin to the answer of its end. Under load
            as many decisions share one as end within it.
        instance: a name of letters, digits, `.`, `_` and `-` that no other running coordinator of the prefix has, the
            same after each restart. With it a coordinator that was killed goes on at once: it gets its partitions back
            without waiting for its session to end, and what it left open ends when it starts. Without it, another
            coordinator takes over within the session timeout; and so it does where it does not come back.
        session_timeout: seconds after which a coordinator that fell silent loses its partitions, or its shards of a
            database, to the others. More than a broker's own session (`broker.session.timeout.ms`, 9 s): as long as a
            broker that died counts as in sync, the others answer no heartbeat. The broker's least is 6 s.
        telemetry: metrics `penstock.transactions.*`, by OpenTelemetry; None (default) for none, at no cost.
        commands: whether it settles and resumes transactions of its store as commands in the topic
            `penstock.commands`, as by the dashboard: who may write there commands it; or which topic, and with which
            token. It hears what is for the group `<prefix>.coordinator`.
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
                "prefix, partitions, target_latency, instance and config are for a store in Kafka: give the store its "
                "own prefix and config, and leave the others out"
            )
        self._engine: StoreCoordinator
        if store is not None:
            if not isinstance(store, RelayedStore):
                raise ConfigurationError(f"store must be a SqlStore or FileStore, but is a {type(store).__name__}")
            self._engine, self._prefix = ShardCoordinator(store, options), store.prefix
            reached = store.bootstrap_servers, store.config
            self._operator = _operator(lambda: nullcontext(store.administration()))
        else:
            reached, self._prefix = (bootstrap_servers or "", config or {}), prefix
            self._engine = KafkaCoordinator(
                reached[0],
                options,
                prefix=prefix,
                partitions=partitions,
                target_latency=target_latency,
                instance=instance,
                config=config,
            )
            self._operator = operator_in_kafka(reached[0], prefix, reached[1])
        # As whom it hears, and, where it reports, reports: who reads that commands it by this name.
        sender = sender_of(f"{self._prefix}.coordinator", reached[1])
        self._fleet = FleetMember(sender, *reached, commands=command_settings(commands))
        self._lock = threading.Lock()
        # Made and ended under the lock.
        self._listener: Service | None = None

    def start(self) -> Self:
        """Connect, create what is absent, and begin to settle. May be repeated.

        Raises:
            BrokerConnectionError: no broker answered within 15 s.
            MissingRightError: a topic of the store is not to be seen, or is missing and may not be created. What else
                it may not do shows in the log, in `statistics` and in `penstock tx ls`, and waits until it may.
            ConfigurationError: the client library refused a setting; a topic of the store has one that can lose
                transactions; or a file store has a coordinator already.
            StoreConnectionError: the database of a SQL store did not answer.
            StoreInUseError: another process has the file store.
            StoreDamagedError: what a file store had acknowledged is missing or does not read.
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
        """Finish the Kafka transaction under way, give the partitions up and end, within `timeout` seconds.

        Raises:
            StoppedError: it did not end in time, or had ended by itself; then the cause is chained.
        """
        with self._lock:
            if self._listener is not None:
                self._listener.stop()
        self._engine.stop(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds, and tell whether it has."""
        return self._engine.wait(timeout)

    def statistics(self) -> CoordinatorStatistics:
        """Return counts since the start and what is pending now. Safe from any thread.

        Of a store in Kafka, `pending` and its like are those of the partitions that this coordinator owns; of another
        store, those of all the store.
        """
        return self._engine.statistics()

    def waits(self) -> list[str]:
        """Return in sentences what its pending transactions wait for besides their decisions. Safe from any thread."""
        return self._engine.waits()

    @property
    def prefix(self) -> str:
        """What the names of the store's topics begin with."""
        return self._prefix

    @property
    def is_in_kafka(self) -> bool:
        """Whether its store is in Kafka, where any process may settle what is pending."""
        return self._engine.in_kafka

    @property
    def group(self) -> str:
        """The group that commands for it name, `<prefix>.coordinator`; it reports by it, too, where it is no app's."""
        return self._fleet.sender.group

    @property
    def member(self) -> str:
        """The member that commands for it name."""
        return self._fleet.sender.member

    @property
    def hears_commands(self) -> bool:
        """Whether it carries out commands."""
        return self._fleet.commands is not None

    def pending(self, most: int) -> list[PendingTransaction]:
        """Return the oldest pending transactions of this coordinator, at most so many. Safe from any thread.

        Of a store in Kafka, those of the partitions that this coordinator owns; of a database, those of its shards.
        """
        return list(self._engine.pending(most))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
