"""A sink of an app at one moment, as values: its state, rows, lag and partitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


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
        ledger: next offset to apply by the sink's own ledger, or None where no batch of it was stored in this process.
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
        holder: which replica of the app runs it, by host and process, as far as the group has said.
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
