"""What a query's driver keeps of a database between micro-batches: a session, the checked tables, a staging table.

All three are made for the first batch of a run of a query. Each later one asks one question, whether the tables are
still those that were checked, and finds the staging table empty. Where they are not, where the session is lost, or
where a batch has failed, everything is made anew.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import sqlalchemy as sa

from penstock.spark_sink.sinks.sql.rows import staging
from penstock.spark_sink.sinks.sql.rows.deduplication import staged_schema
from penstock.spark_sink.sinks.sql.settings import SqlSinkSettings
from penstock.spark_sink.sinks.sql.tables import Tables, prepare

_log = logging.getLogger("penstock.spark_sink")

#: Seconds after a batch in which the next one finds what is kept.
MOST_IDLE_S = 60.0


@dataclass(slots=True)
class OpenStage:
    """A session of the driver, in which the tables were checked, and the staging table that it holds. One thread.

    `columns` are those of the staging table, whose name begins with `prefix`.
    """

    connection: sa.Connection
    tables: Tables
    prefix: str
    schema: str | None
    columns: pa.Schema
    _session: ExitStack
    _stage: sa.Table | None = None
    _fingerprint: str | None = field(default=None)

    @classmethod
    def begin(cls, settings: SqlSinkSettings, url: sa.URL, frame: pa.Schema) -> OpenStage:
        """Begin a session: check the tables, and remove what drivers that are gone have left."""
        prefix = staging.stage_prefix(settings.table, settings.ledger_table)
        columns = staged_schema(frame, settings.sum_columns)
        with ExitStack() as session:
            connection = session.enter_context(settings.database.session(url))
            with connection.begin():
                tables = prepare(settings, frame, connection)
            staging.remove_left_over(connection, prefix, settings.schema, columns)
            return cls(connection, tables, prefix, settings.schema, columns, session.pop_all())

    def stage(self) -> sa.Table:
        """Return the staging table, which is empty; it is made where there is none."""
        if self._stage is None:
            self._stage = staging.create_stage(
                self.connection, self.prefix, self.schema, self.columns, self.tables.upsert.checks()
            )
            self._fingerprint = self._look()
        return self._stage

    def remove_stage(self) -> None:
        """Remove the staging table."""
        if self._stage is not None:
            staging.remove_stage(self.connection, self._stage)
            self._stage = None

    def clear(self) -> bool:
        """Empty the staging table; tell whether it is empty."""
        return self._stage is not None and staging.empty_stage(self.connection, self._stage)

    def is_as_checked(self) -> bool:
        """Tell whether the session lives, and the tables are those that were checked in it."""
        try:
            return self._look() == self._fingerprint
        except sa.exc.SQLAlchemyError as error:
            _log.info("the session that was kept for table %s is lost (%s)", self._target, type(error).__name__)
            return False

    def close(self) -> None:
        """Remove the staging table and end the session."""
        try:
            self.remove_stage()
        finally:
            self._session.close()

    @property
    def _target(self) -> sa.Table:
        return self.tables.upsert.target

    def _look(self) -> str | None:
        upsert, ledger = self.tables.upsert, self.tables.ledger
        with self.connection.begin():
            return upsert.database.fingerprint(self.connection, upsert.target, ledger, self._stage)


@dataclass(frozen=True, slots=True)
class _Kept:
    opened: OpenStage
    timer: threading.Timer


class KeptStages:
    """Keeps an `OpenStage` for each run of a query, until its next batch or for `idle_s`. Any thread may use it."""

    def __init__(
        self, idle_s: float = MOST_IDLE_S, new_timer: Callable[..., threading.Timer] = threading.Timer
    ) -> None:
        self._idle_s = idle_s
        self._new_timer = new_timer
        #: Guards what follows: batches take and keep, timers and the process's end close.
        self._lock = threading.Lock()
        self._kept: dict[Hashable, _Kept] = {}
        self._process = os.getpid()
        #: Those of the process that this one was forked from, whose sessions are not this one's to use or to end.
        self._of_parent: list[Any] = []

    def take(self, key: Hashable) -> OpenStage | None:
        """Return what is kept by a key, which is kept no longer; None where it is of no use any more."""
        kept = self._pop(key)
        if kept is None:
            return None
        kept.timer.cancel()
        if kept.opened.is_as_checked():
            return kept.opened
        _close(kept.opened)
        return None

    def keep(self, key: Hashable, opened: OpenStage) -> None:
        """Keep a stage that is empty."""
        before = self._pop(key)
        if before is not None:  # of a second copy of the query
            before.timer.cancel()
            _close(before.opened)
        timer = self._new_timer(self._idle_s, self._expire, (key, opened))
        timer.daemon = True
        with self._lock:
            self._kept[key] = _Kept(opened, timer)
        atexit.unregister(self.close)
        atexit.register(self.close)
        timer.start()

    def close(self) -> None:
        """Close all that is kept."""
        with self._lock:
            self._leave_to_parent()
            kept, self._kept = self._kept, {}
        for one in kept.values():
            one.timer.cancel()
            _close(one.opened)

    def _pop(self, key: Hashable) -> _Kept | None:
        with self._lock:
            self._leave_to_parent()
            return self._kept.pop(key, None)

    def _expire(self, key: Hashable, opened: OpenStage) -> None:
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept.opened is not opened:
                return  # a batch has it
            del self._kept[key]
        _close(opened)

    def _leave_to_parent(self) -> None:
        if self._process != os.getpid():
            self._of_parent.append(self._kept)
            self._kept = {}
            self._process = os.getpid()


def _close(opened: OpenStage) -> None:
    try:
        opened.close()
    except sa.exc.SQLAlchemyError as error:
        _log.debug("a kept session could not be closed: %s", type(error).__name__)
