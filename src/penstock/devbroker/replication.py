"""Who leads what on an embedded broker of several nodes, and whether all copies are there: a part of `DevBroker`.

Every broker that can answer is asked, until all say the same: one that has just come back says what it last knew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TypeVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import PartitionMetadata  # type: ignore[attr-defined] # not in its __all__

from penstock.clients.bounded_calls import ask_again
from penstock.devbroker.cluster import Cluster
from penstock.devbroker.node import Node
from penstock.errors import DevBrokerError

_LOOK_INTERVAL_S = 0.05

T = TypeVar("T")


def _partitions(node: Node) -> Iterator[PartitionMetadata]:
    return (partition for topic in node.metadata().topics.values() for partition in topic.partitions.values())


def _is_in_sync(partition: PartitionMetadata) -> bool:
    return partition.leader >= 0 and set(partition.isrs) == set(partition.replicas)


class Replication(ABC):
    """Leaders and replicas. All wait at most as long as a start may take, then raise `DevBrokerError`."""

    def __init__(self, timeout_s: float) -> None:
        self._start_timeout_s = timeout_s

    def leader_of(self, topic: str, partition: int = 0) -> int:
        """Return the node that leads a partition, when it has a leader that was not killed or stopped."""
        cluster = self._running_cluster()

        def named() -> int | None:
            found = {node.metadata(topic).topics[topic].partitions[partition].leader for node in cluster.answering}
            running = {node.number for node in cluster.brokers if node.runs}
            return found.pop() if len(found) == 1 and found <= running else None

        return self._until(f"which node leads {topic}:{partition}", named)

    def wait_in_sync(self) -> None:
        """Return when every partition has a leader and all its replicas are in sync."""
        cluster = self._running_cluster()

        def are_in_sync() -> bool | None:
            return all(map(_is_in_sync, chain.from_iterable(map(_partitions, cluster.answering)))) or None

        self._until("that all replicas are in sync", are_in_sync)

    @abstractmethod
    def _running_cluster(self) -> Cluster:
        """Return the broker's nodes, or raise `DevBrokerError` that says that it was not started."""

    def _until(self, what: str, ask: Callable[[], T | None]) -> T:
        """Return the first answer that is not None; what is refused meanwhile is asked again."""
        try:
            found = ask_again(
                ask,
                self._start_timeout_s,
                _LOOK_INTERVAL_S,
                until=lambda answer: answer is not None,
                passes=lambda error: isinstance(error, (KafkaException, LookupError)),
            )
        except (KafkaException, LookupError) as error:
            raise self._undecided(what, str(error)) from error
        if found is None:
            raise self._undecided(what, "the brokers did not agree, or named one that is down")
        return found

    def _undecided(self, what: str, why: str) -> DevBrokerError:
        nodes = ", ".join(f"{node.number}: {node.log_path}" for node in self._running_cluster().nodes)
        return DevBrokerError(
            f"the embedded broker did not say within {self._start_timeout_s:g} s {what}: {why}; read its logs ({nodes})"
        )
