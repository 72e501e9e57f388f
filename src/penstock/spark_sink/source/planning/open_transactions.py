"""Names the transaction that a partition waits for: under read_committed a log ends where the oldest open one begins.

From outside such a query looks idle while messages pile up behind it. So where the readable end of a log stands
still, the driver looks whether anything was written past it, and says so. The producer's name is not to be had: the
client library cannot ask brokers for their open transactions, but Kafka's own tool can.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from confluent_kafka import KafkaException

from penstock.errors import PenstockError
from penstock.spark_sink.source.offsets.planning import Offsets, TopicPartition

#: Seconds a log's end stands still before anything is asked, and between two looks at it.
STALLED_S = 10.0
REPEAT_S = 60.0
#: Partitions that a line names at most.
_NAMED = 5

_log = logging.getLogger("penstock.spark_sink")


class OffsetQueries(Protocol):
    """What is asked of `OffsetReader`."""

    def written(self, partitions: Iterable[TopicPartition]) -> Offsets:
        """Return the offset after the last record written."""

    def timestamps_ms(self, offsets: Offsets) -> dict[TopicPartition, int]:
        """Return the timestamps of the records at these offsets, of those that come within a bounded time."""


@dataclass(slots=True)
class _Watched:
    offset: int
    look_at: float


class OpenTransactions:
    """Watches where logs may be read to. One thread uses it; the clock counts monotonic seconds."""

    def __init__(self, queries: OffsetQueries, clock: Callable[[], float] = time.monotonic) -> None:
        self._queries = queries
        self._clock = clock
        self._watched: dict[TopicPartition, _Watched] = {}
        self._quiet_until = float("-inf")

    def watch(self, stable: Offsets, at_once: Collection[TopicPartition] = ()) -> None:
        """Take note of the last stable offsets; of those that stand still, what stands behind them is logged.

        A log that is merely idle costs a question a minute, and a query one line a minute. `at_once` are those known to
        wait: they are looked up at once.
        """
        now = self._clock()
        for part, offset in stable.items():
            seen = self._watched.get(part)
            if seen is None or seen.offset != offset:
                self._watched[part] = _Watched(offset, now + (0 if part in at_once else STALLED_S))
        due = {part: offset for part, offset in stable.items() if now >= self._watched[part].look_at}
        if not due or now < self._quiet_until:
            return
        for part in due:
            self._watched[part].look_at = now + REPEAT_S
        if self.warn(due):
            self._quiet_until = now + REPEAT_S

    def warn(self, stable: Offsets) -> bool:
        """Log in which partitions something was written past the last stable offset, and tell whether it was in any."""
        if not stable:
            return False
        try:
            written = self._queries.written(stable)
            waiting = sorted(part for part, offset in stable.items() if written[part] > offset)
            if not waiting:
                return False
            born_ms = self._queries.timestamps_ms({part: stable[part] for part in waiting[:_NAMED]})
        except (PenstockError, KafkaException):
            # It only explains a wait: the query itself asks brokers next, and tells what is wrong with them.
            _log.debug("what lies behind the last stable offsets could not be asked", exc_info=True)
            return False
        first = waiting[0]
        _log.warning(
            "%s[%d] waits at offset %d: a transaction is open there%s; %d offsets wait behind it until its producer "
            "commits or aborts, or the broker ends it (transaction.timeout.ms)%s. To find the producer: "
            "kafka-transactions.sh describe-producers --topic %s --partition %d",
            first[0],
            first[1],
            stable[first],
            f", whose first message is of {_utc(born_ms[first])}" if first in born_ms else "",
            written[first] - stable[first],
            _others(waiting[1:], stable, born_ms),
            first[0],
            first[1],
        )
        return True


def _others(waiting: list[TopicPartition], stable: Offsets, born_ms: Mapping[TopicPartition, int]) -> str:
    """Return the partitions that wait beside the first: a few by name, the rest by number."""
    if not waiting:
        return ""
    named = [
        f"{part[0]}[{part[1]}] at offset {stable[part]}" + (f" since {_utc(born_ms[part])}" if part in born_ms else "")
        for part in waiting[: _NAMED - 1]
    ]
    more = len(waiting) - len(named)
    return f"; so do {', '.join(named)}" + (f" and {more} more" if more else "")


def _utc(milliseconds: int) -> str:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # a producer may claim any time
        return f"{milliseconds} ms after 1970"
