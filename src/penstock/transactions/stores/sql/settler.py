"""The coordinator of a SQL store: it publishes what was committed, and asks about what nobody decided.

Its thread speaks with the database alone. Each shard is published by threads of its own (see `relay`), so that leases
are renewed whatever Kafka does.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

import sqlalchemy as sa

from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.kafka import TopicSpec, admin_client, ensure_topics
from penstock.clients.rights import Operation, principal_of
from penstock.errors import StoppedError, raised
from penstock.transactions.coordinator.metrics import observe
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.store import CoordinatorOptions
from penstock.transactions.stores.relay.done_log import DoneLog, create_done_log
from penstock.transactions.stores.relay.outbound import Outbound
from penstock.transactions.stores.relay.relay import Relay
from penstock.transactions.stores.sql.asking import Asking
from penstock.transactions.stores.sql.backlog import SqlBacklog
from penstock.transactions.stores.sql.claims import Claims
from penstock.transactions.stores.sql.counting import SqlCounts
from penstock.transactions.stores.sql.shards import Shards
from penstock.transactions.stores.sql.writer import cause_of
from penstock.transactions.wire.ids import new_id
from penstock.transactions.writing.missing_rights import MissingRights

if TYPE_CHECKING:
    from penstock.transactions.stores.sql.store import SqlStore

_log = logging.getLogger("penstock.transactions")

#: Seconds between two looks: after something was found, and when nothing was for a while.
_BUSY_S = 0.01
_IDLE_S = 0.1
_QUESTIONS_S = 0.1
_TRIM_S = 5.0
#: Seconds after a failure.
_PAUSE_S = 0.5
#: Of the time that a stop has, the part in which what is under way may end; and most seconds for it.
_ENDING_PART = 0.6
_ENDING_S = 20.0
_KEPT = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1", "max.message.bytes": str(2 << 20)}


class SqlSettler:
    """A coordinator on a SQL store; any number may run, and share the shards. Thread-safe.

    Args:
        store: the store.
        options: the coordinator's.
    """

    def __init__(self, store: SqlStore, options: CoordinatorOptions) -> None:
        self._store = store
        self._name = new_id()
        self._session_s = options.session_timeout_s
        self._shards = Shards(store.database, self._name, options.session_timeout_s)
        self._claims = Claims(store.database, store.topics.discarded)
        self._asking = Asking(store.database, options, self._name[-6:])
        self._counts = SqlCounts(store.database, self._asking, self._name)
        self._telemetry = options.telemetry
        self._left = LeftBehind("the coordinator of the SQL store")
        self._rights = MissingRights(store.config)
        # Of the thread alone: by shard, what publishes it, and what it publishes; shards that are given up.
        self._relays: dict[int, tuple[Relay, SqlBacklog]] = {}
        self._leaving: set[int] = set()
        # Counts of relays that are gone.
        self._former_groups = self._former_recoveries = 0
        self._next = {"tend": 0.0, "ask": 0.0, "trim": time.monotonic() + _TRIM_S}
        self._done = ""
        self._stopping = threading.Event()
        # Set by whoever has something for the thread to do.
        self._wake = threading.Event()
        # Monotonic second by which what is under way shall have ended; written before `_stopping` is set.
        self._end_by = 0.0
        self._thread = threading.Thread(
            target=self._run, name=f"penstock-sql-coordinator-{self._name[-6:]}", daemon=True
        )
        self._error: BaseException | None = None
        # Guards starting, and whether the store was given back.
        self._start_lock = threading.Lock()
        self._has_store = False

    def start(self) -> Self:
        """Connect, create what is absent, and begin to settle. May be repeated.

        Raises:
            StoreConnectionError: the database did not answer.
            BrokerConnectionError: no broker answered.
            StoppedError: it was stopped before.
        """
        with self._start_lock:
            if self._stopping.is_set():
                raise StoppedError("the coordinator of the SQL store was stopped; make a new one")
            if not self._has_store:
                self._open()
                self._has_store = True
                self._thread.start()
        return self

    def _open(self) -> None:
        store = self._store
        store.start()
        try:
            self._done = f"{store.topics.prefix}.sql-{store.uuid}.done"
            admin = admin_client(store.bootstrap_servers, store.config)
            discarded = store.topics.discarded
            ensure_topics(
                admin,
                store.bootstrap_servers,
                [TopicSpec(discarded, store.shards, _KEPT)],
                needs={discarded: (Operation.WRITE,)},
                principal=principal_of(store.config),
            )
            create_done_log(store.bootstrap_servers, store.config, self._done, store.shards)
            self._counts.begin()
        except BaseException:
            store.stop(0)
            raise

    def stop(self, timeout: float = 30.0) -> None:
        """Finish what is under way, give the shards to others, and end.

        Raises:
            StoppedError: it had ended by itself, or did not end in time.
        """
        with self._start_lock:
            if not self._stopping.is_set():
                self._end_by = time.monotonic() + min(_ENDING_PART * timeout, _ENDING_S)
            self._stopping.set()
            self._wake.set()
        if not self.wait(timeout):
            raise StoppedError(f"the coordinator of the SQL store did not end within {timeout:g} s; see its thread")
        with self._start_lock:
            has_store, self._has_store = self._has_store, False
        if has_store:
            self._store.stop(timeout)
        error, self._error = self._error, None
        if error is not None:
            raise StoppedError("the coordinator of the SQL store had ended by itself") from error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds, and tell whether it has."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def statistics(self) -> CoordinatorStatistics:
        """Return counts since the start, and what the store holds now: all of its shards, whoever has them."""
        return replace(self._counts.statistics(), missing_rights=tuple(self._rights.told().values()))

    def _mine(self) -> CoordinatorStatistics:
        """Return the same of its own shards: what several coordinators tell of themselves adds up to the store."""
        # list() of a dict is one step under the interpreter lock: the coordinator's thread cannot change it midway.
        return self._counts.statistics(list(self._shards.owned))

    def _run(self) -> None:
        observed = None
        try:
            observed = observe(self._telemetry, self._store.topics.prefix, self._mine)
            while not self._stopping.is_set():
                try:
                    busy = self._round()
                except sa.exc.SQLAlchemyError as error:
                    _log.warning(
                        "the coordinator of the SQL store lost its database: %s; trying again", cause_of(error)
                    )
                    # What was published meanwhile and not marked is found in the done log.
                    for relay, _ in self._relays.values():
                        relay.reset()
                    self._stopping.wait(_PAUSE_S)
                else:
                    self._wake.wait(_BUSY_S if busy else _IDLE_S)
                    self._wake.clear()
        except:  # noqa: E722 - see `raised`; whatever ended it, stop() tells
            self._error = raised()
            _log.error("the coordinator of the SQL store ends", exc_info=self._error)
        finally:
            if observed is not None:
                observed.close()
            self._end()

    def _end(self) -> None:
        self._asking.close()
        try:
            self._finish()
        except sa.exc.SQLAlchemyError as error:
            _log.warning("what was published could not be marked: %s; the done log tells it", cause_of(error))
        for relay, _ in self._relays.values():
            relay.close(max(0.0, self._end_by - time.monotonic()))
        self._count()
        try:
            self._shards.leave()
        except sa.exc.SQLAlchemyError as error:
            _log.warning("shards could not be given up: %s; others take them when their leases end", cause_of(error))

    def _finish(self) -> None:
        """Let what is under way end, as long as there is time."""
        while any(relay.is_busy for relay, _ in self._relays.values()) and time.monotonic() < self._end_by:
            for relay, _ in self._relays.values():
                relay.step(takes=False)
            self._wake.wait(_BUSY_S)
            self._wake.clear()

    def _round(self) -> bool:
        self._left.require_few()
        if self._is_time("tend", self._session_s / 4):
            self._tend()
        owned = sorted(self._shards.owned)
        if self._is_time("ask", _QUESTIONS_S):
            self._asking.tend()
            self._counts.refusals()
            if owned:
                self._asking.ask(owned)
                self._asking.discard(owned)
        busy = False
        for number in owned:
            if self._stopping.is_set():
                break
            busy |= self._settle(number)
        if self._is_time("trim", _TRIM_S):
            for relay, _ in self._relays.values():
                relay.forget()
            self._claims.purge()
        self._count()
        return busy

    def _is_time(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._next[what]:
            return False
        self._next[what] = now + every_s
        return True

    def _tend(self) -> None:
        self._shards.tend()
        for number in [number for number in self._relays if number not in self._shards.owned]:
            self._drop(number)
        self._leaving = set(self._shards.surplus())

    def _settle(self, number: int) -> bool:
        """Settle what can be settled of a shard; tell whether there was something."""
        relay, backlog = self._relays.get(number) or self._relay(number)
        busy = relay.step(takes=number not in self._leaving)
        if backlog.is_lost:
            self._drop(number)
            self._shards.owned.pop(number, None)
        elif number in self._leaving and not relay.is_busy:
            self._drop(number)
            self._shards.give_up(number)
            self._leaving.discard(number)
        return busy

    def _relay(self, number: int) -> tuple[Relay, SqlBacklog]:
        store = self._store
        servers, config, done = store.bootstrap_servers, store.config, self._done

        def make(transactional_id: str, *, apart: bool) -> Outbound:
            log = DoneLog(servers, config, done, number, self._rights)
            return Outbound(
                servers, config, transactional_id=transactional_id, done=log, apart=apart, rights=self._rights
            )

        backlog = SqlBacklog(number, self._shards, self._claims, self._counts)
        name = f"{store.topics.prefix}.sql-{store.uuid}.{number}"
        self._relays[number] = made = Relay(backlog, name, make, self._left, self._wake.set), backlog
        return made

    def _drop(self, number: int) -> None:
        relay, _ = self._relays.pop(number)
        relay.abandon()
        self._former_groups += relay.groups
        self._former_recoveries += relay.recoveries

    def _count(self) -> None:
        relays = [relay for relay, _ in self._relays.values()]
        self._counts.open_shards = sum(relay.is_open for relay in relays)
        self._counts.groups = self._former_groups + sum(relay.groups for relay in relays)
        self._counts.recoveries = self._former_recoveries + sum(relay.recoveries for relay in relays)
        self._counts.left_behind = self._left.total


__all__ = ["SqlSettler"]
