"""Starts the streaming query of `@app.sink` and `start_sink`, which calls a function with every batch of topics.

Without a checkpoint, a query begins at its sink's ledger; a sink without a ledger needs a checkpoint. If the checkpoint
knows the query, Spark continues from it. So the ledger is read at every start, and counts if the checkpoint is new or
lost.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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

#: Spark's setting for the folder of checkpoints of queries without their own.
CHECKPOINTS = "spark.sql.streaming.checkpointLocation"

_STARTING = "startingoffsets"

#: Triggers that read the backlog and end.
_ONCE = ("once", "available now", "availablenow")
_INTERVAL = re.compile(r"[1-9]\d* *(milliseconds?|seconds?|minutes?|hours?|days?)")


def checkpoint_of(spark: SparkSession, spec: SinkSpec) -> str | None:
    """Return the location of a query's checkpoint, or None.

    Raises `ConfigurationError` if neither the query has a checkpoint nor its sink a ledger: nothing keeps its progress.
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
    """Tell whether a checkpoint has a query's position, from which Spark continues.

    None if this process cannot list the checkpoint's storage.
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
    """Return the source's options with the beginning of a query: the ledger's offsets, otherwise those of its options.

    Also returns entries that the ledger lacks, or has of a topic with another id. Once they are written, the next start
    begins there, too, even if nothing was stored in between.

    Args:
        spec: the sink. A start in its options overrides its `starting_offsets`.
        of_source: the options with brokers and topics.
        progress: the result of `has_progress` for the checkpoint.

    Raises:
        SinkError: the ledger cannot be read.
        DataLossError: the checkpoint is of a topic that was created again since.
        BrokerConnectionError, MissingRightError, TopicNotFoundError: as their names say.
    """
    given = {_STARTING: spec.starting_offsets} | {name.lower(): value for name, value in (spec.options or {}).items()}
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
    if progress:  # it goes on regardless: its entries get the new topic's id
        return as_given, {part: replace(ledger[part], topic_id=new[part].topic_id) for part in new if part in ledger}
    if ledger:
        _log.info("the query %s begins where its sink's ledger says, unless it has a checkpoint", spec.name)
    # A partition that was added to a known topic, and a topic that was created again, are read from the beginning, as
    # in a running query. Other partitions begin as the options say. An entry of an earlier version does not make its
    # topic known: it was written with the first row of its own partition.
    known = {topic for (topic, _), entry in ledger.items() if (entry.start, entry.topic_id) != (None, None)}
    begun = {part: view.logs[part].first for part in new}
    others = {part: view.logs[part] for part in new if part[0] not in known}
    if others and options.starting is not None:
        begun |= options.starting.restricted(others).resolve(others, reader.at_time)
    positions = {part: entry.end for part, entry in ledger.items()} | begun
    rest = {option: value for option, value in given.items() if option != "startingtimestamp"}
    # With a checkpoint that cannot be read from here, it is unknown whether the query begins here.
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
    """Start a query that reads topics through the source `penstock` and calls a function with each micro-batch.

    `trigger`, `checkpoint_location`, `starting_offsets`, `options` and `output_mode` are as in `App.sink`.

    Args:
        spark: the session; the source is registered with it.
        topics: one topic or several.
        function: called with the frame and the batch's number. A batch may come twice after a restart; a `SqlSink`
            makes the repetition harmless. If it has a method `check(schema)`, that is called first.
        rows: makes the frame to store from the frame of messages; default: the messages themselves.
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names, as in `App`.
        name: name of the query in Spark's progress and web page.

    Returns:
        The running query; `stop()` and `awaitTermination()` are Spark's.

    Raises:
        ConfigurationError: an argument is wrong, or there is neither a checkpoint nor a ledger; nothing was started.
        SinkError: the sink cannot store such frames; nothing was started.
        MissingRightError: the topics may not be read, or the sink may not store; nothing was started.
        TopicNotFoundError: a topic does not exist.
        DataLossError: the checkpoint is of a topic that was created again since.
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
    """Start the query of a declared sink as `start_sink` does. With a gate, batches go to it, not to the function."""
    require_classic(spark)
    checkpoint = checkpoint_of(spark, spec)
    when = trigger_arguments(spec.trigger)
    for key, value in config.items():
        require_travelling(key, value)
    of_source = {"kafka.bootstrap.servers": bootstrap_servers, "subscribe": ",".join(spec.topics)}
    of_source |= {
        f"kafka.{key}": str(value).lower() if isinstance(value, bool) else str(value) for key, value in config.items()
    }
    # Errors of topics are raised here directly, not out of Spark's stacks.
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
