"""When which undecided transaction is asked about, and what becomes of those that nobody knows of: in statements."""

from __future__ import annotations

import logging
import threading

import sqlalchemy as sa

from penstock.transactions.model import HalfMessage, TransactionState
from penstock.transactions.records import Author, Verdict
from penstock.transactions.sql import schema
from penstock.transactions.sql.database import Database
from penstock.transactions.sql.writer import Decision
from penstock.transactions.store import CoordinatorOptions

_log = logging.getLogger("penstock.transactions")

_AT_ONCE = 1_000
#: Seconds without a sign of life after which a producer counts as dead.
_SILENT_S = 10.0
_LONGEST_INTERVAL_S = 24 * 3600.0
_POLICIES = {"topic": Verdict.DISCARD, "commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK}


class Asking:
    """Puts questions, and applies the discard policy. Used by the coordinator's thread.

    Args:
        database: where the transactions are.
        options: the coordinator's.
    """

    def __init__(self, database: Database, options: CoordinatorOptions) -> None:
        self._database = database
        self._options = options
        #: Questions put to somebody, and those whose group had nobody alive; policies that did not return in time.
        self.asked = self.no_producer = self.hung = 0

    def ask(self, shards: list[int]) -> None:
        """Put the questions that are due."""
        tx, now = schema.tx, self._database.now
        undecided = sa.and_(tx.c.shard.in_(shards), tx.c.settled_at.is_(None), tx.c.state == schema.PREPARED)
        again = sa.and_(tx.c.question > 0, tx.c.asked_at + self._options.check_interval_s <= now)
        first = sa.and_(tx.c.question == 0, tx.c.check_count < self._options.check_max, self._due() <= now)
        due = sa.select(tx.c.id, tx.c.producer_group).where(undecided, sa.or_(again, first)).limit(_AT_ONCE)
        alive = schema.alive
        with self._database.read() as connection:
            rows = connection.execute(due).all()
            if not rows:
                return
            living = set(
                connection.execute(
                    sa.select(alive.c.producer_group).where(alive.c.kind == "producer", alive.c.seen > now - _SILENT_S)
                ).scalars()
            )
        with self._database.begin() as connection:
            connection.execute(
                tx.update()
                .where(tx.c.id.in_([row.id for row in rows]), tx.c.state == schema.PREPARED)
                .values(question=tx.c.check_count + 1, asked_at=now, taken_until=0.0)
            )
        reached_nobody = [row.producer_group for row in rows if row.producer_group not in living]
        self.asked += len(rows) - len(reached_nobody)
        if reached_nobody:
            self.no_producer += len(reached_nobody)
            _log.error(
                "no producer of %s answers checks: %d transactions wait; start one with a check",
                ", ".join(sorted(set(reached_nobody))),
                len(reached_nobody),
            )

    def discard(self, shards: list[int]) -> None:
        """Apply the discard policy to those whose checks are exhausted."""
        tx = schema.tx
        exhausted = sa.select(tx.c.id).where(
            tx.c.shard.in_(shards),
            tx.c.settled_at.is_(None),
            tx.c.state == schema.PREPARED,
            tx.c.question == 0,
            tx.c.check_count >= self._options.check_max,
            self._due() <= self._database.now,
        )
        with self._database.read() as connection:
            ids = list(connection.execute(exhausted.limit(_AT_ONCE)).scalars())
        for transaction_id in ids:
            verdict = self._policy(transaction_id)
            decision = Decision(transaction_id, None, verdict, Author.COORDINATOR)
            with self._database.begin() as connection:
                decision.write(self._database, connection)
            _log.error(
                "transaction %s: still undecided after %d answered checks; %s by the discard policy",
                transaction_id,
                self._options.check_max,
                verdict.name,
            )

    def _due(self) -> sa.ColumnElement[float]:
        tx, options = schema.tx, self._options
        timeout = options.transaction_timeout_s
        first = tx.c.birth + sa.case((tx.c.immunity > timeout, tx.c.immunity), else_=timeout)
        interval: sa.ColumnElement[float] = sa.literal(options.check_interval_s, sa.Double)
        if options.check_backoff != 1.0:
            pauses = [
                (
                    tx.c.check_count == n,
                    min(options.check_interval_s * options.check_backoff ** (n - 1), _LONGEST_INTERVAL_S),
                )
                for n in range(1, options.check_max + 1)
            ]
            interval = sa.case(*pauses, else_=_LONGEST_INTERVAL_S)
        return sa.case((tx.c.answered_at.is_(None), first), else_=tx.c.answered_at + interval)

    def _policy(self, transaction_id: str) -> Verdict:
        policy = self._options.discard
        if isinstance(policy, str):
            return _POLICIES[policy]
        tx, message = schema.tx, schema.message
        with self._database.read() as connection:
            row = connection.execute(
                sa.select(tx, message)
                .join_from(tx, message, (message.c.tx == tx.c.id) & (message.c.part == 0))
                .where(tx.c.id == transaction_id)
            ).one()
        half = schema.half_of(row, 1)
        shown = HalfMessage(half.topic, half.key, half.value, half.headers, transaction_id, row.check_count)
        answers: list[TransactionState] = []
        asked = threading.Thread(target=lambda: answers.append(policy(shown)), daemon=True, name="penstock-discard")
        asked.start()
        asked.join(self._options.check_timeout_s)
        if not answers:
            self.hung += asked.is_alive()
            _log.error("the discard policy did not answer for transaction %s; it is discarded", transaction_id)
            return Verdict.DISCARD
        found = {TransactionState.COMMIT: Verdict.COMMIT, TransactionState.ROLLBACK: Verdict.ROLLBACK}
        return found.get(answers[0], Verdict.DISCARD)


__all__ = ["Asking"]
