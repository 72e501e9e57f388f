"""Frames for `SqlSink` without a JVM: Arrow tables whose tasks run in this process."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from penstock.spark_sink import DeadLetters
from penstock.spark_sink.sinks.sql.dead_letters import Rejected
from penstock.spark_sink.source.plan import TopicPartition, to_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def execution(batch: int, *plans: Mapping[TopicPartition, tuple[int, int]]) -> mock.Mock:
    """Return Spark's object of a batch that is under way, with the plan of each source."""
    starts, ends = dict[Any, Any](), dict[Any, Any]()
    for number, plan in enumerate(plans):
        source = mock.Mock(**{"toString.return_value": str(number)})
        start, end = (_json({part: offsets[n] for part, offsets in plan.items()}) for n in (0, 1))
        starts[source], ends[source] = mock.Mock(**{"start.return_value": start}), end
    return mock.Mock(
        **{
            "batchId.return_value": batch,
            "newData.return_value.iterator.side_effect": lambda: Pairs(starts),
            "endOffsets.return_value.iterator.side_effect": lambda: Pairs(ends),
        }
    )


def _json(offsets: Mapping[TopicPartition, int]) -> mock.Mock:
    return mock.Mock(**{"json.return_value": json.dumps(to_json(offsets))})


class Pairs:
    """An iterator of Scala's."""

    def __init__(self, held: dict[Any, Any]) -> None:
        self._left = list(held.items())

    def hasNext(self) -> bool:  # noqa: N802 - Scala's name
        """Whether there is another pair."""
        return bool(self._left)

    def next(self) -> mock.Mock:
        """The next pair."""
        key, value = self._left.pop(0)
        return mock.Mock(_1=lambda: key, _2=lambda: value)


@dataclass
class ArrowFrame:
    """A frame instead of Spark's: each part is one task; a part that is lost runs twice and counts once.

    `between` is called when all tasks are done and nothing is merged. Its session has so many `cores`: too many, unless
    a test says so, for sessions of executors to be kept.
    """

    rows: pa.Table
    parts: int = 2
    lost: bool = False
    between: Callable[[], object] = lambda: None
    run: str | None = None
    query: str = ""
    checkpoint: str = "kept"
    batch: int = 0
    cores: int = 1_000
    plan: Mapping[TopicPartition, tuple[int, int]] | None = None
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def schema(self) -> StructType:
        """Spark's types of the columns."""
        return from_arrow_schema(self.rows.schema)

    @property
    def sparkSession(self) -> mock.Mock:  # noqa: N802 - Spark's name
        """A session that knows query and run, as Spark's does inside of a query."""
        number, run, query_id = "0", self.run or "some run", str(uuid.uuid5(uuid.NAMESPACE_OID, self.checkpoint))
        properties = {
            "streaming.sql.batchId": number,
            "spark.jobGroup.id": run,
            "sql.streaming.queryId": query_id,
        }
        if not self.run and not self.query:
            properties = {}
        session = mock.Mock(**{"sparkContext.getLocalProperty.side_effect": properties.get})
        session.sparkContext.defaultParallelism = self.cores
        running = session._jsparkSession.sharedState().activeStreamingQueries().get
        running.return_value.name.return_value = self.query
        if self.plan is not None:
            running.return_value.getLatestExecutionContext.return_value = execution(self.batch, self.plan)
        return session

    def toArrow(self) -> pa.Table:  # noqa: N802 - Spark's name
        """All rows, in small batches."""
        return pa.Table.from_batches(self.rows.to_batches(3), self.rows.schema)

    def coalesce(self, _parts: int) -> ArrowFrame:
        """The same frame."""
        return self

    def mapInArrow(self, task: Any, _schema: StructType) -> ArrowFrame:  # noqa: N802 - Spark's name
        """Run the task on every part."""
        self.answers = []
        size = max(1, math.ceil(self.rows.num_rows / self.parts))
        for start in range(0, self.rows.num_rows, size):
            for attempt in range(2 if self.lost else 1):
                made = task(iter(self.rows.slice(start, size).to_batches(3)))
                found = [row for part in made for row in part.to_pylist()]
                if attempt == 0:
                    self.answers += found
        self.between()
        return self

    def collect(self) -> list[dict[str, Any]]:
        """The answers of the counting tasks."""
        return self.answers


def frame(columns: dict[str, pa.DataType], rows: Sequence[tuple[Any, ...]], **options: Any) -> DataFrame:
    """Return a frame of rows `(partition, offset, values...)` of the topic orders."""
    schema = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), *columns.items()])
    table = pa.Table.from_pylist(
        [dict(zip(schema.names, ("orders", *row), strict=True)) for row in rows], schema=schema
    )
    made: Any = ArrowFrame(table, **options)
    return made  # type: ignore[no-any-return] # stands for Spark's frame


@dataclass(frozen=True)
class Letters(DeadLetters):
    """Dead letters that are kept in a list."""

    bootstrap_servers: str = "nowhere:1"
    written: list[Rejected] = field(default_factory=list)

    def write(self, rejected: Iterable[Rejected]) -> None:
        """Keep them."""
        self.written.extend(rejected)


PRICES = {"id": pa.string(), "price": pa.int64()}
GONE = {**PRICES, "gone": pa.bool_()}
