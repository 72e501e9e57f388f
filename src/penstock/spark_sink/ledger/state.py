"""What a ledger holds, whatever keeps it: of each query, target and partition the next offset to apply.

A row applies only if its offset is at or above the ledger's. Ledger and rows change in one transaction, so a
batch that Spark hands over again, after whatever loss of its own notes, changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.errors import SinkError
from penstock.spark_sink.source.offsets.planning import Offsets, TopicPartition

_log = logging.getLogger("penstock.spark_sink")


@dataclass(frozen=True, slots=True)
class Span:
    """The lowest and the highest offset a batch carries of one partition."""

    first: int
    last: int


@dataclass(slots=True)
class OffsetStatistics:
    """What a batch carries: its rows, each partition's offsets, and how many rows of it are below the ledger."""

    rows: int = 0
    spans: dict[TopicPartition, Span] = field(default_factory=dict)
    applied: dict[TopicPartition, int] = field(default_factory=dict)

    def add(self, part: TopicPartition, span: Span, applied: int) -> None:
        """Count offsets of a partition, and how many of its rows were applied before."""
        held = self.spans.get(part, span)
        self.spans[part] = Span(min(held.first, span.first), max(held.last, span.last))
        if applied:
            self.applied[part] = self.applied.get(part, 0) + applied


@dataclass(frozen=True, slots=True)
class LedgerState:
    """The ledger of one query, for one table or folder: the next offset of each partition.

    Beside it stands which batch moved a partition last, `"<run of the query>/<batch>"`, where that is known.
    """

    offsets: Offsets = field(default_factory=dict)
    batches: Mapping[TopicPartition, str] = field(default_factory=dict)


def refuse_late(
    batches: Mapping[TopicPartition, str],
    repeated: Iterable[TopicPartition],
    run: str | None,
    batch_id: int,
    target: str,
) -> None:
    """Raise `SinkError` for rows below the ledger that are no repetition: this very run has gone past them.

    A run hands a batch over once, and offsets in their order: the sink was called twice in a batch, or an operator of
    the query holds rows back. Left out, such rows would be lost. `batches` says which batch moved each partition last,
    `repeated` of which partitions there are rows below the ledger, and `run` is None where it is not known.
    """
    for topic, partition in sorted(repeated) if run is not None else ():
        earlier, _, number = batches.get((topic, partition), "").partition("/")
        if earlier != run:
            continue
        place = f"{topic}[{partition}]"
        if number == str(batch_id):
            raise SinkError(
                f"batch {batch_id} was given to {target} twice: rows of {place} are stored, and more of the same "
                "offsets would be taken for repeated ones and left out; unite the frames (unionByName) and call the "
                "sink once, or give each sink a name of its own"
            )
        raise SinkError(
            f"batch {batch_id} holds rows of {place} that lie below those of batch {number}, which {target} has "
            "stored: they would be taken for repeated ones and left out; an operator with state (a window, a join of "
            "streams, dropDuplicates) holds rows back: keep it out of the query, and aggregate behind the sink; or the "
            "topic was deleted and made anew: remove it from the ledger"
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


def warn_replayed(
    batch_id: int, target: str, statistics: OffsetStatistics, applied: Mapping[TopicPartition, int] | None = None
) -> None:
    """Warn of the rows of a batch that are left out because they were applied before.

    `applied` holds the ledger's offsets, where the sink knows them at once.
    """
    if not statistics.applied:
        return
    again = replayed(applied or {}, statistics.spans)
    _log.warning(
        "batch %d: %d of %d rows for %s were applied before and are left out (%s)",
        batch_id,
        sum(statistics.applied.values()),
        statistics.rows,
        target,
        ", ".join(
            f"{part[0]}[{part[1]}]" + (f" up to offset {again[part].last}" if part in again else "")
            for part in sorted(statistics.applied)
        ),
    )
