"""Starts the streaming query behind `@app.sink` and `start_sink`: topics in, a function called with every batch.

A query that has no checkpoint begins where its sink's ledger says; a sink without one needs a checkpoint. With a
checkpoint that knows the query, Spark goes on by that and asks nobody else. So the ledger is looked up at every start,
and counts where the checkpoint is new or lost.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.clients import require_travelling
from penstock.errors import ConfigurationError
from penstock.option_list import takes_options
from penstock.options import ClientConfig, a_callable, names
from penstock.spark_sink.errors import DataLossError
from penstock.spark_sink.ledger.rules import LedgerEntry, unknown
from penstock.spark_sink.queries.sink_specs import QUERY_DEFAULTS, QueryOptions, SinkSpec
from penstock.spark_sink.sinks.sink import with_ledger
from penstock.spark_sink.source.brokers import OffsetReader
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import TopicPartition, to_json
from penstock.spark_sink.source.session import require_classic
from penstock.spark_sink.source.source import register

_log = logging.getLogger("penstock.spark_sink")

#: Where Spark keeps checkpoints of queries that name none, by the query's name.
CHECKPOINTS = "spark.sql.streaming.checkpointLocation"

_STARTING = "startingoffsets"

#: Triggers that read what is there and end.
_ONCE = ("once", "available now", "availablenow")
_INTERVAL = re.compile(r"[1-9]\d* *(milliseconds?|seconds?|minutes?|hours?|days?)")


def checkpoint_of(spark: SparkSession, spec: SinkSpec) -> str | None:
    """Return where Spark keeps a query's progress; None where it keeps none.

    Raises `ConfigurationError` for a sink without a ledger in a query without a checkpoint: nobody remembers.
    """
    folder = spark.conf.get(CHECKPOINTS, None)
    location = spec.checkpoint_location or (f"{folder}/{spec.name}" if folder else None)
    if location is None and with_ledger(spec.function) is None:
        raise ConfigurationError(
            f"the sink of the query {spec.name} has no ledger, and the query no checkpoint: every start would handle "
            "all of the topic again; give it checkpoint_location=..., or a sink that remembers offsets, such as "
            'SqlSink, which does not with mode="batch"'
        )
    return location


def has_progress(spark: SparkSession, location: str | None) -> bool | None:
    """Tell whether a checkpoint knows where a query goes on: then Spark asks nobody else.

    None where it cannot be looked at from here: on storage that this process may not list.
    """
    if location is None:
        return False
    try:
        context: Any = spark.sparkContext
        offsets = context._jvm.org.apache.hadoop.fs.Path(location, "offsets")  # noqa: SLF001 - the storage is Hadoop's to know
        storage = offsets.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001 - the same
        files = storage.listStatus(offsets) if storage.exists(offsets) else []
        return any(str(file.getPath().getName()).isdecimal() for file in files)
    except Exception:  # noqa: BLE001 - Spark says what is wrong with it when the query starts
        _log.debug("the checkpoint %s could not be looked at", location, exc_info=True)
        return None


def beginning(
    spec: SinkSpec, of_source: Mapping[str, str], *, progress: bool | None = False
) -> tuple[dict[str, str], Mapping[TopicPartition, LedgerEntry]]:
    """Return where a query begins, where the ledger says and elsewhere as its options do: the options of its source.

    And the entries of partitions that the ledger does not know: with these written into it the next start begins there
    too, though nothing was stored in between. `of_source` has the options that name brokers and topics, `progress` is
    what `has_progress` says of the checkpoint. Where the sink's options say where to begin, they count before its
    `starting_offsets`. Raises `SinkError` where the ledger cannot be read, `DataLossError` where a checkpoint speaks of
    a topic that was created again since, and `BrokerConnectionError`, `MissingRightError` or `TopicNotFoundError`.
    """
    given = {_STARTING: spec.starting_offsets} | {
        option.lower(): value for option, value in (spec.options or {}).items()
    }
    as_given = {**of_source, **given}
    sink = with_ledger(spec.function)
    options = SourceOptions.parse(as_given).for_stream()
    reader = OffsetReader(options)
    view = reader.first_view()
    if sink is None:
        return as_given, {}
    ledger = sink.ledger_entries(spec.name, view.logs)
    new = unknown(ledger, {part: LedgerEntry(0, topic_id=view.ids.get(part[0])) for part in view.logs})
    if again := sorted({topic for topic, n in new if (topic, n) in ledger}):
        what = f"topic {', '.join(again)} was deleted and created again since the query {spec.name} has read it"
        if progress is not False and options.fail_on_data_loss:
            raise DataLossError(
                f"{what}, and its checkpoint speaks of the former one; to read the new topic from its beginning, give "
                "it a new checkpoint_location, and where this process cannot list it run `penstock sink reset "
                f"{spec.name} --forget --topic {again[0]}` with the options of its ledger; or "
                "set failOnDataLoss to false to go on regardless"
            )
        _log.warning("%s%s", what, "" if progress else "; it is read from its beginning")
    if progress:
        return as_given, {}
    if ledger:
        _log.info("the query %s begins where its sink's ledger says, unless it has a checkpoint", spec.name)
    # A partition that came to a topic since the query began there, and a topic that was created again, are read from
    # the beginning, as a running query does. Others begin where the options say. A former version's entry says nothing
    # of other partitions: it came with the first row of its own.
    known = {topic for (topic, _), entry in ledger.items() if (entry.start, entry.topic_id) != (None, None)}
    begun = {part: view.logs[part].first for part in new}
    others = {part: view.logs[part] for part in new if part[0] not in known}
    if others and options.starting is not None:
        begun |= options.starting.restricted(others).resolve(others, reader.at_time)
    positions = {part: entry.end for part, entry in ledger.items()} | begun
    rest = {option: value for option, value in given.items() if option != "startingtimestamp"}
    # Of a checkpoint that cannot be looked at it is not known that the query begins here.
    entries = (
        {} if progress is None else {part: LedgerEntry(at, at, view.ids.get(part[0])) for part, at in begun.items()}
    )
    return {**of_source, **rest, _STARTING: json.dumps(to_json(positions))}, entries


@takes_options(QueryOptions, QUERY_DEFAULTS)
def start_sink(
    spark: SparkSession,
    topics: str | Sequence[str],
    function: Callable[[DataFrame, int], None],
    *,
    rows: Callable[[DataFrame], DataFrame] | None = None,
    bootstrap_servers: str,
    config: ClientConfig | None = None,
    name: str,
    **given: Unpack[QueryOptions],
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
        name: name of the query in Spark's progress and web page.
        trigger, checkpoint_location, starting_offsets, options, output_mode: as in `App.sink`.

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
    spec = SinkSpec(topics=names("topics", topics), function=function, rows=rows, name=name, **given)
    return start_query(spark, spec, bootstrap_servers, config or {})


def start_query(
    spark: SparkSession,
    spec: SinkSpec,
    bootstrap_servers: str,
    config: ClientConfig,
    gate: Callable[[DataFrame, int], None] | None = None,
) -> StreamingQuery:
    """Do what `start_sink` does for a declared sink; a gate gets the batches instead of the sink's function."""
    require_classic(spark)
    checkpoint = checkpoint_of(spark, spec)
    when = trigger_arguments(spec.trigger)
    for key, value in config.items():
        require_travelling(key, value)
    of_source = {"kafka.bootstrap.servers": bootstrap_servers, "subscribe": ",".join(spec.topics)}
    of_source |= {
        f"kafka.{key}": str(value).lower() if isinstance(value, bool) else str(value) for key, value in config.items()
    }
    # What is wrong with the topics is raised here as it is, not out of Spark's stacks.
    options, entries = beginning(spec, of_source, progress=has_progress(spark, checkpoint))
    register(spark)
    frame = spark.readStream.format("penstock").options(**options).load()
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
    if entries and (sink := with_ledger(spec.function)) is not None:
        sink.begin_ledger(spec.name, entries)
    writer = frame.writeStream.foreachBatch(gate or spec.function).outputMode(spec.output_mode)
    writer = writer.queryName(spec.name).trigger(**when)
    if spec.checkpoint_location is not None:
        writer = writer.option("checkpointLocation", spec.checkpoint_location)
    return writer.start()


def trigger_arguments(trigger: str) -> dict[str, Any]:
    """Return Spark's arguments for `"5 seconds"`, `"once"` or `"available now"`, or raise `ConfigurationError`."""
    text = trigger.strip().lower()
    if text in _ONCE:
        return {"availableNow": True}
    if _INTERVAL.fullmatch(text):
        return {"processingTime": text}
    raise ConfigurationError(f"trigger must be an interval such as '5 seconds', or 'available now', but is {trigger!r}")
