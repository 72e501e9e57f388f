"""The ledger: for each table and partition, the next offset to apply, changed together with the rows.

A row applies only if its offset is at or above the ledger's. Ledger and rows change in one database
transaction, so a batch that Spark hands over again, after whatever loss of its own notes, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.errors import SinkError
from penstock.spark_sink.planning import Offsets, TopicPartition


@dataclass(frozen=True, slots=True)
class Span:
    """The lowest and the highest offset a batch carries of one partition."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Standing:
    """The ledger of one table.

    Attributes:
        offsets: the next offset of each partition.
        batches: which batch moved each partition last, `"<run of the query>/<batch>"`; not of those of which it is
            not known.
    """

    offsets: Offsets = field(default_factory=dict)
    batches: Mapping[TopicPartition, str] = field(default_factory=dict)

    def refuse_late(self, replayed: Iterable[TopicPartition], run: str | None, table: str, batch_id: int) -> None:
        """Refuse rows below the ledger that are no repetition: this very run of the query has gone past them.

        A run hands a batch over once, and offsets in their order. Rows left out of such a batch would be lost.

        Raises:
            SinkError: the sink was called twice in a batch, or an operator of the query holds rows back.
        """
        if run is None:
            return
        for part in sorted(replayed):
            earlier, _, number = self.batches.get(part, "").partition("/")
            if earlier != run:
                continue
            place = f"{part[0]}[{part[1]}]"
            if number == str(batch_id):
                raise SinkError(
                    f"batch {batch_id} was given to table {table} twice: rows of {place} are stored, and more of the "
                    "same offsets would be taken for repeated ones and left out; unite the frames (unionByName) and "
                    "call the sink once, or give each sink a ledger_table of its own"
                )
            raise SinkError(
                f"batch {batch_id} has rows of {place} that lie below those of batch {number}, which table {table} "
                "has stored: they would be taken for repeated ones and left out; an operator with state (a window, a "
                "join of streams, dropDuplicates) holds rows back: keep it out of the query, and aggregate in the "
                "database with add, or the topic was deleted and made anew: remove its rows from the ledger table"
            )


def advanced(applied: Mapping[TopicPartition, int], batch: Mapping[TopicPartition, Span]) -> Offsets:
    """Return the partitions whose ledger a batch moves, and to where: past its last offset, never back.

    Whose batch it was is written beside what it moves and nothing else: a second copy of the query may be far ahead,
    and what it has stored must not look like this one's.
    """
    return {part: span.last + 1 for part, span in batch.items() if span.last >= applied.get(part, 0)}


def replayed(applied: Mapping[TopicPartition, int], batch: Mapping[TopicPartition, Span]) -> dict[TopicPartition, Span]:
    """Return, of each partition, the part of the batch that is applied already."""
    return {
        part: Span(span.first, min(span.last, applied[part] - 1))
        for part, span in batch.items()
        if span.first < applied.get(part, 0)
    }


__all__ = ["Span", "Standing", "advanced", "replayed"]
