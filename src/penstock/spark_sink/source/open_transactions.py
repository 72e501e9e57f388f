"""Names the transaction that a partition waits for: under read_committed a log ends where the oldest open one begins.

From outside such a query looks idle while messages pile up behind it. So where the readable end of a log does not move,
the driver asks whether anything was written past it, and logs that. The client library cannot ask brokers whose
transaction it is; Kafka's own tool can.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from confluent_kafka import KafkaException

from penstock.errors import PenstockError
from penstock.spark_sink.source.brokers import OffsetReader
from penstock.spark_sink.source.plan import Offsets, TopicPartition, place

#: Seconds a log's end stands still before anything is asked, and between two looks at it.
STALLED_S = 10.0
REPEAT_S = 60.0
#: Partitions that a warning names at most.
_NAMED = 5

_log = logging.getLogger("penstock.spark_sink")


class OpenTransactions:
    """Watches where logs may be read to. One thread uses it; the clock counts monotonic seconds."""

    def __init__(self, reader: OffsetReader, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader = reader
        self._clock = clock
        #: The end of each log, and when to ask about it if it has not moved by then.
        self._watched: dict[TopicPartition, tuple[int, float]] = {}
        self._quiet_until = float("-inf")

    def watch(self, stable: Offsets) -> None:
        """Note the last stable offsets; where one does not move and something stands behind it, that is logged.

        A log that is merely idle costs a question a minute, and a query one warning a minute.
        """
        now = self._clock()
        for part, offset in stable.items():
            if part not in self._watched or self._watched[part][0] != offset:
                self._watched[part] = offset, now + STALLED_S
        due = {part: offset for part, offset in stable.items() if now >= self._watched[part][1]}
        if not due or now < self._quiet_until:
            return
        self._watched |= {part: (offset, now + REPEAT_S) for part, offset in due.items()}
        if self.warn(due):
            self._quiet_until = now + REPEAT_S

    def warn(self, stable: Offsets) -> bool:
        """Log in which partitions something was written past the last stable offset; tell whether it was in any."""
        try:
            written = self._reader.written(stable)
            waiting = sorted(part for part, offset in stable.items() if written[part] > offset)
            times_ms = self._reader.timestamps_ms({part: stable[part] for part in waiting[:_NAMED]}) if waiting else {}
        except (PenstockError, KafkaException):
            # This only explains a wait: the query itself asks brokers next, and reports what is wrong with them.
            _log.debug("what lies behind the last stable offsets could not be asked", exc_info=True)
            return False
        if not waiting:
            return False
        topic, partition = first = waiting[0]
        others = [f"{place(part)} at offset {stable[part]}" for part in waiting[1:_NAMED]]
        more = f" and {len(waiting) - _NAMED} more" if len(waiting) > _NAMED else ""
        _log.warning(
            "%s waits at offset %d: a transaction is open there%s; %d offsets wait behind it until its producer "
            "commits or aborts, or the broker ends it (transaction.timeout.ms)%s. To find the producer: "
            "kafka-transactions.sh describe-producers --topic %s --partition %d",
            place(first),
            stable[first],
            f", whose first message is of {_utc(times_ms[first])}" if first in times_ms else "",
            written[first] - stable[first],
            f"; so do {', '.join(others)}{more}" if others else "",
            topic,
            partition,
        )
        return True


def _utc(milliseconds: int) -> str:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # a producer may claim any time
        return f"{milliseconds} ms after 1970"
