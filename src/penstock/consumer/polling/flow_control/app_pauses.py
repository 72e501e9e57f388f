"""What the app itself has paused: topics, and partitions of them.

It is kept by name, not with the assignment: a partition that goes and comes back is paused still. The poll thread
pauses and resumes in the client, beside back-pressure, and neither ends what the other began.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import AppPause, Assignment
from penstock.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class _TopicPause:
    """Since when a topic is paused, in seconds since the epoch, or None; and those partitions that differ."""

    since: float | None = None
    partitions: Mapping[int, float | None] = field(default_factory=dict)


class AppPauses:
    """Any thread. Writers take the lock; each change replaces the mapping, so that readers need none."""

    def __init__(self, group: str, clock: Clock, consumed: Callable[[], Collection[str]]) -> None:
        self._group = group
        self._clock = clock
        #: Returns the topics that are consumed, without retry topics.
        self._consumed = consumed
        self._lock = threading.Lock()
        self._topics: Mapping[str, _TopicPause] = {}

    def pause(self, topic: str, partition: int | None = None) -> None:
        """Pause a topic, with what partitions it will have, or one partition. What is paused stays so since then.

        `ConfigurationError` where the topic is not consumed, or the partition is no number.
        """
        self._require(topic, partition)
        with self._lock:
            former = self._topics.get(topic, _TopicPause())
            now = self._clock.time()
            if partition is None:
                # Partitions that were resumed alone are paused, too: the last word counts.
                new = _TopicPause(now if former.since is None else former.since)
            else:
                since = former.partitions.get(partition, former.since)
                new = replace(former, partitions={**former.partitions, partition: now if since is None else since})
            self._topics = {**self._topics, topic: new}

    def resume(self, topic: str, partition: int | None = None) -> None:
        """Let a topic go on with all of its partitions, or one partition; raises as `pause`."""
        self._require(topic, partition)
        with self._lock:
            former = self._topics.get(topic)
            if former is None:
                return
            rest = {name: pause for name, pause in self._topics.items() if name != topic}
            if partition is not None:
                new = replace(former, partitions={**former.partitions, partition: None})
                if new.since is not None or any(since is not None for since in new.partitions.values()):
                    rest[topic] = new
            self._topics = rest

    def _require(self, topic: str, partition: int | None) -> None:
        known = self._consumed()
        # A topic that was deleted while it was paused can still be resumed.
        if topic not in known and topic not in self._topics:
            text = ", ".join(known) or "none yet"
            raise ConfigurationError(f"no handler of {self._group} consumes {topic!r}; its topics are: {text}")
        if partition is not None and (isinstance(partition, bool) or not isinstance(partition, int) or partition < 0):
            raise ConfigurationError(f"partition must be a number from 0 on, but is {partition!r}")

    def of(self, assignment: Assignment) -> AppPause | None:
        """Return the pause of a partition, or None where it is not paused.

        A retry topic is paused with its topic; with a partition of that it is not, for it mixes them.
        """
        topics = self._topics
        if not topics:
            return None
        source, number = assignment.route.source, assignment.partition
        topic = source or assignment.topic
        known = topics.get(topic)
        if known is None:
            return None
        if source is None and number in known.partitions:
            since, ended_by = known.partitions[number], f"running.resume({topic!r}, {number})"
        else:
            since, ended_by = known.since, f"running.resume({topic!r})"
        return None if since is None else AppPause(since, ended_by)
