"""What a running query waits for: topics that are gone, and transactions that are open.

The query's position in a topic that was deleted is kept: forgotten, it would begin at 0 again when the topic is back.
Its id tells whether it is the same topic then.

Under read_committed a log ends where the oldest open transaction begins. From outside such a query looks idle while
messages pile up behind it, so the driver logs it. The client library cannot ask brokers whose transaction it is;
Kafka's own tool can.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import SourceError
from penstock.spark_sink.source.brokers import View
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import Log, Offsets, TopicPartition, place

#: Seconds a log's end stands still before that is logged, and between two such lines of a query.
STALLED_S = 10.0
REPEAT_S = 60.0

_log = logging.getLogger("penstock.spark_sink")


class GoneTopics:
    """Knows the topics of one query in one run, and which of them are gone. One thread uses it."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        #: The ids of topics as they were last seen in this run.
        self._ids: dict[str, str] = {}
        #: The topics of which something was reported gone and is not back.
        self.reported: set[str] = set()

    def fixed(self, begun: Offsets, view: View) -> Offsets:
        """Return where the query stays in partitions that have no log, and 0 for those of a topic that is another now.

        A topic under the same name with another id is read from its beginning. Each loss is reported once, and raises
        as `report_gone` where it ends the query.
        """
        fixed: Offsets = {}
        gone: set[str] = set()
        for part, offset in sorted(begun.items()):
            topic, read = part[0], f"{place(part)} was read up to offset {offset}"
            now = view.ids.get(topic)
            is_another = now is not None and self._ids.get(topic, now) != now
            if is_another:
                self._options.report_loss(f"{read}, but the topic was deleted and created again since")
            if part not in view.logs:
                gone.add(topic)
                if topic not in self.reported:
                    report_gone(self._options, part, read, view)
            if is_another or (part not in view.logs and self._options.selection.covers(topic)):
                fixed[part] = 0 if is_another else offset
        self._ids |= view.ids
        self.reported = gone
        return fixed


def report_gone(options: SourceOptions, part: TopicPartition, read: str, view: View) -> None:
    """Report a partition that cannot be seen; `read` begins the sentence.

    Raises `MissingRightError` or `SourceError` where it is only hidden, and `DataLossError` where it is gone, unless
    `failOnDataLoss` is false.
    """
    error = view.refused.get(part[0])
    if not options.selection.covers(part[0]):
        what = f"{read} and is read no more, as this query has {options.selection.said}"
        options.report_loss(what, "give the query a checkpointLocation of its own")
    elif error is None or view.is_unknown(part[0]):
        options.report_loss(f"{read} and exists no more")
    elif is_missing_right(error):
        rights = [topic_right(Operation.READ, part[0])]
        raise MissingRightError(f"{read} and cannot be read now", rights, principal_of(options.client))
    else:
        raise SourceError(
            f"{read} and cannot be seen now: {reason(error)}; check its brokers, then start the query again: it goes "
            "on there"
        )


class StalledLogs:
    """Watches where logs may be read to. One thread uses it; the clock counts monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: The end of each log, and since when it has been there.
        self._ends: dict[TopicPartition, tuple[int, float]] = {}
        self._quiet_until = float("-inf")

    def watch(self, logs: Mapping[TopicPartition, Log]) -> None:
        """Note where logs end; log it where an end does not move though something stands behind it."""
        now = self._clock()
        for part, log in logs.items():
            if part not in self._ends or self._ends[part][0] != log.end:
                self._ends[part] = log.end, now
        stalled = {part: log for part, log in logs.items() if now >= self._ends[part][1] + STALLED_S}
        if now >= self._quiet_until and warn_of_open_transactions(stalled):
            self._quiet_until = now + REPEAT_S


def warn_of_open_transactions(logs: Mapping[TopicPartition, Log]) -> bool:
    """Log in which partitions something was written past the end that may be read; tell whether it was in any."""
    waiting = sorted(part for part, log in logs.items() if log.written > log.end)
    if not waiting:
        return False
    topic, partition = first = waiting[0]
    _log.warning(
        "%s waits at offset %d: a transaction is open there; %d offsets wait behind it until its producer commits or "
        "aborts, or the broker ends it (transaction.timeout.ms)%s. To find the producer, and since when it is open: "
        "kafka-transactions.sh describe-producers --topic %s --partition %d",
        place(first),
        logs[first].end,
        logs[first].written - logs[first].end,
        f"; so do {len(waiting) - 1} other partitions" if len(waiting) > 1 else "",
        topic,
        partition,
    )
    return True
