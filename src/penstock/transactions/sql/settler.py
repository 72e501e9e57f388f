"""The coordinator of a SQL store: it publishes what was committed, and asks about what nobody decided."""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import sqlalchemy as sa
from confluent_kafka import KafkaException

from penstock.errors import BrokerConnectionError, StoppedError
from penstock.kafka import TopicSpec, admin_client, ensure_topics
from penstock.transactions.done_log import DoneLog, create_done_log
from penstock.transactions.ids import new_id
from penstock.transactions.model import FINISH_BUCKETS_S, CoordinatorStatistics
from penstock.transactions.outbound import InDoubtError, Outbound, Publishable
from penstock.transactions.sql import schema
from penstock.transactions.sql.asking import Asking
from penstock.transactions.sql.claims import Claims, Settled
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
        options: the coordinator's; of a Kafka store's alone are `instance`, `max_pending_bytes`, `target_latency_s`.
    """

    def __init__(self, store: SqlStore, options: CoordinatorOptions) -> None:
        self._store = store
        self._name = new_id()
        self._session_s = options.session_timeout_s
        self._shards = Shards(store.database, self._name, options.session_timeout_s)
        self._claims = Claims(store.database, store.topics.discarded)
        self._asking = Asking(store.database, options)
        # Of the thread alone.
        self._outbounds: dict[int, Outbound] = {}
        self._next = {"tend": 0.0, "ask": 0.0, "trim": time.monotonic() + _TRIM_S}
        self._done = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"penstock-sql-coordinator-{self._name[-6:]}", daemon=True
        )
        self._error: BaseException | None = None
        # Written by the thread alone, read by all; each is a number.
        self._counts = {schema.COMMIT: 0, schema.ROLLBACK: 0, schema.DISCARD: 0}
        self._answered = self._groups = self._recoveries = self._open = 0
        self._finish_times = [0] * (len(FINISH_BUCKETS_S) + 1)
        self._finish_seconds = 0.0
        # The database's time at the start, and the checks that were answered by then.
        self._begun = 0.0
        self._answered_before = 0

    def start(self) -> Self:
        """Connect, create what is absent, and begin to settle.

        Raises:
            BrokerConnectionError: the database or no broker answered.
        """
        store = self._store
        store.start()
        try:
            self._done = f"{store.topics.prefix}.sql-{store.uuid}.done"
            admin = admin_client(store.bootstrap_servers, store.config)
            ensure_topics(admin, store.bootstrap_servers, [TopicSpec(store.topics.discarded, store.shards, _KEPT)])
            create_done_log(store.bootstrap_servers, store.config, self._done, store.shards)
            with store.database.read() as connection:
                self._begun = connection.execute(sa.select(store.database.now)).scalar_one()
                answered = sa.select(sa.func.coalesce(sa.func.sum(schema.tx.c.check_count), 0))
                self._answered_before = connection.execute(
                    answered.where(schema.tx.c.settled_at.is_(None))
                ).scalar_one()
        except BaseException:
            store.stop(0)
            raise
        self._thread.start()
        return self

    def stop(self, timeout: float = 30.0) -> None:
        """Finish what is under way, give the shards to others, and end.

        Raises:
            StoppedError: it had ended by itself, or did not end in time.
        """
        self._stopping.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise StoppedError(f"the coordinator of the SQL store did not end within {timeout:g} s; see its thread")
        self._store.stop(timeout)
        if self._error is not None:
            raise StoppedError("the coordinator of the SQL store had ended by itself") from self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds, and tell whether it has."""
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
        tx, now = schema.tx, self._store.database.now
        unsettled = tx.c.settled_at.is_(None)
        # Before the database is asked: what is counted here is not pending there any more.
        counts, answered_so_far = dict(self._counts), self._answered
        with self._store.database.read() as connection:
            pending, oldest, answered = connection.execute(
                sa.select(
                    sa.func.count(), now - sa.func.min(tx.c.birth), sa.func.coalesce(sa.func.sum(tx.c.check_count), 0)
                ).where(unsettled)
            ).one()
            held = connection.execute(sa.select(sa.func.count()).where(unsettled, tx.c.held_until > now)).scalar_one()
            delayed = connection.execute(
                sa.select(sa.func.count()).where(
                    unsettled, tx.c.state == schema.COMMIT, tx.c.deliver_at_ms > now * 1000
                )
            ).scalar_one()
            refused = connection.execute(
                sa.select(sa.func.count()).where(schema.refusal.c.at >= self._begun)
            ).scalar_one()
        return CoordinatorStatistics(
            partitions=self._open,
            pending=pending,
            oldest_pending_age=max(oldest or 0.0, 0.0),
            held=held,
            committed=counts[schema.COMMIT],
            rolled_back=counts[schema.ROLLBACK],
            discarded=counts[schema.DISCARD],
            refused=refused,
            forged=0,
            checks=self._asking.asked,
            answered_checks=answered_so_far + int(answered) - int(self._answered_before),
            no_producer=self._asking.no_producer,
            groups=self._groups,
            recoveries=self._recoveries,
            delayed=delayed,
            hung_checks=self._asking.hung,
            finish_times=tuple(self._finish_times),
            finish_seconds=self._finish_seconds,
        )

    def _run(self) -> None:
        try:
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
        except BaseException as error:  # noqa: BLE001 - whatever ended it, stop() tells
            self._error = error
            _log.exception("the coordinator of the SQL store ends")
        finally:
            self._end()

    def _end(self) -> None:
        self._close_all()
        try:
            self._shards.leave()
        except sa.exc.SQLAlchemyError as error:
            _log.warning("shards could not be given up: %s; others take them when their leases end", cause_of(error))

    def _round(self) -> bool:
        if self._is_time("tend", self._session_s / 4):
            self._tend()
        owned = sorted(self._shards.owned)
        if owned and self._is_time("ask", _QUESTIONS_S):
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
            self._count(self._claims.roll_back(number))
            # After open(), and with the ownership: whoever takes the shard from now on fences this outbound.
            entries = self._claims.claim(number, self._shards.mine(number))
            if entries is None:
                self._lose(number)
                return False
            if entries:
                self._publish(outbound, entries)
        except (InDoubtError, BrokerConnectionError, KafkaException) as error:
            self._recoveries += 1
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
        self._count(self._claims.settle(sorted(outbound.open())))
        self._count_open()
        return True

    def _publish(self, outbound: Outbound, entries: Sequence[Publishable]) -> None:
        before = outbound.groups
        outcome = outbound.publish(entries)
        try:
            self._count(self._claims.settle(outcome.published))
            if outcome.refused:
                self._claims.hold(outcome.refused)
                for why in sorted(set(outcome.refused.values())):
                    _log.warning("%d transactions are held, and tried again: %s", len(outcome.refused), why)
        except BaseException:
            # Kafka has them, the database does not know: the done log tells when it is opened again.
            outbound.close()
            raise
        self._groups += outbound.groups - before

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
        self._open = sum(outbound.is_open for outbound in self._outbounds.values())

    def _count(self, settled: list[Settled]) -> None:
        for one in settled:
            self._counts[one.state] += 1
            self._answered += one.check_count
            if one.state == schema.COMMIT:
                self._finish_times[bisect.bisect_left(FINISH_BUCKETS_S, one.age_s)] += 1
                self._finish_seconds += max(one.age_s, 0.0)


__all__ = ["SqlSettler"]
