"""What sinks ask of a frame of Spark: how many tasks make it, whole source partitions, its rows on the driver."""

from __future__ import annotations

import pickle
from typing import Any, Final

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it
from pyspark.sql.types import BinaryType, StructType

from penstock.clients.rights import MissingRightError
from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink.errors import error_of, errors_in
from penstock.spark_sink.ledger.rules import BATCHES
from penstock.spark_sink.sinks.position import POSITION
from penstock.spark_sink.source.source import SourceTask

#: Bytes of Arrow that a batch on the driver may have, unless a sink says so; Spark's own bound on what it collects,
#: `spark.driver.maxResultSize`, is twice as much by default.
MAX_BATCH_BYTES: Final = 512 * 1024 * 1024

#: The frame of what tasks yield for the driver.
PICKLED: Final = StructType().add("pickled", BinaryType())
#: What tasks raise.
_RAISED = (SinkError, MissingRightError, ConfigurationError)


def tasks_of(batch: DataFrame) -> int | None:
    """Return in how many tasks a frame's rows are made; None where that is known only when it is run.

    So under Connect, and behind a shuffle of the user's.
    """
    try:
        java: Any = batch._jdf  # noqa: SLF001 - `batch.rdd` would plan again, with every row as an object
        plan = java.queryExecution().executedPlan()
        if plan.getClass().getSimpleName() == "AdaptiveSparkPlanExec":
            return None
        return int(java.queryExecution().toRdd().getNumPartitions())
    except AttributeError:
        return None


def cores_of(batch: DataFrame) -> int | None:
    """Return how many tasks a frame's session runs at a time; None where that is not known, as under Connect."""
    try:
        return int(batch.sparkSession.sparkContext.defaultParallelism)
    except Exception:  # noqa: BLE001 - Connect's session refuses the question with an exception of its own
        return None


def whole_partitions(batch: DataFrame) -> int | None:
    """Return of how many source partitions a frame has rows, where those of each stand in one task; None elsewhere.

    So where each task of the frame does something to the rows that one task of the source reads, and the source has
    divided no partition. It is not known under Connect, behind a shuffle, a union or a `coalesce` of the user's, and of
    frames of another source.
    """
    try:
        java: Any = batch._jdf  # noqa: SLF001 - as above
        rows = java.queryExecution().toRdd()
        while rows.getClass().getSimpleName() != "DataSourceRDD":
            above = rows.dependencies()
            if above.size() != 1 or above.head().getClass().getSimpleName() != "OneToOneDependency":
                return None
            rows = above.head().rdd()
        tasks = rows.partitions()
        # All tasks of a batch say the same of it.
        first = pickle.loads(tasks[0].inputPartition().get().pickedPartition()) if len(tasks) else None  # noqa: S301 - made by the source, in this query
    except (AttributeError, Py4JError):
        return None
    return first.partitions if isinstance(first, SourceTask) and not first.is_divided else None


def as_row(what: object) -> pa.RecordBatch:
    """Return what a task yields for the driver as the row of `PICKLED`."""
    return pa.RecordBatch.from_pydict({"pickled": pa.array([pickle.dumps(what)], pa.binary())})


def from_row(row: Row) -> Any:
    """Return what a task of this query gave to `as_row`."""
    return pickle.loads(bytes(row["pickled"]))  # noqa: S301 - see above


def run_job(job: DataFrame, before: str = "") -> list[Row]:
    """Return the rows of a job of Spark's; raise what its tasks raised in one sentence, with `before` in front."""
    try:
        return job.collect()
    except Exception as error:
        found = [named for named in errors_in(str(error)) if isinstance(named, _RAISED)]
        if not found:
            raise
        # Not chained: what Spark says repeats it within two stacks, and what a handler raised may hold the message.
        raise error_of(type(found[-1]), f"{before}{found[-1]}") from None


def collected(batch: DataFrame, most_bytes: int, batch_id: int, target: str) -> pa.Table:
    """Return a batch's rows on the driver; more bytes of Arrow than there may be are a `SinkError`."""
    rows = batch.toArrow()
    if rows.nbytes > most_bytes:
        raise SinkError(
            f"batch {batch_id} has {rows.nbytes} bytes in {rows.num_rows} rows, and {target} takes a batch through the "
            f"driver of at most max_batch_bytes={most_bytes}; nothing of it was stored; set the source's "
            "maxOffsetsPerTrigger lower, or raise max_batch_bytes where the driver has the memory"
        )
    return rows


def numbered(batch: DataFrame, batch_id: int) -> DataFrame:
    """Return a frame whose rows come from no messages with the batch's number as their position, see `BATCHES`."""
    topic, partition = BATCHES
    position = (F.lit(topic), F.lit(partition), F.lit(batch_id).cast("bigint"))
    return batch.withColumns(dict(zip(POSITION, position, strict=True)))
