"""An admin client's requests to the coordinator of a consumer group: no other module sends any.

The client library ends the process where such a request meets its time-out while the coordinator is looked for, and the
coordinator is found later (librdkafka 2.16, issue 4605; `benchmarks/admin_requests.py` shows it). So the library gets
the longest time-out that it takes, and we hold the limit: `answered` waits for the future. What is destroyed with its
client does no harm: so the client is one that is soon dropped, or a `GroupAdmin`, renewed where an answer did not come.

What a group has committed is never asked so: where the coordinator has moved, the library reads through a null pointer
(`rd_kafka_handle_OffsetFetch`). A consumer is asked, which joins nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock import clients
from penstock.clients.reading import reading_settings
from penstock.options import ClientConfig

#: The longest time-out that the library takes.
_LONGEST_S = 3600.0


class GroupAdmin:
    """An admin client for requests to groups, of one thread, which lasts as long as answers come in time."""

    def __init__(self, make: Callable[[], AdminClient]) -> None:
        self._make = make
        self.client = make()

    def renew(self) -> None:
        """Drop the client of which an answer did not come, and make another; errors as of `clients.admin`."""
        self.client = self._make()


def describe_groups(admin: AdminClient, groups: Iterable[str], *, with_rights: bool = False) -> dict[str, Future[Any]]:
    """Ask for the members of groups and, `with_rights`, for what this client may do with them."""
    asked: dict[str, Future[Any]] = admin.describe_consumer_groups(
        list(groups), request_timeout=_LONGEST_S, include_authorized_operations=with_rights
    )
    return asked


def alter_group_offsets(admin: AdminClient, group: str, offsets: list[TopicPartition]) -> Future[Any]:
    """Ask to commit offsets for a group that has no members."""
    wanted = ConsumerGroupTopicPartitions(group, offsets)
    asked: Future[Any] = admin.alter_consumer_group_offsets([wanted], request_timeout=_LONGEST_S)[group]
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
