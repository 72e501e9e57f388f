"""Who leads, copies and coordinates what on an embedded broker of several nodes: a part of `DevBroker`.

Every broker that can answer is asked, until all say the same: one that has just come back says what it last knew.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import ClusterMetadata, PartitionMetadata  # type: ignore[attr-defined] # not in its __all__

from penstock.clients.bounded_calls import ask_again
from penstock.devbroker.cluster import Cluster
from penstock.devbroker.node import Node
from penstock.devbroker.wire import (
    GROUP,
    TRANSACTION,
    WireError,
    elect_preferred_leaders,
    find_coordinator,
    reassign_partitions,
)
from penstock.errors import ConfigurationError, DevBrokerError

_LOOK_INTERVAL_S = 0.05

#: Seconds between two requests for the same change.
_REQUEST_INTERVAL_S = 1.0


T = TypeVar("T")


def _all_partitions(metadata: ClusterMetadata) -> Iterator[PartitionMetadata]:
    return (partition for topic in metadata.topics.values() for partition in topic.partitions.values())


def _is_in_sync(partition: PartitionMetadata) -> bool:
    return partition.leader >= 0 and set(partition.isrs) == set(partition.replicas)


class Replication(ABC):
    """Leaders, coordinators and replicas. All wait at most as long as a start may take, then raise `DevBrokerError`."""

    def __init__(self, timeout_s: float) -> None:
        self._start_timeout_s = timeout_s

    def leader_of(self, topic: str, partition: int = 0) -> int:
        """Return the node that leads a partition, when it has a leader that was not killed or stopped."""

        def leader(node: Node) -> int:
            return node.metadata(topic).topics[topic].partitions[partition].leader

        return self._node_named(f"leads {topic}[{partition}]", leader)

    def coordinator_of(self, group: str) -> int:
        """Return the node that coordinates a consumer group, when there is one that was not killed or stopped."""
        return self._node_named(f"coordinates {group}", lambda node: find_coordinator(node.inside, group, GROUP))

    def transaction_coordinator_of(self, transactional_id: str) -> int:
        """Return the node that coordinates a producer's transactions, as `coordinator_of`."""
        return self._node_named(
            f"coordinates {transactional_id}", lambda node: find_coordinator(node.inside, transactional_id, TRANSACTION)
        )

    def wait_in_sync(self) -> None:
        """Return when every partition has a leader and all its replicas are in sync."""
        self._await("that all replicas are in sync", _is_in_sync)

    def elect_preferred(self) -> None:
        """Let the first replica of each partition lead it, and return when it does."""
        self._await(
            "that the first replica leads each partition",
            lambda partition: partition.leader == partition.replicas[0],
            lambda: elect_preferred_leaders(self._running_cluster().answering[0].inside),
        )

    def reassign(self, topic: str, replicas: Mapping[int, Sequence[int]]) -> None:
        """Move partitions to other nodes and return when all of them are there and in sync.

        Args:
            topic: the topic.
            replicas: nodes by partition; the first is preferred as the leader.

        Raises:
            ConfigurationError: there is no such node, or one is named twice.
            DevBrokerError: it was not done in time.
        """
        numbers = {node.number for node in self._running_cluster().brokers}
        for nodes in replicas.values():
            if not nodes or len(set(nodes)) < len(nodes) or not numbers.issuperset(nodes):
                raise ConfigurationError(f"replicas must be different nodes of {sorted(numbers)}, but are {nodes!r}")
        self._await(
            f"that {topic} is on the nodes {dict(replicas)}",
            lambda partition: _is_in_sync(partition) and partition.replicas == list(replicas[partition.id]),
            lambda: reassign_partitions(self._running_cluster().answering[0].inside, topic, replicas),
            lambda found: [found.topics[topic].partitions[number] for number in replicas],
        )

    @abstractmethod
    def _running_cluster(self) -> Cluster:
        """Return the broker's nodes, or raise `DevBrokerError` that says that it was not started."""

    def _node_named(self, what: str, ask: Callable[[Node], int]) -> int:
        """Return the running node that all name."""
        cluster = self._running_cluster()

        def named() -> int | None:
            named_by = {ask(node) for node in cluster.answering}
            running = {node.number for node in cluster.brokers if node.runs}
            return named_by.pop() if len(named_by) == 1 and named_by <= running else None

        return self._until(f"which node {what}", named)

    def _await(
        self,
        what: str,
        is_right: Callable[[PartitionMetadata], bool],
        request: Callable[[], None] | None = None,
        chosen: Callable[[ClusterMetadata], Iterable[PartitionMetadata]] = _all_partitions,
    ) -> None:
        """Return when all brokers say that the chosen partitions are right, requesting it again and again."""
        cluster, requested_at = self._running_cluster(), -math.inf

        def are_right() -> bool | None:
            nonlocal requested_at
            if all(is_right(partition) for node in cluster.answering for partition in chosen(node.metadata())):
                return True
            if request is not None and time.monotonic() - requested_at >= _REQUEST_INTERVAL_S:
                requested_at = time.monotonic()
                request()
            return None

        self._until(what, are_right)

    def _until(self, what: str, ask: Callable[[], T | None]) -> T:
        """Return the first answer that is not None; what is refused meanwhile is asked again."""
        try:
            found = ask_again(
                ask,
                self._start_timeout_s,
                _LOOK_INTERVAL_S,
                until=lambda answer: answer is not None,
                passes=lambda error: isinstance(error, (KafkaException, WireError, LookupError)),
            )
        except (KafkaException, WireError, LookupError) as error:
            raise self._undecided(what, str(error)) from error
        if found is None:
            raise self._undecided(what, "the brokers did not agree, or named one that is down")
        return found

    def _undecided(self, what: str, why: str) -> DevBrokerError:
        nodes = ", ".join(f"{node.number}: {node.log_path}" for node in self._running_cluster().nodes)
        return DevBrokerError(
            f"the embedded broker did not say within {self._start_timeout_s:g} s {what}: {why}; read its logs ({nodes})"
        )
