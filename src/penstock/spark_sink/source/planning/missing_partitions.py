"""Partitions that a query has read and that brokers do not show now: their positions are kept.

A topic may be missing from what brokers say for a moment, or because this client may not see it any more. Its position
is dropped for neither reason: forgotten, it would begin at 0 again when the topic is back. Whether it is the same topic
then, its id tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import PenstockError, SourceError
from penstock.spark_sink.source.offsets.planning import Offsets, TopicPartition
from penstock.spark_sink.source.options.options import SourceOptions
from penstock.spark_sink.source.planning.offset_reader import Topics

_log = logging.getLogger("penstock.spark_sink")


class MissingPartitions:
    """Keeps the missing partitions of one query in one run. One thread uses it.

    `report_loss` raises `SourceError`, or logs where `failOnDataLoss` is false.
    """

    def __init__(self, options: SourceOptions, report_loss: Callable[[str], None]) -> None:
        self._options = options
        self._report_loss = report_loss
        #: The topics as they were first seen in this run.
        self._ids: dict[str, str] = {}
        #: Partitions that were reported missing and are not back yet.
        self._reported: set[TopicPartition] = set()

    @property
    def reported_topics(self) -> frozenset[str]:
        """The topics that were reported missing and are not back."""
        return frozenset(topic for topic, _ in self._reported)

    def recreated(self, begun: Offsets, topics: Topics) -> Offsets:
        """Return the partitions to be read from 0 on, because their topic is another one under the same name.

        Raises `SourceError` where that ends the query.
        """
        anew: Offsets = {}
        for topic, now in sorted(topics.ids.items()):
            if self._ids.setdefault(topic, now) == now:
                continue
            of_it = sorted(part for part in begun if part[0] == topic)
            for part in of_it:
                self._report_loss(
                    f"{place(part)} was read up to offset {begun[part]}, but the topic was deleted and made anew since"
                )
            self._ids[topic] = now
            anew |= {part: 0 for part in of_it if part[1] < topics.counts[topic]}
        return anew

    def retained(self, begun: Offsets, there: Offsets, topics: Topics) -> Offsets:
        """Return the partitions that are not to be seen and stay where they are.

        The query is at `begun`, and sees those of `there`. Where missing ones end it, this raises `MissingRightError`
        for those that this client may not read any more, and `SourceError` for others.
        """
        missing = begun.keys() - there.keys()
        for part in sorted(self._reported - missing):
            _log.warning("%s is back; the query goes on at offset %d", place(part), begun.get(part, 0))
        self._reported &= missing
        kept: Offsets = {}
        for part in sorted(missing):
            read = f"{place(part)} was read up to offset {begun[part]}"
            if not self._options.selection.covers(part[0]):
                self._report_loss(f"{read} and is read no more, as this query has {self._options.selection}")
                continue
            kept[part] = begun[part]
            if part in self._reported:
                continue
            error = self.error_of(part, read, topics)
            if error is None:
                self._report_loss(f"{read} and exists no more")
            elif self._options.fail_on_data_loss:
                raise error
            else:
                _log.warning("%s. The others go on, as failOnDataLoss=false says", error)
            self._reported.add(part)
        return kept

    def error_of(self, part: TopicPartition, read: str, topics: Topics) -> PenstockError | None:
        """Return the error of a partition that cannot be seen, or read, though it may be there; None where it is gone.

        `read` says up to where it was read, or was to be, as the beginning of a sentence.
        """
        error = topics.refused.get(part[0])
        if error is None or topics.is_unknown(part[0]):
            return None
        if is_missing_right(error):
            return MissingRightError(
                f"{read} and cannot be read now",
                [topic_right(Operation.READ, part[0])],
                principal_of(self._options.client),
            )
        return SourceError(
            f"{read} and cannot be seen now: {reason(error)}; see to its brokers, then start the query again: it "
            "goes on there"
        )


def place(part: TopicPartition) -> str:
    """Return a partition as texts show it."""
    return f"{part[0]}[{part[1]}]"
