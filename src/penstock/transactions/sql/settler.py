"""The coordinator of a SQL store: it publishes what was committed, and asks about what nobody decided."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import sqlalchemy as sa
from confluent_kafka import KafkaException

from penstock.errors import BrokerConnectionError, StoppedError, raised
from penstock.kafka import TopicSpec, admin_client, ensure_topics
from penstock.transactions.done_log import DoneLog, create_done_log
from penstock.transactions.ids import new_id
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.observing import observe
from penstock.transactions.outbound import InDoubtError, Outbound, Publishable
from penstock.transactions.sql.asking import Asking
from penstock.transactions.sql.claims import Claims
from penstock.transactions.sql.counting import SqlCounts
from penstock.transactions.sql.shards import Shards
from penstock.transactions.sql.writer import cause_of
from penstock.transactions.store import CoordinatorOptions

if TYPE_CHECKING:
    from penstock.transactions.sql.store import SqlStore

_log = logging.getLogger("penstock.transactions")

#: Seconds between two looks: after something was found, and when nothing was for a while.
_BUSY_S = 0.01
_IDLE_S = 0.1
_QUESTIONS_S = 0.1
_TRIM_S = 5.0
#: Seconds after a failure.
_PAUSE_S = 0.5
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
        # Of the thread alone.
        self._outbounds: dict[int, Outbound] = {}
        self._next = {"tend": 0.0, "ask": 0.0, "trim": time.monotonic() + _TRIM_S}
        self._done = ""
        self._stopping = threading.Event()
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
            BrokerConnectionError: the database or no broker answered.
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
            ensure_topics(admin, store.bootstrap_servers, [TopicSpec(store.topics.discarded, store.shards, _KEPT)])
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
            self._stopping.set()
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
        return self._counts.statistics()

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
                    self._close_all()
                    self._stopping.wait(_PAUSE_S)
                else:
                    self._stopping.wait(_BUSY_S if busy else _IDLE_S)
        except:  # noqa: E722 - see `raised`; whatever ended it, stop() tells
            self._error = raised()
            _log.error("the coordinator of the SQL store ends", exc_info=self._error)
        finally:
            if observed is not None:
                observed.close()
            self._end()

    def _end(self) -> None:
        self._asking.close()
        self._close_all()
        try:
            self._shards.leave()
        except sa.exc.SQLAlchemyError as error:
            _log.warning("shards could not be given up: %s; others take them when their leases end", cause_of(error))

    def _round(self) -> bool:
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
            for outbound in self._outbounds.values():
                outbound.forget()
            self._claims.purge()
        return busy

    def _is_time(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._next[what]:
            return False
        self._next[what] = now + every_s
        return True

    def _tend(self) -> None:
        self._shards.tend()
        for number in [number for number in self._outbounds if number not in self._shards.owned]:
            self._outbounds.pop(number).close()
        for number in self._shards.surplus():
            outbound = self._outbounds.pop(number, None)
            if outbound is not None:
                outbound.close()
            self._shards.give_up(number)
        self._count_open()

    def _settle(self, number: int) -> bool:
        """Settle what can be settled of a shard; tell whether there was something."""
        try:
            outbound = self._outbounds.get(number) or self._outbound(number)
            if not outbound.is_open and not self._reopen(number, outbound):
                return False
            if not self._claims.waiting(number):
                return False
            self._counts.settled(self._claims.roll_back(number))
            # After open(), and with the ownership: whoever takes the shard from now on fences this outbound.
            entries = self._claims.claim(number, self._shards.mine(number))
            if entries is None:
                self._lose(number)
                return False
            if entries:
                self._publish(outbound, entries)
        except (InDoubtError, BrokerConnectionError, KafkaException) as error:
            self._counts.recoveries += 1
            _log.warning("shard %d: %s; the done log tells what was published", number, error)
            self._stopping.wait(_PAUSE_S)
            return True
        return True

    def _outbound(self, number: int) -> Outbound:
        store = self._store
        log = DoneLog(store.bootstrap_servers, store.config, self._done, number)
        name = f"{store.topics.prefix}.sql-{store.uuid}.{number}"
        made = Outbound(store.bootstrap_servers, store.config, transactional_id=name, done=log)
        self._outbounds[number] = made
        return made

    def _reopen(self, number: int, outbound: Outbound) -> bool:
        # A coordinator that lost the shard must not fence its new owner.
        if not self._shards.renew(number):
            self._lose(number)
            return False
        self._counts.settled(self._claims.settle(sorted(outbound.open())))
        self._count_open()
        return True

    def _publish(self, outbound: Outbound, entries: Sequence[Publishable]) -> None:
        before = outbound.groups
        outcome = outbound.publish(entries)
        try:
            self._counts.settled(self._claims.settle(outcome.published))
            if outcome.refused:
                self._claims.hold(outcome.refused)
                for why in sorted(set(outcome.refused.values())):
                    _log.warning("%d transactions are held, and tried again: %s", len(outcome.refused), why)
        except BaseException:
            # Kafka has them, the database does not know: the done log tells when it is opened again.
            outbound.close()
            raise
        self._counts.groups += outbound.groups - before

    def _lose(self, number: int) -> None:
        outbound = self._outbounds.pop(number, None)
        if outbound is not None:
            outbound.close()
        self._shards.owned.pop(number, None)
        self._count_open()

    def _close_all(self) -> None:
        for outbound in self._outbounds.values():
            outbound.close()
        self._count_open()

    def _count_open(self) -> None:
        self._counts.open_shards = sum(outbound.is_open for outbound in self._outbounds.values())


__all__ = ["SqlSettler"]
