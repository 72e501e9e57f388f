"""Partitions that a query has read and that brokers do not show now: their positions are kept.

A topic may be missing from what brokers say for a moment, or because this client may not see it any more. Its position
is dropped for neither reason: forgotten, it would begin at 0 again when the topic is back. Its id tells whether it is
the same topic then.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from confluent_kafka import KafkaException

from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import PenstockError, SourceError
from penstock.spark_sink.source.brokers import Topics
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import Offsets, TopicPartition, place

_log = logging.getLogger("penstock.spark_sink")


@dataclass(slots=True)
class MissingPartitions:
    """Keeps the missing partitions of one query in one run. One thread uses it."""

    options: SourceOptions
    #: The ids of topics as they were first seen in this run.
    _ids: dict[str, str] = field(default_factory=dict)
    #: Partitions that were reported missing and are not back yet.
    _reported: set[TopicPartition] = field(default_factory=set)

    @property
    def reported_topics(self) -> frozenset[str]:
        """The topics that were reported missing and are not back."""
        return frozenset(topic for topic, _ in self._reported)

    def recreated(self, begun: Offsets, topics: Topics) -> Offsets:
        """Return the partitions to be read from 0 on, because their topic is another one under the same name.

        Raises `DataLossError` where that ends the query.
        """
        recreated: Offsets = {}
        for topic, now in sorted(topics.ids.items()):
            if self._ids.setdefault(topic, now) == now:
                continue
            for part in sorted(part for part in begun if part[0] == topic):
                self.options.report_loss(
                    f"{place(part)} was read up to offset {begun[part]}, but the topic was deleted and created again "
                    "since"
                )
                if part[1] < topics.counts[topic]:
                    recreated[part] = 0
            self._ids[topic] = now
        return recreated

    def retained(self, begun: Offsets, there: Offsets, topics: Topics) -> Offsets:
        """Return the partitions that cannot be seen and stay where they are.

        The query is at `begun`, and sees those of `there`. Raises as `report`, also for those that are only hidden,
        unless `failOnDataLoss` is false.
        """
        missing = begun.keys() - there.keys()
        for part in sorted(self._reported - missing):
            _log.warning("%s is back; the query goes on at offset %d", place(part), begun.get(part, 0))
        self._reported &= missing
        kept = {part: begun[part] for part in missing if self.options.selection.covers(part[0])}
        for part in sorted(missing - self._reported):
            self.report(part, f"{place(part)} was read up to offset {begun[part]}", topics)
        self._reported |= kept.keys()
        return kept

    def report(self, part: TopicPartition, read: str, topics: Topics, *, must_come: bool = False) -> None:
        """Report a partition that cannot be seen: raise, or log where `failOnDataLoss` is false.

        `read` says up to where it was read, or was to be, as the beginning of a sentence. One that is only hidden, or
        may not be read, ends the query in any case where it `must_come`. Raises `MissingRightError`, `DataLossError`
        or `SourceError`.
        """
        error = topics.refused.get(part[0])
        if not self.options.selection.covers(part[0]):
            self.options.report_loss(f"{read} and is read no more, as this query has {self.options.selection}")
        elif error is None or topics.is_unknown(part[0]):
            self.options.report_loss(f"{read} and exists no more")
        elif must_come or self.options.fail_on_data_loss:
            raise self._hidden(part, read, error)
        else:
            _log.warning("%s. The others go on, as failOnDataLoss=false says", self._hidden(part, read, error))

    def _hidden(self, part: TopicPartition, read: str, error: KafkaException) -> PenstockError:
        if is_missing_right(error):
            rights = [topic_right(Operation.READ, part[0])]
            return MissingRightError(f"{read} and cannot be read now", rights, principal_of(self.options.client))
        return SourceError(
            f"{read} and cannot be seen now: {reason(error)}; check its brokers, then start the query again: it "
            "goes on there"
        )
