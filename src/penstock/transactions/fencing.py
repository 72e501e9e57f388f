"""Whose Kafka transaction may be open in a partition, and the ending of those that a dead coordinator left.

A coordinator writes the names of its transactional producers beside the half position it commits. Who takes the
partition over and finds positions held back by an open transaction ends it under its owner's name, in place of waiting
until it times out: initialising a producer of that name ends what is open and shuts the former one out. Where that one
was alive after all, it loses one Kafka transaction, learns from the done log what became of it, and goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from confluent_kafka import KafkaException, Producer

from penstock.config import ClientConfig
from penstock.kafka import base_config, reason
from penstock.transactions.publisher import TRANSACTION_TIMEOUT_MS
from penstock.transactions.topics import StoreTopics

_log = logging.getLogger("penstock.transactions")

_INIT_TIMEOUT_S = 10.0
#: Names in one claim: more are not written by any version.
_NAMES = 8


def transactional_ids(topics: StoreTopics, name: str) -> list[str]:
    """Return the ids of the transactional producers of one coordinator."""
    return [f"{topics.coordinators}.{name}.{turn}" for turn in "ab"]


def encode_claim(ids: Sequence[str]) -> str:
    """Return what is written beside a position."""
    return " ".join(ids)


def decode_claim(topics: StoreTopics, claim: str | None) -> list[str]:
    """Return the ids that stand beside a position. What is no id of a coordinator of this store is left out."""
    begin = f"{topics.coordinators}."
    return [name for name in (claim or "").split(" ") if name.startswith(begin)][:_NAMES]


class Fence:
    """Ends what others left open. Used by one thread at a time.

    Args:
        bootstrap_servers: Kafka's addresses.
        config: settings of producers, by librdkafka's names.
        topics: the store's topics.
        own: ids of this coordinator's own producers: they are not shut out.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, own: Sequence[str]) -> None:
        self._settings = {
            **base_config(bootstrap_servers, config),
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
        }
        self._topics = topics
        self._own = frozenset(own)

    def end(self, claims: Iterable[str | None]) -> int:
        """End the Kafka transactions of the coordinators that claimed partitions; return how many were shut out."""
        ids = {name for claim in claims for name in decode_claim(self._topics, claim)} - self._own
        ended = 0
        for name in sorted(ids):
            try:
                producer = Producer({**self._settings, "transactional.id": name})
                try:
                    producer.init_transactions(_INIT_TIMEOUT_S)
                finally:
                    producer.close()
            except KafkaException as error:
                _log.warning(
                    "the Kafka transaction of %s cannot be ended: %s; its time limit will", name, reason(error)
                )
            else:
                ended += 1
                _log.info("the Kafka transaction that %s left open was ended", name)
        return ended


__all__ = ["Fence", "decode_claim", "encode_claim", "transactional_ids"]
