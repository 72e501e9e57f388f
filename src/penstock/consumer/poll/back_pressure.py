"""Back-pressure: whether more may be fetched now, and which partitions are paused, with the reason.

Pausing a partition makes the client throw away what it had fetched of it, so a brief saturation is met by not asking
for a moment; only a partition that stays full is paused. On the poll thread only.

The bytes of all are bounded together. Lest a topic that is throttled, or slow, take them all and stop the others, a
small share is kept free for each partition: one that holds less may fetch whatever the others hold.

What the app itself has paused (`AppPauses`) is paused here as well, at once and whatever the limits are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaException, TopicPartition

from penstock.clients.cluster import ConsumerClient
from penstock.clients.kafka_errors import reason as why
from penstock.consumer.assignments import AppPause, Assignment, PauseReason
from penstock.consumer.engine import Engine
from penstock.consumer.settings import PARKED_SHARE, ConsumerSettings
from penstock.errors import ConfigurationError
from penstock.offsets import MAX_METADATA_CHARS

_log = logging.getLogger(__name__)


class AppPauses:
    """The pauses by the app. Any thread. Each change replaces the mapping, so that readers need no lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Taken by writers.
        self._lock = threading.Lock()
        # Since when a topic is paused, in seconds since the epoch, by the topic and None; and by a partition where that
        # was paused or resumed alone since: None where it is not paused.
        self._since: Mapping[tuple[str, int | None], float | None] = {}

    def pause(self, topic: str, partition: int | None = None) -> None:
        """Pause a topic, with what partitions it will have, or one partition. What is paused stays so since then.

        `ConfigurationError` where the topic is not consumed, or the partition is no number.
        """
        self._change(topic, partition, self._engine.clock.time())

    def resume(self, topic: str, partition: int | None = None) -> None:
        """Let a topic go on with all of its partitions, or one partition; raises as `pause`."""
        self._change(topic, partition, None)

    def _change(self, topic: str, partition: int | None, since: float | None) -> None:
        known = self._engine.handlers
        # A topic that was deleted while it was paused can still be resumed.
        if topic not in known and not any(paused == topic for paused, _ in self._since):
            text = ", ".join(known) or "none yet"
            raise ConfigurationError(f"no handler of {self._engine.group} consumes {topic!r}; its topics are: {text}")
        if partition is not None and (isinstance(partition, bool) or not isinstance(partition, int) or partition < 0):
            raise ConfigurationError(f"partition must be a number from 0 on, but is {partition!r}")
        with self._lock:
            former = _paused_since(self._since, topic, partition)
            # The last word on a topic counts for its partitions, too.
            changed = {place: at for place, at in self._since.items() if place[0] != topic or partition is not None}
            changed[topic, partition] = since if since is None or former is None else former
            is_paused = any(at is not None for place, at in changed.items() if place[0] == topic)
            self._since = {place: at for place, at in changed.items() if is_paused or place[0] != topic}

    def of(self, assignment: Assignment) -> AppPause | None:
        """Return the pause of a partition, or None where it is not paused.

        A retry topic is paused with its topic; with a partition of that it is not, for it mixes them.
        """
        paused = self._since
        if not paused:
            return None
        source = assignment.route.source
        topic, number = source or assignment.topic, None if source else assignment.partition
        since = _paused_since(paused, topic, number)
        if since is None:
            return None
        is_alone = number is not None and (topic, number) in paused
        return AppPause(since, f"running.resume({topic!r}, {number})" if is_alone else f"running.resume({topic!r})")


def _paused_since(
    paused: Mapping[tuple[str, int | None], float | None], topic: str, partition: int | None
) -> float | None:
    return paused.get((topic, partition), paused.get((topic, None)))


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
#: Seconds between two measurements of a map that might outgrow the metadata: one costs as much as a commit.
_MAP_LOOK_S = 0.1
#: Messages for which there must be room in the map: below the first the partition takes nothing in until the second.
_MAP_FULL = 1_000
_MAP_FREE = 2_000


class _Load(NamedTuple):
    """What one partition holds."""

    assignment: Assignment
    #: In flight, parked ones left out.
    messages: int
    parked: int
    #: Whether it holds its even share of the bytes that are kept free.
    has_its_share: bool


