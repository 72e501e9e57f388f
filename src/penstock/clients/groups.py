"""All requests of admin clients to the coordinator of a consumer group, and the check of its protocol.

The client library ends the process if such a request times out while the coordinator is looked for, and the coordinator
is found later (librdkafka 2.16, issue 4605; `benchmarks/admin_requests.py` shows it). So the library gets its longest
time-out, and we hold the limit: `answered` waits for the future. A request that is destroyed with its client does no
harm. So the client is one that is soon dropped, or is replaced after a missing answer.

Committed offsets are never asked for this way: if the coordinator has moved, the library reads through a null pointer
(`rd_kafka_handle_OffsetFetch`). A consumer that joins no group asks for them.

A client of `group.protocol=consumer` (KIP-848) reports nothing if its coordinator lacks that protocol: it looks for
another coordinator, for ever. It shows what brokers support in its debug log only.
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

#: The longest time-out that the library accepts.
_MAX_TIMEOUT_S = 3600.0
#: Answers of a coordinator to a commit from outside a group that has members, by either group protocol.
HAS_MEMBERS = REBALANCING | {KafkaError.FENCED_MEMBER_EPOCH}


def describe_groups(admin: AdminClient, groups: Iterable[str], *, with_rights: bool = False) -> dict[str, Future[Any]]:
    """Ask for the members of groups and, `with_rights`, for this client's rights on them."""
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
    """Return the group's offsets with their metadata; -1001 stands for no offset.

    With `stable`, waits until no open transaction holds one. Raises `KafkaException` if no answer comes in time.
    """
    isolation = "read_committed" if stable else "read_uncommitted"
    asking = clients.consumer(servers, reading_settings(config, group, isolation))
    try:
        return asking.committed(partitions, timeout=timeout_s)
    finally:
        asking.close()


#: The debug log has such a line for each kind of request that a broker supports (librdkafka 2.16).
_TAKEN = re.compile(r"ApiKey (\w+) \(\d+\) Versions \d+\.\.(\d+)")
_HEARTBEAT = "ConsumerGroupHeartbeat"
#: The only version that the client sends (librdkafka 2.16). Kafka 3.9 supports 0.
_LEAST = 1
#: Seconds that brokers may take to answer.
_ANSWER_S = 10.0


class _TakenVersions:
    """A logger for the client library. It notes the highest version of each request that all brokers support."""

    def __init__(self) -> None:
        self.highest: dict[str, int] = {}

    def log(self, _level: int, _text: str, /, *arguments: object) -> None:
        if arguments and (found := _TAKEN.search(str(arguments[-1]))):
            self.highest[found[1]] = min(int(found[2]), self.highest.get(found[1], int(found[2])))


def require_consumer_protocol(bootstrap_servers: str, config: ClientConfig) -> bool:
    """Raise `ConfigurationError` if the brokers are too old for `group.protocol=consumer`.

    Returns whether the brokers reported what they support. If they did not, nothing is raised.
    """
    taken = _TakenVersions()
    client = producer(bootstrap_servers, {**config, "debug": "feature", "logger": taken})
    with suppress(KafkaException):
        client.list_topics(timeout=_ANSWER_S)
    client.poll(0)  # delivers the log
    highest = taken.highest.get(_HEARTBEAT, -1)
    if taken.highest and highest < _LEAST:
        has = f"take {_HEARTBEAT} up to version {highest}" if highest >= 0 else f"do not take {_HEARTBEAT}"
        raise ConfigurationError(
            f"config['group.protocol'] is 'consumer', and the brokers {has}, while the client needs version {_LEAST}: "
            "Kafka has it since 4.0; leave group.protocol out, or use newer brokers"
        )
    return bool(taken.highest)
