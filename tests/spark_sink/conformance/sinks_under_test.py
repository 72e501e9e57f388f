"""Every sink with one interface, without Spark: batches are stored, and the rows are read.

A row is a place, `(topic, partition, offset)`; what a sink stores of it says where it comes from.
"""

from __future__ import annotations

import operator
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import sqlalchemy as sa
from arrow_frames import ArrowFrame
from confluent_kafka import KafkaError, KafkaException
from lakes import DeltaLake, IcebergLake, Lake

from databases import LOST, TestDatabase, new_database
from kafka_tools import read_all
from penstock.clients import factory
from penstock.spark_sink import KafkaSink, SqlSink
from penstock.spark_sink.ledger.rules import Batch, LedgerEntry, warn_left_out
from penstock.spark_sink.sinks import kafka_publisher, kafka_sink, lake_sink
from penstock.spark_sink.sinks.kafka_ledger import Target
from penstock.spark_sink.sinks.kafka_publisher import Row, SinkPublisher
from penstock.spark_sink.sinks.sql import batch_write
from penstock.spark_sink.source.pool import WorkerPool

Place = tuple[str, int, int]
Act = Callable[[], object]

SCHEMA = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("n", pa.int64())])


class SinkUnderTest(ABC):
    """A sink of one query.

    Attributes:
        query: its name.
        sink: what `ledger_entries` is asked of.
        makes_rivals_wait: whether a second copy waits for the first one's commit.
        takes_retries_for_calls: whether a second call in one batch is an error; else it is a task's second try.
    """

    query = "one"
    sink: object
    makes_rivals_wait = False
    takes_retries_for_calls = True

    @abstractmethod
    def store(self, rows: Sequence[Place], batch: int = 0, run: str = "first", **known: Any) -> None:
        """Store one batch of a run of the query.

        `known` has the `checkpoint`, which identifies the query in another run, and the `plan` of the batch.
        """

    @abstractmethod
    def stored(self) -> list[Place]:
        """Return the stored rows, sorted."""

    @abstractmethod
    def another_query(self) -> SinkUnderTest:
        """Return the sink of another query, which fills the same target."""

    @abstractmethod
    def before_commit(self, act: Act) -> Any:
        """Return a context in which `act` is called once, when a ledger was read and before its batch is committed."""

    def answer_lost(self) -> Any:
        """Return a context in which the answer to the first commit is lost."""
        raise AssertionError("its commit is a step of this process: see IN_PROCESS")

    def store_by_two_tries(self, rows: Sequence[Place], batch: int = 0, run: str = "first") -> None:
        """Store one batch whose tasks all run twice, as where Spark gives the first try up for lost."""
        self.store(rows, batch, run)

    def begin(self, entries: Mapping[tuple[str, int], LedgerEntry]) -> None:
        """Write where a query begins that no checkpoint knows, as its start does."""
        check: Any = self.sink
        if not isinstance(self, Kafka):  # whose columns are others
            check.check(frame_of([], "", "").schema)
        check.begin_ledger(self.query, entries)

    def position(self, *parts: tuple[str, int]) -> dict[tuple[str, int], int]:
        """Return the ledger's start for a query without a checkpoint."""
        return {part: entry.end for part, entry in self.sink.ledger_entries(self.query, parts).items()}


def frame_of(rows: Sequence[Place], run: str, query: str, **options: Any) -> Any:
    """Return a frame of these rows."""
    table = pa.Table.from_pylist([dict(zip(SCHEMA.names, (*row, row[2]), strict=True)) for row in rows], schema=SCHEMA)
    return ArrowFrame(table, run=run, query=query, **options)


@contextmanager
def once_before(owner: object, name: str, act: Act, *, or_after: bool = False) -> Iterator[None]:
    """Call `act` once when a function of a module or class is called, before or after it."""
    real, left = getattr(owner, name), [act]

    def called(*given: Any, **named: Any) -> Any:
        if left and not or_after:
            left.pop()()
        answer = real(*given, **named)
        if left:
            left.pop()()
        return answer

    with mock.patch.object(owner, name, called):
        yield


class Sql(SinkUnderTest):
    """A table of a database, staged by the driver or by executors."""

    def __init__(self, database: TestDatabase, staging: str) -> None:
        self.database, self.staging = database, staging
        self.sink: SqlSink = SqlSink(database.url, "events", keep_position=True, staging=staging)  # type: ignore[arg-type] # one of both
        self.makes_rivals_wait = staging == "driver"
        self._between: list[Act] = []

    def store(self, rows: Sequence[Place], batch: int = 0, run: str = "first", **options: Any) -> None:
        def between() -> None:
            if self._between:
                self._between.pop()()

        self.sink(frame_of(rows, run, self.query, between=between, batch=batch, **options), batch)

    def store_by_two_tries(self, rows: Sequence[Place], batch: int = 0, run: str = "first") -> None:
        self.store(rows, batch, run, lost=True)

    def stored(self) -> list[Place]:
        found = self.database.rows('SELECT topic, "partition", "offset", n FROM events')
        assert all(row[2] == row[3] for row in found)
        return sorted(row[:3] for row in found)

    def another_query(self) -> SinkUnderTest:
        other = Sql(self.database, self.staging)
        other.query = "another"
        return other

    @contextmanager
    def before_commit(self, act: Act) -> Iterator[None]:
        if self.staging == "driver":
            with once_before(batch_write, "write_ledger", act):
                yield
        else:
            self._between.append(act)
            yield

    @contextmanager
    def answer_lost(self) -> Iterator[None]:
        moved: list[bool] = []

        def lose() -> None:
            moved.append(True)
            raise sa.exc.DBAPIError("COMMIT", None, LOST[self.database.kind])

        advance = batch_write.write_ledger

        def advanced(*given: Any) -> None:
            advance(*given)
            if not moved:  # the next commit is that of the batch
                stack.enter_context(once_before(sa.RootTransaction, "_do_commit", lose, or_after=True))

        with ExitStack() as stack, mock.patch.object(batch_write, "write_ledger", advanced):
            yield
        assert moved


