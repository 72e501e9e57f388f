"""Fencing: the end of Kafka transactions that a dead coordinator left open in a partition.

A coordinator commits its transactional ids with each half position. A new owner that finds positions held back by an
open transaction ends it under the id of its owner, rather than waiting until it times out: initialising a producer of
that id ends what is open and fences the former one. Where that one was alive after all, it loses one Kafka transaction,
learns from the done log what became of it, and goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from confluent_kafka import KafkaException, TopicPartition

from penstock import clients
from penstock.clients.bounded_calls import BackgroundCall, NotAnsweredError
from penstock.clients.kafka_errors import reason
from penstock.clients.transactional.writer import TRANSACTION_S, initialise
from penstock.transactions.core.commit_batch import CommitBatch
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.wire.topics import StoreTopics

_log = logging.getLogger("penstock.transactions")

#: Seconds for the call that ends a transaction, and for all that it takes.
_INIT_TIMEOUT_S = 6.0
_FENCING_BUDGET_S = 8.0
#: Names in one claim: more are not written by any version.
_NAMES = 8


@dataclass(frozen=True, slots=True)
class Names:
    """What the transactional ids of one coordinator begin with.

    Producers with common ones publish for all, one after the other; the others try what failed before, apart.
    """

    common: list[str]
    apart: list[str]

    @property
    def all(self) -> list[str]:
        """All of them."""
        return self.common + self.apart


def transactional_names(topics: StoreTopics, name: str) -> Names:
    """Return the names of the transactional producers of one coordinator."""
    begin = f"{topics.coordinators}.{name}"
    return Names([f"{begin}.{letter}" for letter in "abc"], [f"{begin}.{letter}" for letter in "xyz"])


def encode_claim(ids: Sequence[str]) -> str:
    """Return what is committed with a position."""
    return " ".join(ids)


def log_positions(topics: StoreTopics, batches: Mapping[int, CommitBatch], claim: str) -> list[TopicPartition]:
    """Return the positions of a common Kafka transaction, by half partition, with what is committed with them."""
    positions: list[TopicPartition] = []
    for number, batch in batches.items():
        metadata = f"{claim} {batch.log_ids}".rstrip()
        positions.append(TopicPartition(topics.half, number, batch.half_checkpoint, metadata))
        positions.append(TopicPartition(topics.op, number, batch.op_checkpoint, batch.log_ids))
        positions.append(TopicPartition(topics.done, number, batch.done_checkpoint, batch.log_ids))
    return positions


def trial_positions(topics: StoreTopics, numbers: Iterable[int]) -> list[TopicPartition]:
    """Return the positions of a Kafka transaction that is tried apart: nobody reads them, but a zombie is refused."""
    return [TopicPartition(topics.discarded, number, 0) for number in numbers]


def decode_claim(topics: StoreTopics, claim: str | None) -> list[str]:
    """Return the ids that were committed with a position. What is no id of a coordinator of this store is left out."""
    begin = f"{topics.coordinators}."
    return [name for name in (claim or "").split(" ") if name.startswith(begin)][:_NAMES]


class Fence:
    """Ends what others left open. Used by one thread at a time; it waits for no producer longer than its limit.

    `own` returns the ids of this coordinator's own producers: they are not shut out.
    """

    def __init__(self, context: CoordinatorContext, own: Callable[[], Sequence[str]]) -> None:
        self._bootstrap_servers, self._topics, self._left = context.bootstrap_servers, context.topics, context.left
        self._settings = {**context.config, "transaction.timeout.ms": int(TRANSACTION_S * 1000)}
        self._own = own

    def end(self, claims: Iterable[str | None], ended: set[str]) -> None:
        """End the Kafka transactions of the coordinators that claimed partitions, and add their ids to `ended`.

        Those in it are left alone: one that is alive after all opens new transactions, but none that the group lets
        through. To shut it out again and again would hold up what it does for the partitions that it still has.
        """
        ids = {name for claim in claims for name in decode_claim(self._topics, claim)} - set(self._own()) - ended
        calls = {
            name: BackgroundCall(f"fencing {name}", partial(self._end, name), _FENCING_BUDGET_S, self._left)
            for name in sorted(ids)
        }
        for name, call in calls.items():
            try:
                error = call.wait()
            except NotAnsweredError:
                error = "no answer"
            if error is None:
                ended.add(name)
                _log.info("the Kafka transaction that %s left open was ended", name)
            else:
                _log.warning("the Kafka transaction of %s cannot be ended: %s; its time limit will", name, error)

    def _end(self, name: str) -> str | None:
        """Initialise a producer of a name; return why that failed, or None."""
        try:
            producer = clients.producer(self._bootstrap_servers, {**self._settings, "transactional.id": name})
            try:
                initialise(producer, self._topics.done, _INIT_TIMEOUT_S)
            finally:
                producer.close()
        except KafkaException as error:
            return reason(error)
        return None
