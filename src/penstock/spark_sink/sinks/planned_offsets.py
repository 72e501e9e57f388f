"""Which offsets Spark has planned for a micro-batch, as the sink that is handed its frame finds them.

A frame says nothing of what a filter has dropped. Spark's own object of the running query does: it has the offsets of
each source before and after the batch (`StreamExecution.getLatestExecutionContext`, 4.2 to 4.3), in the JSON of the
source, whose shape is that of Spark's Kafka source.
"""

from __future__ import annotations

import logging
import shlex
from collections import ChainMap
from functools import cache
from typing import TYPE_CHECKING, Any

from penstock.errors import MessageFormatError, SinkError
from penstock.spark_sink.ledger.rules import BATCHES, Batch
from penstock.spark_sink.sinks.sink import Origin, running_query
from penstock.spark_sink.source.plan import Offsets, TopicPartition, parse_offsets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("penstock.spark_sink")

Planned = dict[TopicPartition, tuple[int, int]]


def micro_batch(frame: DataFrame, batch_id: int, origin: Origin, target: str, ledger: str) -> Batch:
    """Return the batch that a frame belongs to, for the rules of the ledger.

    `ledger` has the options by which `penstock sink` finds the ledger; see `Batch` for the rest.
    """
    planned = planned_offsets(frame, batch_id, origin)
    return Batch(target, batch_id, origin.query_id, planned, reset_command(origin.query, ledger))


def numbered_batch(batch_id: int, origin: Origin, target: str, ledger: str) -> Batch:
    """Return the batch of a frame whose rows come from no messages: it is known by its number; as `micro_batch`."""
    if origin.query_id is None or origin.query_id == origin.run:
        raise SinkError(
            f'{target} takes batches by their number (mode="batch"), which only streaming queries have, on the thread '
            "that Spark calls; Spark Connect does not tell the query's id: use classic Spark"
        )
    planned = {BATCHES: (batch_id, batch_id + 1)}
    return Batch(target, batch_id, origin.query_id, planned, reset_command(origin.query, ledger))


def reset_command(query: str, ledger: str) -> str:
    """Return the command that changes the ledger of a query, of which `ledger` has the options."""
    return f"penstock sink reset {shlex.quote(query)} {ledger}"


def planned_offsets(frame: DataFrame, batch_id: int, origin: Origin) -> Planned:
    """Return the first offset of each partition in a batch, and the one behind the last.

    Empty if they are not known: under Spark Connect, outside of a streaming query, in a thread of the function's own.
    A partition that two sources of the query read up to different offsets is left out.
    """
    if origin.query_id is None or origin.query_id == origin.run:
        return {}
    try:
        context = running_query(frame, origin.query_id).getLatestExecutionContext()
        if context.batchId() != batch_id:
            return {}
        starts = {source.toString(): planned.start().json() for source, planned in _pairs(context.newData())}
        ends = [(starts.get(source.toString(), end.json()), end.json()) for source, end in _pairs(context.endOffsets())]
    except Exception:  # noqa: BLE001 - another version of Spark, or no JVM: rows say what they can
        _warn_of_unknown_plans()
        _log.debug("the planned offsets of batch %d are not known", batch_id, exc_info=True)
        return {}
    return merged(ends)


@cache
def _warn_of_unknown_plans() -> None:
    _log.warning(
        "Spark does not say which offsets it has planned for a batch: sinks go by the rows they get, and cannot see "
        "where some are missing; versions 4.2 and 4.3 are known to tell"
    )


def _pairs(scala_map: Any) -> list[tuple[Any, Any]]:
    found, pairs = scala_map.iterator(), []
    while found.hasNext():
        pair = found.next()
        pairs.append((pair._1(), pair._2()))  # noqa: SLF001 - Scala's names
    return pairs


def merged(sources: list[tuple[str, str]]) -> Planned:
    """Return the plan of a batch from the JSON of each source's start and end; one of another shape has no Kafka."""
    plans: list[Planned] = []
    for start_json, end_json in sources:
        try:
            start, end = _offsets(start_json), _offsets(end_json)
        except MessageFormatError:
            continue
        # The source reads a partition that it has not met before from its beginning.
        plans.append({part: (start.get(part, 0), until) for part, until in end.items()})
    planned = ChainMap(*plans).items()
    return {part: ends for part, ends in planned if all(plan.get(part, ends) == ends for plan in plans)}


def _offsets(text: str) -> Offsets:
    offsets = parse_offsets(text)
    if any(offset < 0 for offset in offsets.values()):
        raise MessageFormatError("an offset of a plan is a position, not a word")
    return offsets