class InLake(SinkUnderTest):
    """A table of Delta or Iceberg."""

    def __init__(self, lake: Lake, query: str = "one") -> None:
        self.lake, self.query = lake, query
        self.sink: Any = lake.sink(name=query, keep_position=True)

    def store(self, rows: Sequence[Place], batch: int = 0, run: str = "first", **known: Any) -> None:
        self.sink(frame_of(rows, run, "any", batch=batch, **known), batch)

    def stored(self) -> list[Place]:
        found = self.lake.rows().select(SCHEMA.names).to_pylist()
        assert all(row["n"] == row["offset"] for row in found)
        return sorted(map(operator.itemgetter("topic", "partition", "offset"), found))

    def another_query(self) -> SinkUnderTest:
        return InLake(self.lake, "another")

    def before_commit(self, act: Act) -> Any:
        return once_before(lake_sink, "warn_left_out", act)

    def answer_lost(self) -> Any:
        def lose() -> None:
            raise self.sink._CONFLICTS[-1]("the answer is lost")

        return once_before(lake_sink.LakeSink, "_store", lose, or_after=True)


class Kafka(SinkUnderTest):
    """A topic. Each batch is published as by a separate task, in a new worker."""

    takes_retries_for_calls = False

    def __init__(self, servers: str, topic: str, ledger: str) -> None:
        self.topic = topic
        self.query = topic
        self.sink = KafkaSink(servers, topic, name=topic, ledger_topic=ledger)
        self.target = Target(servers, {}, topic, ledger)

    def store(self, rows: Sequence[Place], batch: int = 0, _run: str = "first", **known: Any) -> None:
        # As `KafkaSink` has them, which needs Spark for its shuffle.
        made = [Row(row[:2], row[2], self.topic, b"k", f"{row[0]}/{row[1]}/{row[2]}".encode(), ()) for row in rows]
        plan = known.get("plan", {})
        ends = [Row(part, end - 1, None, None, None, ()) for part, (start, end) in plan.items() if start != end]
        ordered = sorted(made + ends, key=lambda row: row[:2])
        kept, what = WorkerPool[SinkPublisher](), Batch("sink one", batch, known.get("checkpoint", "kept"), plan)
        try:
            seen = kafka_sink.publish_rows(self.target, what, ordered, kept)
            warn_left_out(what.batch_id, what.target, seen)
        finally:
            kept.close()

    def store_by_two_tries(self, rows: Sequence[Place], batch: int = 0, run: str = "first") -> None:
        self.store(rows, batch, run)
        self.store(rows, batch, run)

    def stored(self) -> list[Place]:
        found = [(message.value() or b"").decode().split("/") for message in read_all(self.target.servers, self.topic)]
        return sorted((topic, int(partition), int(offset)) for topic, partition, offset in found)

    def another_query(self) -> SinkUnderTest:
        other = Kafka(self.target.servers, self.topic, self.target.ledger)
        name = f"{self.topic}-{uuid.uuid4().hex}"
        other.query, other.sink, other.target = name, replace(self.sink, name=name), replace(self.target, name=name)
        return other

    def before_commit(self, act: Act) -> Any:
        return once_before(kafka_publisher, "_in_one_transaction", act)

    def answer_lost(self) -> Any:
        left = [KafkaException(KafkaError(KafkaError._TIMED_OUT))]

        class Unheard(factory.Producer):
            def commit_transaction(self, timeout: float = -1) -> None:
                super().commit_transaction(timeout)
                if left:
                    raise left.pop()

        return mock.patch.object(factory, "Producer", Unheard)


#: How each sink is made, of the fixtures by name and a folder.
SINKS: dict[str, Callable[[Callable[[str], Any], Path], SinkUnderTest]] = {
    "sqlite": lambda _given, folder: Sql(TestDatabase("sqlite", f"sqlite:///{folder / 'test.db'}"), "driver"),
    "postgresql from the driver": lambda given, _: Sql(new_database(given("postgresql_url")), "driver"),
    "postgresql from executors": lambda given, _: Sql(new_database(given("postgresql_url")), "executors"),
    "mariadb from the driver": lambda given, _: Sql(new_database(given("mariadb_url")), "driver"),
    "mariadb from executors": lambda given, _: Sql(new_database(given("mariadb_url")), "executors"),
    "delta": lambda _given, folder: InLake(DeltaLake(folder)),
    "iceberg": lambda _given, folder: InLake(IcebergLake(folder)),
    "kafka": lambda given, _: Kafka(given("broker").bootstrap_servers, given("new_topic")(), given("ledger_topic")),
}

#: Those to whose commit there is no answer that could be lost.
IN_PROCESS = ("sqlite",)
