"""What Spark reports of a query after each batch, as values: rows, times, offsets, lag.

Plain reading of Spark's JSON. A source counts when its offsets have the shape of Kafka's, so that queries over Spark's
own connector are understood as well; other sources are passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from penstock.errors import MessageFormatError
from penstock.spark_sink.source.plan import Offsets, from_json


@dataclass(frozen=True, slots=True)
class QueryProgress:
    """One report of a query.

    Attributes:
        name: name of the query; its id where it has none.
        run_id: Spark's id of this start of the query.
        executed: whether the batch was done and committed; else there was nothing to do.
        rows_per_s: rows that Spark processed in a second of the batch.
        seconds: of each phase of the batch, by Spark's names: `addBatch`, `triggerExecution`, ...
        ends: the next offset to read after the batch.
        latest: the ends of the logs as the source last saw them; empty where it does not tell.
    """

    name: str
    run_id: str
    batch_id: int
    executed: bool
    rows: int
    rows_per_s: float
    seconds: Mapping[str, float]
    ends: Offsets
    latest: Offsets

    @property
    def lag(self) -> Offsets:
        """Offsets from the query's position to the end of the log, where both are known."""
        return {part: max(0, end - self.ends[part]) for part, end in self.latest.items() if part in self.ends}

    @classmethod
    def parse(cls, text: str) -> QueryProgress:
        """Read Spark's JSON, or raise `MessageFormatError` where it is no progress of a query."""
        try:
            said = json.loads(text)
            seconds = {phase: int(taken) / 1_000 for phase, taken in (said.get("durationMs") or {}).items()}
            ends: Offsets = {}
            latest: Offsets = {}
            for source in said.get("sources") or ():
                offsets = _offsets(source.get("endOffset"))
                ends |= offsets
                if offsets:
                    latest |= _offsets(source.get("latestOffset"))
            return cls(
                name=str(said.get("name") or said["id"]),
                run_id=str(said["runId"]),
                batch_id=int(said["batchId"]),
                executed="addBatch" in seconds,
                rows=int(said.get("numInputRows") or 0),
                rows_per_s=_number(said.get("processedRowsPerSecond")),
                seconds=seconds,
                ends=ends,
                latest=latest,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise MessageFormatError(f"Spark's report of a query's progress does not read: {error!r}") from error


class SinkState(Enum):
    """Where a sink's query is in its life."""

    #: Another replica of the app runs it; this one takes over when that one ends.
    STANDBY = "standby"
    #: Its query runs.
    RUNNING = "running"
    #: Its query failed and is started again when the wait is over.
    WAITING = "waiting"
    #: All was read that was asked for, or somebody stopped the query.
    ENDED = "ended"
    #: It failed and is not started again; the app stops.
    FAILED = "failed"
    #: The app stopped it.
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class SinkPartition:
    """One partition that a sink reads, at one moment.

    Attributes:
        topic: name of the topic.
        partition: number of the partition.
        position: next offset to read after the last committed batch.
        lag: offsets from there to the end of the log as the source last saw it, or None while it is not known.
        ledger: next offset to apply by the sink's own ledger, or None where the sink does not tell.
    """

    topic: str
    partition: int
    position: int
    lag: int | None
    ledger: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkStatistics:
    """A sink at one moment.

    Attributes:
        name: name of its query.
        state: where its query is in its life.
        batch_id: the last batch committed in this process, or None.
        batches: batches committed in this process.
        rows: rows in them.
        rows_per_s: rows that Spark processed in a second of the last batch.
        batch_seconds: seconds the last batch took from its trigger to its commit.
        lag: the sum over the partitions, or None while it is not known.
        restarts: how often the query was started again.
        retry_in: seconds until it is started again, while it waits.
        last_error: what ended the query last, in one line, or None.
        holder: which replica of the app runs it, by host and process, as far as the group has told.
        partitions: the partitions it has read.
    """

    name: str
    state: SinkState
    batch_id: int | None = None
    batches: int = 0
    rows: int = 0
    rows_per_s: float = 0.0
    batch_seconds: float = 0.0
    lag: int | None = None
    restarts: int = 0
    retry_in: float | None = None
    last_error: str | None = None
    holder: str | None = None
    partitions: tuple[SinkPartition, ...] = field(default=())

    def __str__(self) -> str:
        """Say it in a sentence."""
        if self.state is SinkState.STANDBY:
            return f"sink {self.name}: standby, {self.holder or 'a replica that is not known yet'} runs it"
        lag = "unknown" if self.lag is None else str(self.lag)
        text = f"sink {self.name}: {self.state.value}, lag {lag}"
        if self.batch_id is None:
            text += ", no batch committed yet"
        else:
            text += f", batch {self.batch_id} took {self.batch_seconds:.1f} s at {self.rows_per_s:.0f} rows/s"
        if self.restarts:
            text += f", restarted {self.restarts} time{'' if self.restarts == 1 else 's'}"
        if self.retry_in is not None:
            text += f", next start in {self.retry_in:.1f} s"
        if self.last_error is not None and self.state is not SinkState.RUNNING:
            text += f"; ended by {self.last_error}"
        return text


def _offsets(given: Any) -> Offsets:
    """Return offsets of Kafka's shape, as an object or as its text; none where it has another."""
    try:
        shaped = json.loads(given) if isinstance(given, str) else given
        return from_json(shaped or {})
    except (MessageFormatError, ValueError):
        return {}


def _number(given: Any) -> float:
    number = float(given or 0)
    return number if math.isfinite(number) else 0.0
