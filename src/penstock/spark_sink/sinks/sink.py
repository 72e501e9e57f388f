"""The interface of sinks, and the query and micro-batch that a frame belongs to.

A sink is a foreachBatch function. It may have a method `check(schema)`, called before the query begins, and a ledger.

A frame does not show the rows that a filter dropped. Spark's object of the running query does: it has the offsets of
each source before and after the batch (`StreamExecution.getLatestExecutionContext`, 4.2 to 4.3), in the JSON format of
Spark's Kafka source.
"""

from __future__ import annotations

import shlex
import threading
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from penstock.clients.ration import once_in, rationed
from penstock.errors import SinkError
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.ledger.rules import BATCHES, Batch, LedgerEntry, unknown
from penstock.spark_sink.source.plan import TopicPartition, reported_offsets

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_log = rationed("penstock.spark_sink")

#: Spark's properties with the number of a micro-batch, and with the id of the run, which is the job group
#: (`MicroBatchExecution.BATCH_ID_KEY`, `StreamExecution`: the job group is `runId`).
_BATCH_ID, _RUN = "streaming.sql.batchId", "spark.jobGroup.id"
#: Spark's property with the query's id.
_QUERY_ID = "sql.streaming.queryId"

Entries = dict[TopicPartition, LedgerEntry]
#: New entries of one query; None removes an entry.
Changes = Mapping[TopicPartition, LedgerEntry | None]
Planned = dict[TopicPartition, tuple[int, int]]


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow types of a frame, with instants in UTC.

    Raises `SchemaMismatchError` for two columns of one name, or a type that Arrow lacks.
    """
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise SchemaMismatchError(
            f"the frame has several columns called {', '.join(twice)}; rename or drop all but one"
        )
    # Imported here: the rest of this module works without Spark.
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except PySparkException as error:
        raise SchemaMismatchError(
            f"the frame has a column that cannot be stored: {error}; cast it or leave it out"
        ) from error


class LedgerSink(ABC):
    """A sink of penstock. Its ledger has entries by query name; the sink's own name counts, if it has one.

    Each method raises `SinkError` if the ledger cannot be read or written, and `MissingRightError` if a permission for
    it is missing.
    """

    __slots__ = ()

    name: str | None

    @property
    def has_ledger(self) -> bool:
        """Whether it has a ledger of stored offsets, from which a query can begin."""
        return True

    @property
    @abstractmethod
    def ledger_key(self) -> Hashable:
        """The identity of its ledger in this process."""

    @abstractmethod
    def ledger(self) -> dict[str, Entries]:
        """Return the entries of each query that fills the target, by query name."""

    @abstractmethod
    def _change_ledger(
        self, query: str, parts: Collection[TopicPartition], change: Callable[[Entries], Changes]
    ) -> None:
        """Apply `change` to a query's entries, at least of these partitions, while nobody else writes."""

    def ledger_entries(self, query: str, partitions: Iterable[TopicPartition]) -> Entries:
        """Return the entries of some partitions."""
        known = self.ledger().get(self.name or query, {})
        return {part: known[part] for part in partitions if part in known}

    def begin_ledger(self, query: str, entries: Mapping[TopicPartition, LedgerEntry]) -> None:
        """Record where a query begins, in partitions that the ledger does not know."""
        self._change_ledger(self.name or query, entries, lambda known: unknown(known, entries))

    def write_ledger(self, query: str, entries: Changes) -> None:
        """Set entries of a query's ledger; None removes one. Waits for a batch that is being stored."""
        self._change_ledger(query, entries, lambda _known: entries)


def with_ledger(sink: object) -> LedgerSink | None:
    """Return the sink if it has a ledger; None for other sinks and for functions."""
    return sink if isinstance(sink, LedgerSink) and sink.has_ledger else None


@dataclass(frozen=True, slots=True)
class Origin:
    """The query of a batch.

    Attributes:
        query: its name; empty if unknown: outside of a streaming query, and in threads that the function made itself.
        run: id of the query's run, new after each start; None if unknown.
        query_id: Spark's id of the query, which survives restarts with a checkpoint; None if unknown.
    """

    query: str = ""
    run: str | None = None
    query_id: str | None = None


def origin_of(batch: DataFrame, named: str | None = None) -> Origin:
    """Return the query of a batch, as far as it is known.

    The sink's name for the query, `named`, overrides Spark's name. Raises `SinkError` for a streaming query without a
    name: it would share its ledger with all other queries without one.
    """
    context, name = batch.sparkSession.sparkContext, named
    number, run = context.getLocalProperty(_BATCH_ID), context.getLocalProperty(_RUN)
    if number is None or run is None:
        return Origin(name or "")
    query_id = context.getLocalProperty(_QUERY_ID)
    if name is None:
        try:
            name = running_query(batch, query_id).name()
        except Exception:  # noqa: BLE001 - another version of Spark
            raise SinkError(
                "Spark does not tell the name of the query, to which the ledger belongs, in a way that is known; give "
                "the sink name=..."
            ) from None
    if not name:
        raise SinkError(
            "the query has no name, to which the ledger belongs, and would share the ledger of all queries without "
            'one; write .queryName("orders") before .start(), or give the sink name="orders"'
        )
    return Origin(name, run, query_id)


