"""What sinks ask of a frame: that its columns are there, which offsets it carries, which rows are applied already.

Every frame given to a sink carries `topic`, `partition` and `offset` of the messages its rows come from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it

from penstock.errors import SinkError
from penstock.spark_sink.ledger.sql_ledger import Span, replayed
from penstock.spark_sink.source.planning import Offsets, TopicPartition

_log = logging.getLogger("penstock.spark_sink")

#: The columns that say where a row comes from.
POSITION = ("topic", "partition", "offset")


@dataclass(frozen=True, slots=True)
class Census:
    """What a batch carries.

    Attributes:
        rows: number of rows.
        applied: how many of them the ledger says are applied already.
        spans: the offsets of each partition.
    """

    rows: int
    applied: int
    spans: dict[TopicPartition, Span]


def require_columns(present: Iterable[str], target: str, more: Iterable[str] = ()) -> None:
    """Raise `SinkError` where the frame for a target lacks its position or one of `more`."""
    held = set(present)
    missing = [name for name in (*POSITION, *more) if name not in held]
    if missing:
        raise SinkError(
            f"the frame for {target} lacks {', '.join(missing)}; keep topic, partition and offset of the source in "
            "the query's select, and every column that the sink is told of"
        )


def is_applied(ledger: Mapping[TopicPartition, int]) -> Column:
    """Return a column that is true for rows below the ledger.

    A topic's offsets stand in one constant array, so that a row costs one look whatever the number of partitions.
    """
    by_topic: dict[str, dict[int, int]] = {}
    for (topic, partition), offset in ledger.items():
        by_topic.setdefault(topic, {})[partition] = offset
    never = F.expr("false")
    below = never
    for topic, offsets in by_topic.items():
        known = F.array(*(F.lit(offsets.get(n, 0)).cast("bigint") for n in range(max(offsets) + 1)))
        passed = F.col("offset") < F.get(known, F.col("partition").cast("int"))
        below = below | ((F.col("topic") == topic) & F.coalesce(passed, never))
    return below


def census(batch: DataFrame, ledger: Mapping[TopicPartition, int], target: str) -> Census:
    """Count a batch's rows and find its offsets, in one Spark job.

    Raises:
        SinkError: a row does not say where it comes from.
    """
    groups = (
        batch.groupBy("topic", "partition")
        .agg(
            F.min("offset").alias("first"),
            F.max("offset").alias("last"),
            F.count(F.lit(1)).alias("rows"),
            F.count("offset").alias("placed"),
            F.count_if(is_applied(ledger)).alias("applied"),
        )
        .collect()
    )
    for one in groups:
        for name, empty in (
            ("topic", one["topic"] is None),
            ("partition", one["partition"] is None),
            ("offset", one["placed"] < one["rows"]),
        ):
            if empty:
                raise SinkError(f"column {name} of the frame for {target} is NULL; it must come from the source as is")
    return Census(
        rows=sum(one["rows"] for one in groups),
        applied=sum(one["applied"] for one in groups),
        spans={(one["topic"], int(one["partition"])): Span(one["first"], one["last"]) for one in groups},
    )


def tell_replay(batch_id: int, counted: Census, ledger: Offsets, target: str) -> None:
    """Warn of rows that are left out because they are applied."""
    if not counted.applied:
        return
    parts = sorted(replayed(ledger, counted.spans).items())
    _log.warning(
        "batch %d: %d of %d rows for %s were applied before and are left out (%s)",
        batch_id,
        counted.applied,
        counted.rows,
        target,
        ", ".join(f"{topic}[{number}] up to offset {span.last}" for (topic, number), span in parts),
    )


__all__ = ["POSITION", "Census", "census", "is_applied", "require_columns", "tell_replay"]
