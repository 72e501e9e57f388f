"""Names the transaction that a partition waits for: under read_committed a log ends where the oldest open one begins.

From outside such a query looks idle while messages pile up behind it. So where the readable end of a log stands
still, the driver looks whether anything was written past it, and says so. The producer's name is not to be had: the
client library cannot ask brokers for their open transactions, but Kafka's own tool can.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from confluent_kafka import KafkaException

from penstock.errors import PenstockError
from penstock.spark_sink.planning import Offsets, TopicPartition

#: Seconds a log's end stands still before anything is asked, and between two looks at it.
PATIENCE_S = 10.0
AGAIN_S = 60.0

_log = logging.getLogger("penstock.spark_sink")


class Logs(Protocol):
    """What is asked of `LogView`."""

    def written(self, partitions: Iterable[TopicPartition]) -> Offsets:
        """Return the offset after the last record written."""

    def timestamp_ms(self, part: TopicPartition, offset: int) -> int | None:
        """Return the timestamp of a record."""


@dataclass(slots=True)
class _Standing:
    offset: int
    look_at: float


class OpenTransactions:
    """Watches where logs may be read to. One thread uses it.

    Args:
        logs: where to ask.
        clock: monotonic seconds.
    """

    def __init__(self, logs: Logs, clock: Callable[[], float] = time.monotonic) -> None:
        self._logs = logs
        self._clock = clock
        self._standing: dict[TopicPartition, _Standing] = {}

    def watch(self, stable: Offsets, at_once: Collection[TopicPartition] = ()) -> None:
        """Take note of the last stable offsets; of those that stand still, what stands behind them is told.

        A log that is merely idle costs a question a minute. `at_once` are those known to wait: they need no patience.
        """
        now = self._clock()
        due: Offsets = {}
        for part, offset in stable.items():
            seen = self._standing.get(part)
            if seen is None or seen.offset != offset:
                self._standing[part] = seen = _Standing(offset, now + (0 if part in at_once else PATIENCE_S))
            if now >= seen.look_at:
                due[part] = offset
                seen.look_at = now + AGAIN_S
        self.tell(due)

    def tell(self, stable: Offsets) -> None:
        """Name in the log those partitions in which something was written past the last stable offset."""
        if not stable:
            return
        try:
            written = self._logs.written(stable)
            for part, offset in sorted(stable.items()):
                if written[part] > offset:
                    self._tell_one(part, offset, written[part] - offset)
        except (PenstockError, KafkaException):
            # It only explains a wait: the query itself asks brokers next, and tells what is wrong with them.
            _log.debug("what lies behind the last stable offsets could not be asked", exc_info=True)

    def _tell_one(self, part: TopicPartition, offset: int, behind: int) -> None:
        born_ms = self._logs.timestamp_ms(part, offset)
        since = "" if born_ms is None else f", whose first message is of {_utc(born_ms)}"
        _log.warning(
            "%s[%d] waits at offset %d: a transaction is open there%s; %d offsets wait behind it until its producer "
            "commits or aborts, or the broker ends it (transaction.timeout.ms). To find the producer: "
            "kafka-transactions.sh describe-producers --topic %s --partition %d",
            part[0],
            part[1],
            offset,
            since,
            behind,
            part[0],
            part[1],
        )


def _utc(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


__all__ = ["AGAIN_S", "PATIENCE_S", "OpenTransactions"]
