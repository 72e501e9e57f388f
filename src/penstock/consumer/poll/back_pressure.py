"""Back-pressure: whether more may be fetched now, and which partitions are paused, with the reason.

Pausing a partition makes the client throw away what it had fetched of it, so a brief saturation is met by not asking
for a moment; only a partition that stays full is paused. On the poll thread only.

The bytes of all are bounded together. Lest a topic that is throttled, or slow, take them all and stop the others, a
small share is kept free for each partition: one that holds less may fetch whatever the others hold.

What the app itself has paused (`AppPauses`) is paused here as well, at once, and separately from the limits: `limit`
says for which of them a partition is paused, `paused` why the client has it paused now.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from confluent_kafka import KafkaException, TopicPartition

from penstock.clients.cluster import Clock, ConsumerClient
from penstock.clients.kafka_errors import reason as why
from penstock.consumer.assignments import AppPause, Assignment, PauseReason
from penstock.consumer.settings import PARKED_SHARE
from penstock.errors import ConfigurationError
from penstock.offsets import MAX_METADATA_CHARS

_log = logging.getLogger(__name__)


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


#: Seconds a partition may be full before it is paused.
GRACE_S = 0.2
#: How many times its limit a partition may take in meanwhile, where others hold few: the client hands over one
#: partition after another, and what is next in its queue may be for them.
_OVER = 2

#: The part of all bytes that is kept free for partitions that hold little, each its even share of it.
_KEPT = 1 / 4

#: Offsets from the watermark on of which any pattern fits into the metadata, by the bitmap form of the map.
_MAP_ANY = 26_000
#: Messages that may be taken in at once on the strength of that, holes or not.
_MAP_ONCE = 10_000
#: Characters of the map that an open message may come to cost, at most about, when those around it are done: in a log
#: with holes, where the run lengths are deflated. In one without it is a bit of the bitmap.
_MAP_COST = 0.25
#: Offsets, and seconds, between two measurements of a map that might outgrow the metadata: one costs as much as a
#: commit.
_MAP_LOOK = 1_000
_MAP_LOOK_S = 0.1
#: Messages for which there must be room in the map: below the first the partition takes nothing in until the second.
_MAP_FULL = 1_000
_MAP_FREE = 2_000


@dataclass(slots=True)
class _Load:
    """What one partition holds."""

    assignment: Assignment
    #: In flight, parked ones left out.
    messages: int
    parked: int
    #: Whether it holds its even share of the bytes that are kept free.
    has_its_share: bool


@dataclass(slots=True)
class BackPressure:
    """Holds the limits, which any thread may change; they are those of `ConsumerSettings`."""

    max_in_flight: int
    max_in_flight_bytes: int
    _: KW_ONLY
    fetch_size: int
    #: Tells whether the app has paused a partition.
    is_paused_by_app: Callable[[Assignment], bool] = lambda _: False
    #: How many messages may be fetched now, by the last `apply`.
    fetch_limit: int = field(init=False)
    #: How many messages were in flight, parked ones included, at the last `apply`.
    in_flight: int = field(default=0, init=False)
    #: How often a partition was paused, by reason.
    pauses: dict[PauseReason, int] = field(default_factory=lambda: dict.fromkeys(PauseReason, 0), init=False)
    # Of all partitions, by the last `apply`: whether their bytes and their parked bytes are at the limit, and whether
    # some hold few messages.
    _bytes_full: bool = field(default=False, init=False)
    _parked_full: bool = field(default=False, init=False)
    _some_hold_few: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.fetch_limit = self.fetch_size

    def apply(self, client: ConsumerClient, assignments: Sequence[Assignment], now: float) -> bool:
        """Pause and resume what is due; return whether the caller may fetch now, or should ask again shortly."""
        self.fetch_limit = self.fetch_size
        may_fetch = True
        for load in self._measure(assignments):
            may_fetch = self._apply_to(client, load, now) and may_fetch
        return may_fetch

    def _measure(self, assignments: Sequence[Assignment]) -> list[_Load]:
        """Return what each partition holds, and note what all hold together."""
        # One byte at least: a partition that holds nothing may take a message in.
        share = max(1, int(self.max_in_flight_bytes * _KEPT) // max(1, len(assignments)))
        little = share
        taken = parked_bytes_of_all = messages = bytes_of_all = 0
        loads = []
        self._some_hold_few = False
        for assignment in assignments:
            in_flight, in_bytes, parked, parked_bytes, unsent_bytes = assignment.tracker.load()
            # In flight each message has the mean size of its fetch, parked it has its own. Small ones parked out of
            # large ones must not count as healthy for ever, nor large ones make room for others.
            healthy_bytes = max(0, in_bytes - max(parked_bytes, in_bytes * parked // max(1, in_flight)))
            healthy_bytes += unsent_bytes
            # What it does not hold of its share is kept for it.
            taken += max(share, healthy_bytes)
            if healthy_bytes < share:
                little = min(little, share - healthy_bytes)
            messages += in_flight
            bytes_of_all += in_bytes
            parked_bytes_of_all += parked_bytes
            has_its_share = healthy_bytes >= _limit(share, assignment, PauseReason.BYTES)
            loads.append(_Load(assignment, in_flight - parked, parked, has_its_share))
            self._some_hold_few = self._some_hold_few or in_flight - parked < self.max_in_flight // 2
        self.in_flight = messages
        # Half the limit again before resuming, so that a partition does not flap.
        self._bytes_full = taken >= max(1, self.max_in_flight_bytes // (2 if self._bytes_full else 1))
        if self._bytes_full:
            # Only those that hold little fetch now, and no more of them than their shares hold, by what is in flight.
            self.fetch_limit = max(1, min(self.fetch_limit, little * messages // max(1, bytes_of_all)))
        most_parked = self.max_in_flight_bytes // PARKED_SHARE
        self._parked_full = parked_bytes_of_all >= max(1, most_parked // (2 if self._parked_full else 1))
        return loads

    def _apply_to(self, client: ConsumerClient, load: _Load, now: float) -> bool:
        """Pause or resume one partition if that is due; return whether it lets the caller fetch now."""
        assignment = load.assignment
        may_fetch = self._note_limit(load, now)
        wanted = assignment.limit
        if self.is_paused_by_app(assignment):
            wanted, may_fetch = PauseReason.APP, True
        if wanted is None:
            if assignment.paused is not None:
                self._resume(client, assignment)
        elif assignment.paused is None or (wanted is PauseReason.APP and assignment.paused is not wanted):
            self.pause(client, assignment, wanted)
        else:
            assignment.paused = wanted
        return may_fetch

    def _note_limit(self, load: _Load, now: float) -> bool:
        """Note which limit a partition is to be paused for; return whether it lets the caller fetch now."""
        assignment = load.assignment
        reason = self._reason(load, now)
        if reason is None:
            assignment.full_since = assignment.limit = None
            return True
        if assignment.limit is not None:
            assignment.limit = reason
            return True
        if assignment.full_since is None:
            assignment.full_since = now
        if now - assignment.full_since >= GRACE_S:
            assignment.limit = reason
            return True
        return (
            reason is PauseReason.IN_FLIGHT
            and self._some_hold_few
            and load.messages < _OVER * self.max_in_flight
            and self._reason_beside_messages(load, now) is None
        )

    def _reason(self, load: _Load, now: float) -> PauseReason | None:
        if load.messages >= _limit(self.max_in_flight, load.assignment, PauseReason.IN_FLIGHT):
            return PauseReason.IN_FLIGHT
        return self._reason_beside_messages(load, now)

    def _reason_beside_messages(self, load: _Load, now: float) -> PauseReason | None:
        assignment, parked = load.assignment, load.parked
        if parked and (self._parked_full or parked >= _limit(self.max_in_flight, assignment, PauseReason.PARKED)):
            return PauseReason.PARKED
        room = _map_room(assignment, load.messages + parked, now, self.fetch_size)
        if room < (_MAP_FREE if assignment.limit is PauseReason.OFFSET_MAP else _MAP_FULL):
            return PauseReason.OFFSET_MAP
        self.fetch_limit = min(self.fetch_limit, room)
        return PauseReason.BYTES if self._bytes_full and load.has_its_share else None

    def pause_new(self, client: ConsumerClient, assignments: Sequence[Assignment]) -> None:
        """Pause those new assignments that the app has paused.

        And all where the bytes are full, or each would bring a fetch beyond them (I5).
        """
        for assignment in assignments:
            if self._bytes_full:
                assignment.limit = PauseReason.BYTES
            if self.is_paused_by_app(assignment):
                self.pause(client, assignment, PauseReason.APP)
            elif assignment.limit is not None:
                self.pause(client, assignment, assignment.limit)

    def pause(self, client: ConsumerClient, assignment: Assignment, reason: PauseReason) -> None:
        """Pause one partition for a named reason."""
        try:
            client.pause([TopicPartition(assignment.topic, assignment.partition)])
        except KafkaException as error:
            _log.warning("%s could not be paused: %s", assignment, why(error))
            return
        assignment.paused = reason
        self.pauses[reason] += 1
        _log.debug("%s is paused: %s", assignment, reason)

    def _resume(self, client: ConsumerClient, assignment: Assignment) -> None:
        try:
            client.resume([TopicPartition(assignment.topic, assignment.partition)])
        except KafkaException as error:
            _log.warning("%s could not be resumed, it is tried again: %s", assignment, why(error))
            return
        assignment.paused = None
        _log.debug("%s is resumed", assignment)


def _limit(limit: int, assignment: Assignment, reason: PauseReason) -> int:
    """Return a limit as it counts now: half of it for a partition that is paused because of it."""
    return max(1, limit // (2 if assignment.limit is reason else 1))


def _map_room(assignment: Assignment, in_flight: int, now: float, fetch_size: int) -> int:
    """Return how many messages may be taken in so that the map of what is done above the watermark fits into a commit.

    It must fit at every moment until they are done, whatever is done of them first: a map that is cut costs a replay of
    what was cut.
    """
    tracker = assignment.tracker
    position = tracker.position
    dense = _MAP_ANY - (position - tracker.watermark)
    if dense >= fetch_size:
        return dense
    if position - assignment.map_at >= _MAP_LOOK or now >= assignment.map_look:
        assignment.map_at = position
        assignment.map_look = now + _MAP_LOOK_S
        free = MAX_METADATA_CHARS - len(tracker.commit_point().metadata)
        assignment.map_room = int(free / _MAP_COST) - in_flight
    # What was in flight at that measurement was counted as open; what came since is counted by its offsets. In a log
    # with holes messages span more offsets than they are: not as many as `dense` may be taken at once.
    return max(min(dense, _MAP_ONCE), assignment.map_room - (position - assignment.map_at))
