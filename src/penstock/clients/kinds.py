"""Which settings a kind of client does not take: one configuration serves consumers, producers and admin clients.

What is not listed every kind takes, so that what a new version of the client library adds is not left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

#: What consumers alone take: C in the client library's table of settings (CONFIGURATION.md of librdkafka 2.16), and
#: what its Python adds.
CONSUMER_SETTINGS = frozenset(
    {
        "auto.commit.enable",
        "auto.commit.interval.ms",
        "auto.offset.reset",
        "check.crcs",
        "consume.callback.max.messages",
        "coordinator.query.interval.ms",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.partition.eof",
        "fetch.error.backoff.ms",
        "fetch.max.bytes",
        "fetch.message.max.bytes",
        "fetch.min.bytes",
        "fetch.queue.backoff.ms",
        "fetch.wait.max.ms",
        "group.id",
        "group.instance.id",
        "group.protocol",
        "group.protocol.type",
        "group.remote.assignor",
        "heartbeat.interval.ms",
        "isolation.level",
        "max.partition.fetch.bytes",
        "max.poll.interval.ms",
        "max.poll.records",
        "offset.store.method",
        "offset.store.path",
        "offset.store.sync.interval.ms",
        "on_commit",
        "partition.assignment.strategy",
        "queued.max.messages.kbytes",
        "queued.min.messages",
        "session.timeout.ms",
        "share.acknowledgement.mode",
    }
)

#: What producers alone take: P in that table, and what Python adds.
PRODUCER_SETTINGS = frozenset(
    {
        "acks",
        "batch.num.messages",
        "batch.size",
        "compression.codec",
        "compression.level",
        "compression.type",
        "delivery.report.only.error",
        "delivery.timeout.ms",
        "enable.gapless.guarantee",
        "enable.idempotence",
        "linger.ms",
        "message.send.max.retries",
        "message.timeout.ms",
        "on_delivery",
        "partitioner",
        "produce.offset.report",
        "queue.buffering.backpressure.threshold",
        "queue.buffering.max.kbytes",
        "queue.buffering.max.messages",
        "queue.buffering.max.ms",
        "queuing.strategy",
        "request.required.acks",
        "request.timeout.ms",
        "retries",
        "sticky.partitioning.linger.ms",
        "transaction.timeout.ms",
        "transactional.id",
    }
)

#: What an admin client would only pile up: nobody serves its events between two questions.
_SERVED_BY_POLLING = frozenset({"debug", "default.topic.config", "statistics.interval.ms", "stats_cb", "throttle_cb"})


#: Our own setting: how many copies a topic has that penstock creates.
REPLICATION_FACTOR = "penstock.replication.factor"
_OURS = frozenset({REPLICATION_FACTOR})


class Kind(Enum):
    """A kind of client. Its value is what it does not take."""

    CONSUMER = PRODUCER_SETTINGS | _OURS
    PRODUCER = CONSUMER_SETTINGS | _OURS
    ADMIN = CONSUMER_SETTINGS | PRODUCER_SETTINGS | _SERVED_BY_POLLING | _OURS

    def taken(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return what this kind takes of a configuration."""
        return {key: value for key, value in config.items() if key not in self.value}
