"""Requests of an admin client to the coordinator of a consumer group: no other module sends any; and its protocol.

The client library ends the process where such a request meets its time-out while the coordinator is looked for, and the
coordinator is found later (librdkafka 2.16, issue 4605; `benchmarks/admin_requests.py` shows it). So the library gets
the longest time-out that it takes, and we hold the limit: `answered` waits for the future. What is destroyed with its
client does no harm: so the client is one that is soon dropped, or dropped for another where an answer did not come.

What a group has committed is never asked so: where the coordinator has moved, the library reads through a null pointer
(`rd_kafka_handle_OffsetFetch`). A consumer is asked, which joins nothing.

A client of `group.protocol=consumer` (KIP-848) says nothing where its coordinator lacks that: it asks for another
coordinator, for ever. Nor does it show what brokers take, save in its debug log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition

from penstock import clients
from penstock.clients.factory import AdminClient, producer
from penstock.clients.kafka_errors import REBALANCING
from penstock.clients.reading import reading_settings
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig

#: The longest time-out that the library takes.
_MAX_TIMEOUT_S = 3600.0
#: What a coordinator answers to a commit from outside of a group that has members, by either protocol of groups.
HAS_MEMBERS = REBALANCING | {KafkaError.FENCED_MEMBER_EPOCH}


def describe_groups(admin: AdminClient, groups: Iterable[str], *, with_rights: bool = False) -> dict[str, Future[Any]]:
    """Ask for the members of groups and, `with_rights`, for what this client may do with them."""
    asked: dict[str, Future[Any]] = admin.describe_consumer_groups(
        list(groups), request_timeout=_MAX_TIMEOUT_S, include_authorized_operations=with_rights
    )
    return asked


def alter_group_offsets(admin: AdminClient, group: str, offsets: list[TopicPartition]) -> Future[Any]:
    """Ask to commit offsets for a group that has no members."""
    wanted = ConsumerGroupTopicPartitions(group, offsets)
    asked: Future[Any] = admin.alter_consumer_group_offsets([wanted], request_timeout=_MAX_TIMEOUT_S)[group]
    return asked


def committed_offsets(
    servers: str,
    config: ClientConfig,
    group: str,
    partitions: list[TopicPartition],
    timeout_s: float,
    *,
    stable: bool = True,
) -> list[TopicPartition]:
    """Return the group's offsets with their metadata, -1001 where there is none.

    With `stable`, waits until no open transaction holds one. `KafkaException` where no answer came in time.
    """
    isolation = "read_committed" if stable else "read_uncommitted"
    asking = clients.consumer(servers, reading_settings(config, group, isolation))
    try:
        return asking.committed(partitions, timeout=timeout_s)
    finally:
        asking.close()


#: A line of that log for each kind of request that a broker takes (librdkafka 2.16).
_TAKEN = re.compile(r"ApiKey (\w+) \(\d+\) Versions \d+\.\.(\d+)")
_HEARTBEAT = "ConsumerGroupHeartbeat"
#: The version that the client sends, and no other (librdkafka 2.16). Kafka 3.9 takes 0.
_LEAST = 1
#: Seconds that brokers may take to answer.
_ANSWER_S = 10.0


class _TakenVersions:
    """Stands where the client library expects a `logging.Logger`, and notes what the broker takes that takes least."""

    def __init__(self) -> None:
        self.highest: dict[str, int] = {}

    def log(self, _level: int, _text: str, /, *arguments: object) -> None:
        if arguments and (found := _TAKEN.search(str(arguments[-1]))):
            self.highest[found[1]] = min(int(found[2]), self.highest.get(found[1], int(found[2])))


def require_consumer_protocol(bootstrap_servers: str, config: ClientConfig) -> bool:
    """Raise `ConfigurationError` where the brokers are too old for `group.protocol=consumer`.

    Returns whether they said what they accept; where they did not, nothing is raised.
    """
    taken = _TakenVersions()
    client = producer(bootstrap_servers, {**config, "debug": "feature", "logger": taken})
    with suppress(KafkaException):
        client.list_topics(timeout=_ANSWER_S)
    client.poll(0)  # hands the log over
    highest = taken.highest.get(_HEARTBEAT, -1)
    if taken.highest and highest < _LEAST:
        has = f"take {_HEARTBEAT} up to version {highest}" if highest >= 0 else f"do not take {_HEARTBEAT}"
        raise ConfigurationError(
            f"config['group.protocol'] is 'consumer', and the brokers {has}, while the client needs version {_LEAST}: "
            "Kafka has it since 4.0; leave group.protocol out, or use newer brokers"
        )
    return bool(taken.highest)
