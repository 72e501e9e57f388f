"""Starts the streaming query behind `@app.sink` and `start_sink`: topics in, a function called with every batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader

from penstock.clients import require_travelling
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig, a_callable, names
from penstock.spark_sink.queries.restarts import lacking_package
from penstock.spark_sink.queries.sink_specs import SinkSpec
from penstock.spark_sink.queries.starting_offsets import beginning, checkpoint_of, has_progress
from penstock.spark_sink.sinks.sink import OfQuery, begin_ledger
from penstock.spark_sink.source.session import is_classic
from penstock.spark_sink.source.source import register

#: Triggers that read what is there and end.
_ONCE = ("once", "available now", "availablenow")

_INTERVAL = re.compile(r"[1-9]\d* *(milliseconds?|seconds?|minutes?|hours?|days?)")


def start_sink(
    spark: SparkSession,
    topics: str | Sequence[str],
    function: Callable[[DataFrame, int], None],
    *,
    rows: Callable[[DataFrame], DataFrame] | None = None,
    bootstrap_servers: str,
    config: ClientConfig | None = None,
    trigger: str = "5 seconds",
    name: str,
    checkpoint_location: str | None = None,
    starting_offsets: str = "earliest",
    options: Mapping[str, str] | None = None,
    output_mode: str = "append",
) -> StreamingQuery:
    """Start a query that reads topics through the source `penstock` and hands each micro-batch to a function.

    Args:
        spark: the session; the source is registered with it.
        topics: one topic or several.
        function: called with the frame and the batch's number, which may come twice after a restart; a
            `SqlSink` makes the repetition harmless. A sink with a method `check(schema)` is asked first whether it
            can store such frames.
        rows: makes of the frame of messages the frame whose batches the function gets; as it is when left out.
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names, as in `App`.
        trigger: an interval such as `"5 seconds"`, or `"available now"` to read what is there and end.
        name: name of the query in Spark's progress and web page.
        checkpoint_location: folder of the checkpoint, which belongs to this query alone. Without one, and where it is
            lost, the next start goes on where the sink's ledger says; a sink without a ledger needs one.
        starting_offsets: where a query begins that neither a checkpoint nor the sink's ledger knows: `earliest`,
            `latest` or Spark's JSON. The ledger keeps it for the next start.
        options: further options of the source by Spark's names, such as `maxOffsetsPerTrigger`.
        output_mode: `append`, `update` or `complete`: which rows of an aggregate a batch has, as Spark says.

    Returns:
        The running query; `stop()` and `awaitTermination()` are Spark's.

    Raises:
        ConfigurationError: an argument is wrong, or there is neither a checkpoint nor a ledger; nothing was started.
        SinkError: the sink cannot store such frames; nothing was started.
        MissingRightError: the topics may not be read, or the sink may not store; nothing was started.
        TopicNotFoundError: a topic does not exist.
        DataLossError: the checkpoint speaks of a topic that was created again since.
    """
    a_callable("function", function)
    spec = SinkSpec(
        topics=names("topics", topics),
        function=function,
        rows=rows,
        trigger=trigger,
        name=name,
        checkpoint_location=checkpoint_location,
        starting_offsets=starting_offsets,
        options=options or {},
        output_mode=output_mode,
    )
    return start_query(spark, spec, bootstrap_servers, config or {})


def start_query(
    spark: SparkSession,
    spec: SinkSpec,
    bootstrap_servers: str,
    config: ClientConfig,
    gate: Callable[[DataFrame, int], None] | None = None,
) -> StreamingQuery:
    """Do what `start_sink` does for a declared sink; a gate gets the batches instead of the sink's function."""
    checkpoint = checkpoint_of(spark, spec)
    when = trigger_arguments(spec.trigger)
    of_source = {"kafka.bootstrap.servers": bootstrap_servers, "subscribe": ",".join(spec.topics)}
    of_source |= {f"kafka.{key}": _option_text(key, value) for key, value in config.items()}
    # Where the driver is this process, what is wrong with the topics is raised as it is, not out of Spark's stacks.
    progress, is_local = has_progress(spark, checkpoint), is_classic(spark)
    begins = beginning(spec, of_source, progress=progress, is_local=is_local)
    register(spark)
    frame = load(spark.readStream.format("penstock").options(**begins.options))
    if spec.rows is not None:
        frame = spec.rows(frame)
        if not hasattr(frame, "writeStream"):
            raise ConfigurationError(
                f"the function that makes the rows of the sink {spec.name} returned a {type(frame).__name__}; it must "
                "return a DataFrame"
            )
    check = getattr(spec.function, "check", None)
    if callable(check):
        check(frame.schema)
    begin_ledger(spec.function, spec.name, begins.entries)
    writer = frame.writeStream.foreachBatch(gate or OfQuery(spec.function, spec.name)).outputMode(spec.output_mode)
    writer = writer.queryName(spec.name).trigger(**when)
    if spec.checkpoint_location is not None:
        writer = writer.option("checkpointLocation", spec.checkpoint_location)
    return writer.start()


def load(reader: DataStreamReader) -> DataFrame:
    """Return a reader's frame, or raise `ConfigurationError` where the Python that Spark starts lacks the source."""
    try:
        return reader.load()
    except PySparkException as error:
        remedy = lacking_package(str(error))
        if remedy is None:
            raise
        raise ConfigurationError(f"the source penstock did not start: {remedy}") from error


def trigger_arguments(trigger: str) -> dict[str, Any]:
    """Return Spark's arguments for `"5 seconds"`, `"once"` or `"available now"`, or raise `ConfigurationError`."""
    text = trigger.strip().lower()
    if text in _ONCE:
        return {"availableNow": True}
    if _INTERVAL.fullmatch(text):
        return {"processingTime": text}
    raise ConfigurationError(f"trigger must be an interval such as '5 seconds', or 'available now', but is {trigger!r}")


def _option_text(key: str, value: Any) -> str:
    """Return a client setting as the text that Spark's options are; callbacks cannot travel to executors."""
    require_travelling(key, value)
    return str(value).lower() if isinstance(value, bool) else str(value)
