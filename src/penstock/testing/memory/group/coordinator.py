"""The coordinator of all groups: stores commits, and keeps requests that are delayed or cannot reach it.

A request is a function that is called when the request arrives. It arrives at once, unless a fault delays it, its
client is cut off, or the coordinator is unavailable. So a late commit is checked against the generation at its arrival.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaError

from penstock.testing.memory import codes
from penstock.testing.memory.clock import TestClock
from penstock.testing.memory.faults import Effect, Fault
from penstock.testing.memory.group.group import Group, Member
from penstock.testing.memory.log import Place

#: Characters of commit metadata that Kafka accepts; 4.3 refuses its own `offset.metadata.max.bytes` of 4,096.
MAX_METADATA = 4_095


@dataclass(frozen=True, slots=True)
class Commit:
    """One accepted commit of one partition."""

    #: Time of the commit, in seconds of the clock's `monotonic`.
    time: float
    #: Id of the member; empty for a client outside the group.
    member: str
    #: Generation of the member.
    generation: int
    topic: str
    partition: int
    offset: int
    #: Metadata of the commit.
    metadata: str | None


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """A commit in flight, sent by one member in one generation."""

    group: str
    member: Member | None
    generation: int
    points: Sequence[tuple[str, int, int, str | None]]


class Coordinator:
    """The coordinator of all groups. The broker's lock guards it."""

    def __init__(
        self,
        clock: TestClock,
        logs: Container[Place],
        places: Callable[[Iterable[str]], list[Place]],
        chance: random.Random,
    ) -> None:
        self._clock = clock
        self._exists, self._places = logs, places
        self._chance = chance
        self.groups: dict[str, Group] = {}
        #: The last commit of each partition, by group; and all of them, in order.
        self.offsets: dict[str, dict[Place, Commit]] = {}
        self.history: dict[str, list[Commit]] = {}
        self._numbers = itertools.count(1)
        self._late: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._held: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        #: End of its unavailability, in the past if it is available.
        self.away_until = float("-inf")

    def group(self, name: str) -> Group:
        """Return a group, which is empty if it is new."""
        if name not in self.groups:
            self.groups[name] = Group(name, self._places, self._chance)
        return self.groups[name]

    def new_name(self) -> str:
        """Return the id of a new member."""
        return f"member-{next(self._numbers)}"

    @property
    def away(self) -> bool:
        """Whether it is unavailable now."""
        return self._clock.monotonic() < self.away_until

    def tick(self, now: float) -> None:
        """Process the events that are due, in order of time: requests arrive, sessions end."""
        while self._late and self._late[0][0] <= now:
            due, _, arrive = heapq.heappop(self._late)
            self._expire(due)
            arrive()
        self._expire(now)
        if self._held and not self.away:
            ready, self._held = self._held, []
            for blocked, arrive in ready:
                if blocked():
                    self._held.append((blocked, arrive))
                else:
                    arrive()

    def _expire(self, now: float) -> None:
        if now < self.away_until:
            return
        for group in self.groups.values():
            group.expire(now)

    def next_due(self) -> float:
        """Return the time of the next event that only needs the clock, or infinity."""
        due = self._late[0][0] if self._late else float("inf")
        return min(due, self.away_until) if self.away else due

    def later(self, seconds: float, arrive: Callable[[], object]) -> None:
        """Call `arrive` in the first `tick` after these seconds of the clock."""
        heapq.heappush(self._late, (self._clock.monotonic() + seconds, next(self._order), arrive))

    def hold(self, blocked: Callable[[], bool], arrive: Callable[[], object]) -> None:
        """Call `arrive` as soon as the coordinator is available and `blocked` returns false."""
        self._held.append((blocked, arrive))

    def deliver(
        self,
        fault: Fault | None,
        execute: Callable[[], KafkaError | None],
        answer: Callable[[KafkaError | None], object],
    ) -> None:
        """Execute and answer a request now, or as its fault says."""
        if fault is None:
            answer(execute())
        elif fault.effect is Effect.REFUSED:
            answer(fault.error)
        elif fault.effect is Effect.ARRIVES_LATE:
            self.later(fault.seconds, lambda: answer(execute()))
        else:
            error = execute()
            if fault.effect is Effect.ANSWER_LOST:
                answer(fault.error)
            elif fault.effect is Effect.ANSWER_LATE:
                self.later(fault.seconds, lambda: answer(error))
            else:
                answer(error)
                self.later(fault.seconds, execute)

    def accept(self, request: CommitRequest) -> int | None:
        """Accept a commit. Return an error code if any part of it is refused, else None."""
        refusal = self._refusal(request)
        return self.store(request) if refusal is None else refusal

    def store(self, request: CommitRequest) -> int | None:
        """Store the offsets of a commit from a valid member; returns the same as `accept`."""
        offsets = self.offsets.setdefault(request.group, {})
        history = self.history.setdefault(request.group, [])
        now, member = self._clock.monotonic(), request.member.name if request.member is not None else ""
        error = None
        for topic, partition, offset, metadata in request.points:
            if (topic, partition) not in self._exists:
                error = error or codes.UNKNOWN_TOPIC_OR_PARTITION
            elif metadata is not None and len(metadata) > MAX_METADATA:
                error = error or codes.METADATA_TOO_LARGE
            else:
                made = Commit(now, member, request.generation, topic, partition, offset, metadata)
                offsets[topic, partition] = made
                history.append(made)
        return error

    def _refusal(self, request: CommitRequest) -> int | None:
        group, member = self.group(request.group), request.member
        if member is None:
            return codes.UNKNOWN_MEMBER_ID if group.members else None
        if member.gone is not None:
            return codes.UNKNOWN_MEMBER_ID
        return codes.ILLEGAL_GENERATION if request.generation != group.generation else None

    def topic_changed(self, topic: str) -> None:
        """Rebalance the groups that read a topic, and delete the offsets of its deleted partitions."""
        self.forget_offsets(topic, still=self._exists)
        for group in self.groups.values():
            if any(topic in member.topics for member in group.members.values()):
                group.rebalance()

    def forget_offsets(self, topic: str, still: Container[Place] = ()) -> None:
        """Delete the groups' offsets in a topic, except those of the partitions in `still`."""
        for offsets in self.offsets.values():
            for place in [place for place in offsets if place[0] == topic and place not in still]:
                del offsets[place]