class BackPressure:
    """Holds the limits; `app_pause` returns the app's own pause of a partition, or None."""

    def __init__(
        self, settings: ConsumerSettings, app_pause: Callable[[Assignment], AppPause | None] = lambda _: None
    ) -> None:
        #: As in the settings. Any thread may change them.
        self.max_in_flight = settings.max_in_flight
        self.max_in_flight_bytes = settings.max_in_flight_bytes
        self._fetch_size = settings.fetch_size
        self._app_pause = app_pause
        #: How many messages may be fetched now, and how many were in flight, parked ones included, by the last `apply`.
        self.fetch_limit = settings.fetch_size
        self.in_flight = 0
        #: How often a partition was paused, by reason.
        self.pauses = {reason.value: 0 for reason in PauseReason}
        # Of all partitions, by the last `apply`: whether their bytes and their parked bytes are at the limit, and
        # whether some hold few messages.
        self._bytes_full = False
        self._parked_full = False
        self._some_hold_few = False

    def apply(self, client: ConsumerClient, assignments: Sequence[Assignment], now: float) -> bool:
        """Pause and resume what is due; return whether the caller may fetch now, or should ask again shortly."""
        self.fetch_limit = self._fetch_size
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
        assignment, wanted, may_fetch = load.assignment, self._reason(load, now), True
        since = now if assignment.full_since is None else assignment.full_since
        assignment.full_since = None if wanted is None else since
        if self._app_pause(assignment) is not None:
            wanted = PauseReason.APP
        elif wanted and assignment.paused is None and now - since < GRACE_S:
            may_fetch = self._some_hold_few and self._reason(load, now, over=_OVER) is None
            wanted = None
        is_paused = assignment.paused is not None
        if is_paused and wanted not in (None, PauseReason.APP):
            assignment.paused = wanted
        elif wanted is not assignment.paused:
            self.set_pause(client, assignment, wanted)
        return may_fetch

    def _reason(self, load: _Load, now: float, over: int = 1) -> PauseReason | None:
        """Return the limit that a partition is at; of messages it may hold `over` times as many."""
        assignment, parked = load.assignment, load.parked
        if load.messages >= over * _limit(self.max_in_flight, assignment, PauseReason.IN_FLIGHT):
            return PauseReason.IN_FLIGHT
        if parked and (self._parked_full or parked >= _limit(self.max_in_flight, assignment, PauseReason.PARKED)):
            return PauseReason.PARKED
        room = _map_room(assignment, load.messages + parked, now, self._fetch_size)
        if room < (_MAP_FREE if assignment.paused is PauseReason.OFFSET_MAP else _MAP_FULL):
            return PauseReason.OFFSET_MAP
        self.fetch_limit = min(self.fetch_limit, room)
        return PauseReason.BYTES if self._bytes_full and load.has_its_share else None

    def pause_new(self, client: ConsumerClient, assignments: Sequence[Assignment]) -> None:
        """Pause those new assignments that the app has paused.

        And all where the bytes are full, or each would bring a fetch beyond them (I5).
        """
        for assignment in assignments:
            if self._app_pause(assignment) is not None:
                self.set_pause(client, assignment, PauseReason.APP)
            elif self._bytes_full:
                self.set_pause(client, assignment, PauseReason.BYTES)

    def set_pause(self, client: ConsumerClient, assignment: Assignment, reason: PauseReason | None) -> None:
        """Pause one partition for a named reason; with None resume it. What fails is tried again at the next call."""
        place = [TopicPartition(assignment.topic, assignment.partition)]
        try:
            if reason is None:
                client.resume(place)
            else:
                client.pause(place)
        except KafkaException as error:
            _log.warning("%s could not be paused or resumed, it is tried again: %s", assignment, why(error))
            return
        assignment.paused = reason
        if reason is not None:
            self.pauses[reason.value] += 1
        _log.debug("%s is paused: %s", assignment, reason)


def _limit(limit: int, assignment: Assignment, reason: PauseReason) -> int:
    """Return a limit as it counts now: half of it for a partition that is paused because of it."""
    return max(1, limit // (2 if assignment.paused is reason else 1))


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
    if now >= assignment.map_look:
        assignment.map_look = now + _MAP_LOOK_S
        free = MAX_METADATA_CHARS - len(tracker.commit_point().metadata)
        assignment.map_end = position + int(free / _MAP_COST) - in_flight
    # What was in flight at that measurement was counted as open; what came since is counted by its offsets. In a log
    # with holes messages span more offsets than they are: not as many as `dense` may be taken at once.
    return max(min(dense, _MAP_ONCE), assignment.map_end - position)
