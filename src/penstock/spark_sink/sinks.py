"""What a sink is to those that start it, and what a micro-batch tells of itself and of the query it belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from penstock.errors import SinkError
from penstock.spark_sink.planning import Offsets, TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

#: Spark's names for the number of a micro-batch and for the group of its jobs, which is the id of the run
#: (`MicroBatchExecution.BATCH_ID_KEY`, `StreamExecution`: the job group is `runId`).
_BATCH_ID, _RUN = "streaming.sql.batchId", "spark.jobGroup.id"


class Sink(Protocol):
    """Takes micro-batches: a foreachBatch function that can be checked before the query begins. Picklable."""

    def check(self, schema: StructType) -> None:
        """Judge, on the driver and before the query begins, whether frames of this schema can be stored.

        Raises:
            SinkError: they cannot; the message says what differs.
        """

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Store one micro-batch, which may be handed over again.

        Raises:
            SinkError: nothing of the batch was stored.
        """


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow types of a frame, instants in UTC.

    Raises:
        SinkError: two columns have one name, or a type has no counterpart.
    """
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise SinkError(f"the frame has several columns called {', '.join(twice)}; rename or drop all but one")
    # Here and not above: what else this file knows is of use without Spark.
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except PySparkException as error:
        raise SinkError(f"the frame has a column that cannot be stored: {error}; cast it or leave it out") from error


def require_places(schema: pa.Schema, target: str) -> None:
    """Raise `SinkError` where topic, partition or offset of a frame for a target is not of the source's kind."""
    import pyarrow as pa

    wanted = (("topic", "text", pa.types.is_string), ("partition", "an integer", pa.types.is_integer),
              ("offset", "an integer", pa.types.is_integer))  # fmt: skip
    for name, kind, fits in wanted:
        found = schema.field(name).type
        if not fits(found):
            raise SinkError(
                f"column {name} of the frame for {target} is {found}, and the source's is {kind}; select it as it is"
            )


def has_ledger(sink: object) -> bool:
    """Tell whether a sink remembers what it stored."""
    return any(callable(getattr(sink, method, None)) for method in ("position_of", "position"))


def ledger_positions(sink: object, query: str, partitions: Iterable[TopicPartition]) -> Offsets | None:
    """Return what a sink's ledger says of a query: of each partition that it knows, the next offset.

    Args:
        sink: the function that gets the batches.
        query: name of the query; a sink that has a name of its own goes by that.
        partitions: those that are asked for.

    Returns:
        The offsets; None where the sink has no ledger.

    Raises:
        SinkError: the ledger cannot be read.
    """
    ask = getattr(sink, "position_of", None)
    if callable(ask):
        return dict(ask(query, partitions))
    whole = getattr(sink, "position", None)
    return dict(whole()) if callable(whole) else None


def run_of(batch: DataFrame) -> str | None:
    """Return the id of the query's run that handed the batch over, another one after each start.

    None where it cannot be known: outside of a streaming query, in a thread that the function made itself, and under
    Spark Connect, whose client has no such properties.
    """
    try:
        context = batch.sparkSession.sparkContext
    except Exception:  # noqa: BLE001 - Connect's session refuses the question with an exception of its own
        return None
    run: str | None = context.getLocalProperty(_RUN)
    return run if context.getLocalProperty(_BATCH_ID) is not None else None


__all__ = ["Sink", "arrow_schema", "has_ledger", "ledger_positions", "require_places", "run_of"]
