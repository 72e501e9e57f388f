"""The Kafka consumers that a Python worker keeps from one task to the next, as Spark's JVM source pools its own.

A consumer costs a task its connections: to find the cluster, the leaders, and for each of them to log in. A kept one
has them. Only one that has met no error is kept: what it knows of topics and leaders is then no older than its last
task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from confluent_kafka import Consumer, KafkaException, TopicPartition

from penstock import clients
from penstock.options import ClientConfig
from penstock.spark_sink.source.worker_pool import MOST_KEPT, WorkerPool


class LentConsumer:
    """A consumer for one task at a time, to which that gives its own partitions and offsets by `begin`.

    Attributes:
        consumer: the client.
        is_kept: whether an earlier task has had it.
        has_failed: whether it has met an error, so that no other task gets it.
    """

    def __init__(self, make: Callable[[], Consumer]) -> None:
        self._make = make
        self.consumer = make()
        self.is_kept = False
        self.has_failed = False
        self._paused: list[TopicPartition] = []

    def begin(self, parts: Sequence[TopicPartition]) -> None:
        """Read these partitions from these offsets on, and nothing else."""
        # Nothing that an earlier task has fetched is handed over after this: before `assign` and `unassign` return, the
        # client library has raised the version of each partition that they stop or start
        # (`rd_kafka_cgrp_handle_assign_op` serves the assignment, then answers), and `consume` throws away records and
        # ends of partitions that were fetched under a lower one (`rd_kafka_op_version_outdated`).
        self.consumer.assign(list(parts))

    def pause(self, part: TopicPartition) -> None:
        """Fetch nothing more of a partition in this task."""
        self.consumer.pause([part])
        self._paused.append(part)

    def replace(self) -> None:
        """Go on with a new consumer, which has no partitions yet."""
        new = self._make()
        self.consumer.close()
        self.consumer = new
        self.is_kept = self.has_failed = False
        self._paused.clear()

    def release(self) -> bool:
        """Let go of the task's partitions and of what was fetched of them; tell whether another task may begin."""
        if self.has_failed:
            return False
        try:
            if self._paused:
                # A partition stays paused for whoever has it next.
                self.consumer.resume(self._paused)
                self._paused.clear()
            self.consumer.unassign()
            # What was fetched ahead is thrown away where it is looked at: here, and not with the next task.
            self.is_kept = not self.consumer.consume(1, 0)
        except (KafkaException, RuntimeError):
            return False
        return self.is_kept

    def close(self) -> None:
        """Close the client."""
        self.consumer.close()


class ConsumerPool:
    """Keeps consumers by their settings; see `WorkerPool`."""

    def __init__(self, most: int = MOST_KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool: WorkerPool[LentConsumer] = WorkerPool(most, clock)

    def lend(self, servers: str, config: ClientConfig) -> AbstractContextManager[LentConsumer]:
        """Lend a consumer for a task; where the task ends by an exception, or is given up, it is closed."""
        key = (servers, frozenset(config.items()))
        return self._pool.lend(key, lambda: LentConsumer(lambda: clients.consumer(servers, config)))

    def close(self) -> None:
        """Close all that are kept."""
        self._pool.close()
