"""Fencing: the end of Kafka transactions that a dead coordinator left open in a partition.

A coordinator commits its transactional ids with each half position. A new owner that finds positions held back by an
open transaction ends it under the id of its owner, rather than waiting until it times out: initialising a producer of
that id ends what is open and fences the former one. Where that one was alive after all, it loses one Kafka transaction,
learns from the done log what became of it, and goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from confluent_kafka import KafkaException, TopicPartition

from penstock import clients
from penstock.clients.bounded_calls import BackgroundCall, NotAnsweredError
from penstock.clients.kafka_errors import reason
from penstock.clients.transactional.settings import initialise
from penstock.clients.transactional.writer import TRANSACTION_S
from penstock.transactions.core.commit_batch import CommitBatch
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.wire.topics import StoreTopics

_log = logging.getLogger("penstock.transactions")

#: Seconds for the call that ends a transaction, and for all that it takes.
_INIT_TIMEOUT_S = 6.0
_FENCING_BUDGET_S = 8.0
#: Names in one claim: more are not written by any version.
_NAMES = 8


def log_positions(topics: StoreTopics, batches: Mapping[int, CommitBatch], ids: Sequence[str]) -> list[TopicPartition]:
    """Return the positions of a common Kafka transaction, with the transactional ids of who commits them."""
    claim = " ".join(ids)
    positions: list[TopicPartition] = []
    for number, batch in batches.items():
        metadata = f"{claim} {batch.log_ids}".rstrip()
        positions.append(TopicPartition(topics.half, number, batch.half_checkpoint, metadata))
        positions.append(TopicPartition(topics.op, number, batch.op_checkpoint, batch.log_ids))
        positions.append(TopicPartition(topics.done, number, batch.done_checkpoint, batch.log_ids))
    return positions


def decode_claim(topics: StoreTopics, claim: str | None) -> list[str]:
    """Return the ids that were committed with a position. What is no id of a coordinator of this store is left out."""
    begin = f"{topics.coordinators}."
    return [name for name in (claim or "").split(" ") if name.startswith(begin)][:_NAMES]


def end_transactions(context: CoordinatorContext, ids: Iterable[str]) -> set[str]:
    """End what was left open under transactional ids; return those under which that is done.

    Waits for no producer longer than a limit. One that is alive after all opens new transactions, but none that the
    group lets through: to end those as well would hold up what it does for the partitions that it still has.
    """
    calls = {
        name: BackgroundCall(f"fencing {name}", partial(_end, context, name), _FENCING_BUDGET_S, context.left)
        for name in sorted(ids)
    }
    ended = set()
    for name, call in calls.items():
        try:
            call.wait()
        except (KafkaException, NotAnsweredError) as error:
            _log.warning("the Kafka transaction of %s cannot be ended: %s; its time limit will", name, reason(error))
        else:
            ended.add(name)
            _log.info("the Kafka transaction that %s left open was ended", name)
    return ended


def _end(context: CoordinatorContext, name: str) -> None:
    settings = {"transaction.timeout.ms": int(TRANSACTION_S * 1000), "transactional.id": name}
    producer = clients.producer(context.bootstrap_servers, {**context.config, **settings})
    try:
        initialise(producer, context.topics.done, _INIT_TIMEOUT_S)
    finally:
        producer.close()
