"""What a running query waits for: topics that are not to be seen now, and transactions that are open.

A topic may be missing from what brokers say for a moment, or because this client may not see it any more. The query's
position in it is dropped for neither reason: forgotten, it would begin at 0 again when the topic is back. Its id tells
whether it is the same topic then.

Under read_committed a log ends where the oldest open transaction begins. From outside such a query looks idle while
messages pile up behind it, so the driver logs it. The client library cannot ask brokers whose transaction it is;
Kafka's own tool can.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import PenstockError, SourceError
from penstock.spark_sink.source.brokers import Topics
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import Log, Offsets, TopicPartition, place

#: Seconds a log's end stands still before that is logged, and between two such lines of a query.
STALLED_S = 10.0
REPEAT_S = 60.0
#: Partitions that a warning names at most.
_NAMED = 5

_log = logging.getLogger("penstock.spark_sink")


@dataclass(slots=True)
class MissingTopics:
    """Keeps the missing partitions of one query in one run. One thread uses it."""

    options: SourceOptions
    #: The ids of topics as they were first seen in this run.
    _ids: dict[str, str] = field(default_factory=dict)
    #: Partitions that were reported missing and are not back yet.
    _reported: set[TopicPartition] = field(default_factory=set)

    @property
    def reported(self) -> frozenset[str]:
        """The topics that were reported missing and are not back."""
        return frozenset(topic for topic, _ in self._reported)

    def recreated(self, begun: Offsets, topics: Topics) -> Offsets:
        """Return the partitions to be read from 0 on, because their topic is another one under the same name.

        Raises `DataLossError` where that ends the query.
        """
        recreated: Offsets = {}
        for topic, now in sorted(topics.ids.items()):
            if self._ids.setdefault(topic, now) != now:
                for part in sorted(part for part in begun if part[0] == topic):
                    self.options.report_loss(
                        f"{place(part)} was read up to offset {begun[part]}, but the topic was deleted and created "
                        "again since"
                    )
                    if part[1] < topics.counts[topic]:
                        recreated[part] = 0
                self._ids[topic] = now
        return recreated

    def retained(self, missing: Offsets, topics: Topics) -> Offsets:
        """Return those of the partitions that cannot be seen in which the query stays where it is.

        Each is reported once. Raises as `report`, also for those that are only hidden, unless `failOnDataLoss` is
        false.
        """
        for topic, partition in sorted(self._reported - missing.keys()):
            _log.warning("%s[%d] is back; the query goes on where it was", topic, partition)
        kept = {part: offset for part, offset in missing.items() if self.options.selection.covers(part[0])}
        for part in sorted(missing.keys() - self._reported):
            self.report(part, f"{place(part)} was read up to offset {missing[part]}", topics)
        self._reported = set(kept)
        return kept

    def report(self, part: TopicPartition, read: str, topics: Topics, *, must_come: bool = False) -> None:
        """Report a partition that cannot be seen: raise, or log where `failOnDataLoss` is false.

        `read` says up to where it was read, or was to be, as the beginning of a sentence. One that is only hidden, or
        may not be read, ends the query in any case where it `must_come`. Raises `MissingRightError`, `DataLossError`
        or `SourceError`.
        """
        error = topics.refused.get(part[0])
        if not self.options.selection.covers(part[0]):
            self.options.report_loss(f"{read} and is read no more, as this query has {self.options.selection.said}")
            return
        if error is None or topics.is_unknown(part[0]):
            self.options.report_loss(f"{read} and exists no more")
            return
        hidden: PenstockError = SourceError(
            f"{read} and cannot be seen now: {reason(error)}; check its brokers, then start the query again: it "
            "goes on there"
        )
        if is_missing_right(error):
            rights = [topic_right(Operation.READ, part[0])]
            hidden = MissingRightError(f"{read} and cannot be read now", rights, principal_of(self.options.client))
        if must_come or self.options.fail_on_data_loss:
            raise hidden
        _log.warning("%s. The others go on, as failOnDataLoss=false says", hidden)


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
    others = [f"{place(part)} at offset {logs[part].end}" for part in waiting[1:_NAMED]]
    more = f" and {len(waiting) - _NAMED} more" if len(waiting) > _NAMED else ""
    _log.warning(
        "%s waits at offset %d: a transaction is open there; %d offsets wait behind it until its producer commits or "
        "aborts, or the broker ends it (transaction.timeout.ms)%s. To find the producer, and since when it is open: "
        "kafka-transactions.sh describe-producers --topic %s --partition %d",
        place(first),
        logs[first].end,
        logs[first].written - logs[first].end,
        f"; so do {', '.join(others)}{more}" if others else "",
        topic,
        partition,
    )
    return True
