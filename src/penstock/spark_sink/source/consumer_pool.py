"""The Kafka consumers that a Python worker keeps from one task to the next, as Spark's JVM source pools its own.

A consumer costs a task its connections: to find the cluster, the leaders, and for each of them to log in. A kept one
has them. It is lent to one task at a time, and only one that has met no error is kept: what it knows of topics and
leaders is then no older than its last task.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from confluent_kafka import Consumer, KafkaException, TopicPartition

from penstock import clients
from penstock.options import ClientConfig

#: Consumers that a process keeps at most, and seconds for which: from when it was made, and from its last task.
#: Spark itself ends a worker that has had no task for a minute.
MOST_KEPT = 4
MOST_AGE_S = 300.0
MOST_IDLE_S = 60.0

_Key = tuple[str, frozenset[tuple[str, object]]]


@dataclass(slots=True)
class LentConsumer:
    """A consumer for one task.

    Attributes:
        consumer: the client, to which the task gives its own partitions and offsets by `begin`.
        is_kept: whether another task has had it before.
        has_failed: whether it has met an error, so that it is not kept.
    """

    consumer: Consumer
    made_at: float
    _make: Callable[[], Consumer]
    is_kept: bool
    has_failed: bool = False
    _paused: list[TopicPartition] = field(default_factory=list)

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

    def replace(self, now: float) -> None:
        """Go on with a new consumer, which has no partitions yet."""
        new = self._make()
        self.consumer.close()
        self.consumer, self.made_at = new, now
        self.is_kept = self.has_failed = False
        self._paused.clear()

    def is_clean(self) -> bool:
        """Let go of the task's partitions and of what was fetched of them; tell whether another task may begin."""
        try:
            if self._paused:
                # A partition stays paused for whoever has it next.
                self.consumer.resume(self._paused)
            self.consumer.unassign()
            # What was fetched ahead is thrown away where it is looked at: here, and not with the next task.
            return not self.consumer.consume(1, 0)
        except (KafkaException, RuntimeError):
            return False


@dataclass(frozen=True, slots=True)
class _Idle:
    key: _Key = field(repr=False)  # it may hold secrets
    consumer: Consumer
    made_at: float
    since: float


class ConsumerPool:
    """Keeps consumers by their settings. Any thread may use it; a forked process begins with none.

    `most` are kept at most; of 0 none is.
    """

    def __init__(self, most: int = MOST_KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        #: Guards what follows: tasks lend and return, the process's end closes.
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []
        self._process = os.getpid()
        #: Those of the process that this one was forked from. Their threads are not here, so they are never touched.
        self._of_parent: list[_Idle] = []

    @contextmanager
    def lend(self, servers: str, config: ClientConfig) -> Iterator[LentConsumer]:
        """Lend a consumer for a task; where the task ends by an exception, or is given up, it is closed."""
        key = (servers, frozenset(config.items()))
        now = self._clock()

        def make() -> Consumer:
            return clients.consumer(servers, config)

        found = self._taken(key, now)
        consumer, made_at = (make(), now) if found is None else found
        lent = LentConsumer(consumer, made_at, make, is_kept=found is not None)
        returned = False
        try:
            yield lent
            returned = self._most > 0 and not lent.has_failed and lent.is_clean() and self._returned(key, lent)
        finally:
            if not returned:
                lent.consumer.close()

    def close(self) -> None:
        """Close all that are kept; another task begins with a new one."""
        with self._lock:
            self._leave_to_parent()
            kept, self._idle = self._idle, []
        for one in kept:
            one.consumer.close()

    def _taken(self, key: _Key, now: float) -> tuple[Consumer, float] | None:
        """Return the consumer of these settings that was used last, with when it was made; close what is too old."""
        with self._lock:
            self._leave_to_parent()
            old = [one for one in self._idle if self._is_old(one, now)]
            self._idle = [one for one in self._idle if not self._is_old(one, now)]
            found = next((one for one in reversed(self._idle) if one.key == key), None)
            if found is not None:
                self._idle.remove(found)
        for one in old:
            one.consumer.close()
        return None if found is None else (found.consumer, found.made_at)

    def _returned(self, key: _Key, lent: LentConsumer) -> bool:
        """Keep a consumer, and close the one that has waited longest where there are too many."""
        now = self._clock()
        with self._lock:
            if self._process != os.getpid():
                return False  # the task itself has forked
            if not self._idle:
                atexit.unregister(self.close)
                atexit.register(self.close)
            self._idle.append(_Idle(key, lent.consumer, lent.made_at, now))
            surplus = self._idle[: -self._most]
            self._idle = self._idle[-self._most :]
        for one in surplus:
            one.consumer.close()
        return True

    @staticmethod
    def _is_old(one: _Idle, now: float) -> bool:
        return now - one.made_at > MOST_AGE_S or now - one.since > MOST_IDLE_S

    def _leave_to_parent(self) -> None:
        if self._process != os.getpid():
            self._of_parent += self._idle
            self._idle = []
            self._process = os.getpid()
