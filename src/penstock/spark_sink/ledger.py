"""The ledger: for each table and partition, the next offset to apply, changed together with the rows.

A row applies only if its offset is at or above the ledger's. Ledger and rows change in one database
transaction, so a batch that Spark hands over again, after whatever loss of its own notes, changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.spark_sink.planning import Offsets, TopicPartition


@dataclass(frozen=True, slots=True)
class Span:
    """The lowest and the highest offset a batch carries of one partition."""

    first: int
    last: int


def advanced(applied: Mapping[TopicPartition, int], batch: Mapping[TopicPartition, Span]) -> Offsets:
    """Return the ledger after a batch: never below what it was, past the last offset of each partition."""
    return {part: max(applied.get(part, 0), span.last + 1) for part, span in batch.items()}


def replayed(applied: Mapping[TopicPartition, int], batch: Mapping[TopicPartition, Span]) -> dict[TopicPartition, Span]:
    """Return, of each partition, the part of the batch that is applied already."""
    return {
        part: Span(span.first, min(span.last, applied[part] - 1))
        for part, span in batch.items()
        if span.first < applied.get(part, 0)
    }


def ledger_table(name: str, metadata: sa.MetaData) -> sa.Table:
    """Return the ledger's table: one row per target table, topic and partition."""
    return sa.Table(
        quoted_name(name, quote=True),
        metadata,
        sa.Column("target", sa.Text, primary_key=True),
        sa.Column("topic", sa.Text, primary_key=True),
        sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
    )


__all__ = ["Span", "advanced", "ledger_table", "replayed"]
