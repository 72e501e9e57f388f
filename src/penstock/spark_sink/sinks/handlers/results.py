"""What a task publishes, as rows of `PUBLISHED`: results and dead letters, each with the position of its message.

One more row for each source partition says how far the task has come there: the ledger moves over messages that
publish nothing too. The task's report is in a last row, so that one job is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.consumer.assignments import Assignment, ConsumerLane, Item
from penstock.consumer.handlers.results import Result
from penstock.consumer.publishing.outlet import Delivered, Outlet
from penstock.consumer.publishing.result_publisher import ResultTaker, Tries
from penstock.errors import SinkError
from penstock.message import Record
from penstock.spark_sink.sinks.handlers.report import TaskReport, to_json
from penstock.spark_sink.sinks.kafka_publication import MARK, PUBLISHED
from penstock.spark_sink.sinks.position import STEP_BYTES, STEP_ROWS
from penstock.spark_sink.source.plan import Offsets


class ResultRows(ResultTaker, Outlet):
    """Takes what handlers return, and dead letters; then their messages are done. Thread-safe.

    `publishes` says whether the sink may publish anything, `whole` whether the batch is one transaction.
    """

    def __init__(self, *, publishes: bool, whole: bool) -> None:
        self.publishes = publishes
        self._whole = whole
        # Guards the fields below: holders of lanes add, the task's thread takes.
        self._lock = threading.Lock()
        self._rows: list[tuple[Any, ...]] = []
        self._size = 0
        #: Messages that were submitted with their results, and those results.
        self.handled = 0
        self.published = 0
        # Called for the dead letters that were taken since the last `poll`. The task's thread's.
        self._delivered: list[Delivered] = []

    def submit(
        self,
        lane: ConsumerLane,  # noqa: ARG002 - as the consumer's
        items: Sequence[Item],
        results: Sequence[Result],
        tries: Sequence[Tries] | None = None,  # noqa: ARG002 - the same
    ) -> None:
        """Take what handlers returned for messages, which are done then.

        Raises `SinkError` where the sink publishes nothing, and for results of several messages together where a batch
        is not one transaction: of their source partitions one may be published and another not.
        """
        name = items[0][0].assignment.route.handler.name
        if not self.publishes:
            raise SinkError(
                f"{name} returned messages, and this HandlerSink has no name under which it could remember what it "
                "has published; give it name=... (and bootstrap_servers), or return None"
            )
        if len(items) > 1 and not self._whole:
            raise SinkError(
                f"{name} returned messages for its batch as a whole, which the ledger cannot publish once: return a "
                "list with what is for each message, as [[...], None, ...], or make the sink with atomic_batches=True"
            )
        self._add(items[-1][2], results)
        with self._lock:
            self.handled += len(items)
            self.published += len(results)
        for fetch, index, _ in items:
            fetch.assignment.tracker.complete(fetch.block, (index,))

    def has_any_of(self, assignments: Sequence[Assignment]) -> bool:  # noqa: ARG002 - as the consumer's
        """Tell that nothing is on its way: what was submitted is done."""
        return False

    def forward(self, item: Item, to: Result, complete: Callable[[], None], delivered: Delivered) -> None:
        """Take a dead letter."""
        self._add(item[2], [to])
        complete()
        self._delivered.append(delivered)

    def poll(self) -> None:
        """Report the dead letters that were taken as written."""
        taken, self._delivered = self._delivered, []
        for delivered in taken:
            delivered(None)

    def flush(self, timeout: float) -> None:  # noqa: ARG002 - as an outlet's
        """Do as `poll`."""
        self.poll()

    def _add(self, record: Record, results: Sequence[Result]) -> None:
        position = (record.topic(), record.partition(), record.offset())
        rows = [
            (*position, place, result.topic, result.partition, result.key, result.value, _as_bytes(result.headers))
            for place, result in enumerate(results)
        ]
        with self._lock:
            self._rows += rows
            self._size += sum(len(result.key or b"") + len(result.value or b"") for result in results)

    def full(self) -> Iterator[pa.RecordBatch]:
        """Return what was taken as columns, where it is enough for that."""
        if len(self._rows) >= STEP_ROWS or self._size >= STEP_BYTES:
            yield self._take()

    def end(self, last: Offsets, report: TaskReport) -> Iterator[pa.RecordBatch]:
        """Return the rest, the last offset of each of the task's source partitions, and its report. Called once, last.

        Whatever the task's messages have published stands at or below these offsets.
        """
        self._rows += [(*part, offset, MARK, None, None, None, None, None) for part, offset in last.items()]
        self._rows.append((None, None, None, MARK, None, None, None, to_json(report), None))
        yield self._take()

    def _take(self) -> pa.RecordBatch:
        with self._lock:
            rows, self._rows, self._size = self._rows, [], 0
        cells = zip(*rows, strict=True)
        return pa.record_batch(
            [pa.array(column, kind) for column, kind in zip(cells, PUBLISHED.types, strict=True)], schema=PUBLISHED
        )


def _as_bytes(headers: Sequence[tuple[str, str | bytes | None]]) -> list[tuple[str, bytes | None]]:
    return [(name, value.encode() if isinstance(value, str) else value) for name, value in headers]
