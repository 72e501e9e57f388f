"""Runs Kafka transactions on a producer that can be left behind: nothing of the client library is without a bound.

The library ignores the time-out of `send_offsets_to_transaction` while the group's coordinator is away
(librdkafka#5456). So each call is made on a `Disposable`; one that does not answer in time is left behind with its
producer, and the next producer fences it by their transactional id.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import KafkaError, TopicPartition

from penstock.clients.bounded_calls import Disposable, LeftBehind, NotAnsweredError
from penstock.clients.cluster import Cluster
from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.clients.transactional.errors import GivenUpError, NotOpenedError
from penstock.clients.transactional.faults import is_forbidden
from penstock.clients.transactional.writer import TransactionalWriter
from penstock.consumer.publishing.result_publisher import Unpublished
from penstock.consumer.publishing.transaction import Transaction

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: Seconds for all results of a transaction to be stored.
_DELIVERY_S = 5.0
#: Seconds after which a transaction is left behind: its calls have limits of their own, that the library may ignore.
_LIMIT_S = 12.0
#: Seconds of one try to initialise a producer, and of all of them.
_OPEN_S = 10.0


class TransactionRunner:
    """For one thread. What is raised says that a transaction failed; then `discard` is to be called.

    Args:
        name: of the threads that make the calls.
    """

    def __init__(
        self, name: str, group: str, transactional_id: str, cluster: Cluster, config: Mapping[str, Any]
    ) -> None:
        self._name = name
        self._group = group
        self._cluster = cluster
        self._make_writer = partial(cluster.transactional_writer, transactional_id, config)
        self._left = LeftBehind(name)
        self._calls: Disposable | None = None
        self._writer: TransactionalWriter | None = None
        # Whether each message that it writes is a batch.
        self._apart = False

    def require_open(self, *, apart: bool) -> None:
        """Open a producer where none is. What a predecessor left open has ended when this returns."""
        if self._writer is None:
            self._apart = apart
            self._writer = self._call("opening a transactional producer", partial(self._open, apart))

    def _open(self, apart: bool) -> TransactionalWriter:
        writer = self._make_writer(apart=apart)
        writer.open(_OPEN_S, _OPEN_S)
        return writer

    def committed(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return the group's committed offsets with their metadata."""
        return self._call(
            "asking for the group's offsets", partial(self._cluster.stable_offsets, self._group, partitions)
        )

    def run(self, transaction: Transaction, group_metadata: Any) -> None:
        """Write, add the positions as of the group's generation, commit.

        `GivenUpError`: it did not get as far as its end in time, and never will. `NotAnsweredError`: nobody knows.
        """
        writer = self._writer
        try:
            self._call("a transaction", partial(self._run, transaction, group_metadata))
        except NotAnsweredError as error:
            if writer is None or not writer.give_up():
                raise
            raise GivenUpError(f"{error} in {writer.doing}") from error

    def _run(self, transaction: Transaction, group_metadata: Any) -> None:
        writer = self._writer
        if writer is None:
            raise NotOpenedError("the producer was given up")
        writer.begin()
        # Where messages are in batches nobody knows which of them is refused, so one call is enough, and faster.
        parts = [("", transaction.inside)]
        if self._apart:
            parts = [(str(number), [unpublished]) for number, unpublished in enumerate(transaction.inside)]
        for name, part in parts:
            written = (
                (to.topic, None if to.partition < 0 else to.partition, to.key, to.value, to.headers)
                for unpublished in part
                for to in unpublished.results
            )
            writer.produce(name, written, room_s=_DELIVERY_S)
        if not writer.deliver(_DELIVERY_S):
            raise BufferError(writer.blame.cause)
        positions = [
            TopicPartition(assignment.topic, assignment.partition, point.offset, metadata=point.metadata)
            for assignment, point in transaction.positions.items()
        ]
        writer.send_positions(positions, group_metadata)
        writer.commit()

    def refused(self, transaction: Transaction) -> tuple[dict[Unpublished, tuple[str, KafkaError]], bool]:
        """Return what the broker refused of a transaction that failed, each with a topic and the broker's error.

        And whether it refused something, nobody knows exactly what, save where each message is a batch (`apart`).
        """
        writer = self._writer
        if writer is None:
            return {}, False
        blame = writer.blame
        errors = {topic: _not_let_in(why) for topic, why in writer.not_let_in().items()}
        errors.update((topic, blame.errors[topic]) for topic in blame.topics)
        refused: dict[Unpublished, tuple[str, KafkaError]] = {}
        for number, unpublished in enumerate(transaction.inside):
            if (of_message := blame.messages.get(str(number))) is not None:
                refused[unpublished] = of_message[0], blame.errors[str(number)]
            elif (topic := next((r.topic for r in unpublished.results if r.topic in errors), None)) is not None:
                refused[unpublished] = topic, errors[topic]
        return refused, bool(blame.messages)

    def discard(self, *, abort: bool) -> None:
        """Give the producer up after a failure, with an abort where the end of its transaction is not in doubt."""
        writer, self._writer = self._writer, None
        if writer is not None and self._calls is not None:
            self._calls.start("closing", partial(_end, writer, abort=abort))

    def close(self) -> None:
        """Give the producer up, and the thread that makes the calls."""
        writer, self._writer = self._writer, None
        if self._calls is not None:
            if writer is not None:
                self._calls.start("closing", writer.close)
            self._calls.close()

    def _call(self, label: str, function: Callable[[], T]) -> T:
        if self._calls is None:
            self._left.require_few()
            self._calls = self._cluster.disposable(f"{self._name}-calls", self._left)
        writer = self._writer
        try:
            return self._calls.run(
                label,
                function,
                _LIMIT_S,
                lambda: None if writer is None else writer.close(),
                lambda: writer is not None and writer.is_stuck,
            )
        except NotAnsweredError:
            self._calls = self._writer = None
            raise


def _not_let_in(why: str) -> KafkaError:
    """Return the error of a topic that was not let into a transaction, which only the client's log tells."""
    if is_forbidden(why):
        return KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    return KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, why)


def _end(writer: TransactionalWriter, *, abort: bool) -> None:
    """Abort what a writer has open, so that it holds no readers back, and discard it. On its own thread."""
    try:
        if abort:
            writer.abort()
    except UnknownEndError as error:
        _log.info("%s; its successor ends it", error)
    finally:
        writer.close()