def running_query(batch: DataFrame, query_id: str | None) -> Any:
    """Return Spark's object of a batch's query (`StreamExecution`).

    There is no public way: the batch's session is not the one in which the query was started. The shared state of
    sessions has the running queries by id (`SharedState.activeStreamingQueries`, 4.2 to 4.3). In other versions, the
    exceptions of py4j pass through.
    """
    session: Any = batch.sparkSession
    running = session._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001 - see above
    return running.get(session.sparkContext._jvm.java.util.UUID.fromString(query_id))  # noqa: SLF001 - the same


class StoredBatches:
    """The last stored batch of each sink in this process: a second frame of one batch is refused.

    The ledger cannot distinguish such a frame from a repetition of the first one, whose rows must be left out.
    """

    def __init__(self) -> None:
        #: Guards the other fields: queries store their batches on different threads.
        self._lock = threading.Lock()
        self._last: dict[Hashable, tuple[str, int]] = {}

    def has_any_of(self, sink: Hashable, origin: Origin) -> bool:
        """Tell whether this run of the query has stored a batch in this sink: then its checks have succeeded."""
        with self._lock:
            return origin.run is not None and self._last.get((sink, origin.query), ("", 0))[0] == origin.run

    @contextmanager
    def one_call(self, sink: Hashable, origin: Origin, batch: Batch) -> Iterator[None]:
        """Store a batch within the block; `SinkError` if this run has stored another frame of it in this sink."""
        key, this = (sink, origin.query), (origin.run or "", batch.batch_id)
        with self._lock:
            if origin.run is not None and self._last.get(key) == this:
                raise SinkError(
                    f"batch {batch.batch_id} was given to {batch.target} twice: the rows of its first frame are "
                    "stored, those of this one are not. Give the second sink a name of its own: then it stores them "
                    "when the query starts again. Or unite the frames (unionByName) and call the sink once, which "
                    "counts from the next batch on: the rows that this frame has now would be left out"
                )
        yield
        with self._lock:
            self._last[key] = this


#: The one of this process.
stored_batches = StoredBatches()


def micro_batch(
    frame: DataFrame, batch_id: int, origin: Origin, target: str, ledger: str, *, is_numbered: bool = False
) -> Batch:
    """Return the batch of a frame, for the rules of the ledger.

    `ledger` has the options by which `penstock sink` finds the ledger; see `Batch` for the rest. With `is_numbered`,
    the rows come from no messages, and the batch number identifies it.
    """
    if is_numbered and origin.query_id is None:
        raise SinkError(
            f'{target} takes batches by their number (mode="batch"), which only streaming queries have, on the thread '
            "that Spark calls: start one with it"
        )
    planned = {BATCHES: (batch_id, batch_id + 1)} if is_numbered else planned_offsets(frame, batch_id, origin)
    reset = f"penstock sink reset {shlex.quote(origin.query)} {ledger}"
    return Batch(target, batch_id, origin.query_id, planned, reset)


def planned_offsets(frame: DataFrame, batch_id: int, origin: Origin) -> Planned:
    """Return for each partition of a batch the first offset, and the one after the last.

    Empty if unknown: outside of a streaming query, and in threads that the function made itself. A partition that two
    sources of the query read up to different offsets is left out.
    """
    if origin.query_id is None:
        return {}
    try:
        context = running_query(frame, origin.query_id).getLatestExecutionContext()
        if context.batchId() != batch_id:
            return {}
        starts = {source.toString(): planned.start().json() for source, planned in _pairs(context.newData())}
        ends = [(starts.get(source.toString(), end.json()), end.json()) for source, end in _pairs(context.endOffsets())]
    except Exception as error:  # noqa: BLE001 - another version of Spark, or no JVM: rows say what they can
        _log.warning(
            "Spark does not say which offsets it has planned for a batch (%s): sinks go by the rows they get, and "
            "cannot see where some are missing; versions 4.2 and 4.3 are known to tell",
            type(error).__name__,
            extra=once_in(inf, "plans"),
        )
        return {}
    return merged(ends)


def _pairs(scala_map: Any) -> list[tuple[Any, Any]]:
    found, pairs = scala_map.iterator(), []
    while found.hasNext():
        pair = found.next()
        pairs.append((pair._1(), pair._2()))  # noqa: SLF001 - Scala's names
    return pairs


def merged(sources: list[tuple[str, str]]) -> Planned:
    """Return the plan of a batch from the JSON of each source's start and end. Sources of other formats are ignored."""
    plans: list[Planned] = []
    for start_json, end_json in sources:
        start, end = reported_offsets(start_json), reported_offsets(end_json)
        # The source reads a new partition from its beginning.
        plans.append({part: (max(0, start.get(part, 0)), until) for part, until in end.items()})
    planned = ChainMap(*plans).items()
    return {part: ends for part, ends in planned if all(plan.get(part, ends) == ends for plan in plans)}
