"""Back-pressure: limits on messages and bytes in flight, and the pauses of partitions, each with its reason.

If a partition is paused, the client drops the messages that it had fetched for it. So a short saturation only stops
fetching for a moment. A partition that stays full is paused. On the poll thread only.

All partitions share one limit of bytes. A throttled or slow topic must not take all bytes and stop the others, so a
small share is kept free for each partition. A partition below its share may fetch whatever the others hold.

The pauses of the app (`AppPauses`) are applied here too, at once and independent of the limits.
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
    """The pauses that the app has set. Any thread. Each change replaces the mapping, so readers need no lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Held by writers.
        self._lock = threading.Lock()
        # Start of each pause in seconds since the epoch, by topic and None. And by topic and partition, if that
        # partition was paused or resumed separately after its topic: None if it is not paused.
        self._since: Mapping[tuple[str, int | None], float | None] = {}

    def pause(self, topic: str, partition: int | None = None) -> None:
        """Pause a topic with all its present and later partitions, or one partition. A former pause keeps its start.

        Raises `ConfigurationError` if the topic is not consumed or the partition is no number.
        """
        self._change(topic, partition, self._engine.clock.time())

    def resume(self, topic: str, partition: int | None = None) -> None:
        """Resume a topic with all its partitions, or one partition; raises as `pause`."""
        self._change(topic, partition, None)

    def _change(self, topic: str, partition: int | None, since: float | None) -> None:
        known = self._engine.handlers
        # A topic that was deleted during its pause can still be resumed.
        if topic not in known and not any(paused == topic for paused, _ in self._since):
            text = ", ".join(known) or "none yet"
            raise ConfigurationError(f"no handler of {self._engine.group} consumes {topic!r}; its topics are: {text}")
        if partition is not None and (isinstance(partition, bool) or not isinstance(partition, int) or partition < 0):
            raise ConfigurationError(f"partition must be a number from 0 on, but is {partition!r}")
        with self._lock:
            former = _paused_since(self._since, topic, partition)
            # A change of the topic replaces the earlier changes of its partitions.
            changed = {place: at for place, at in self._since.items() if place[0] != topic or partition is not None}
            changed[topic, partition] = since if since is None or former is None else former
            is_paused = any(at is not None for place, at in changed.items() if place[0] == topic)
            self._since = {place: at for place, at in changed.items() if is_paused or place[0] != topic}

    def of(self, assignment: Assignment) -> AppPause | None:
        """Return the pause of a partition, or None.

        A retry topic is paused with its topic, but not with a single partition: it mixes their messages.
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
#: How far a partition may go over its limit in that time while others hold few messages: the client returns one
#: partition after another, and the next messages in its queue may be for the others.
_OVERSHOOT = 2

#: The part of all bytes that is kept free for partitions that hold little, an equal share for each.
_KEPT_PART = 1 / 4

#: Offsets from the watermark for which any pattern fits into the metadata, as a bitmap.
_MAP_ANY = 26_000
#: The most messages to take in at once within that range, with or without holes.
_MAP_ONCE = 10_000
#: Characters that an open message adds to the map, about at most, once its neighbours are done: in a log with holes,
#: where run lengths are deflated. In a log without holes it is one bit of the bitmap.
_MAP_COST = 0.25
#: Seconds between two measurements of a map that might outgrow the metadata: one costs as much as a commit.
_MAP_INTERVAL_S = 0.1
#: Messages that must fit into the map. Below the first number, the partition takes nothing in until the second.
_MAP_FULL = 1_000
_MAP_FREE = 2_000


class _Load(NamedTuple):
    assignment: Assignment
    #: Messages in flight without the parked ones.
    messages: int
    parked: int
    #: Whether it holds its share of the bytes that are kept free.
    has_its_share: bool


class BackPressure:
    """Applies the limits. `app_pause` returns the app's pause of a partition, or None."""

    def __init__(
        self, settings: ConsumerSettings, app_pause: Callable[[Assignment], AppPause | None] = lambda _: None
    ) -> None:
        #: As in the settings. Any thread may change them.
        self.max_in_flight = settings.max_in_flight
        self.max_in_flight_bytes = settings.max_in_flight_bytes
        self._fetch_size = settings.fetch_size
        self._app_pause = app_pause
        #: From the last `apply`: the messages that may be fetched, and those in flight, including parked ones.
        self.fetch_limit = settings.fetch_size
        self.in_flight = 0
        #: Number of pauses, by reason.
        self.pauses = {reason.value: 0 for reason in PauseReason}
        # From the last `apply`, over all partitions: whether bytes and parked bytes are at the limit, and whether some
        # partition holds few messages.
        self._bytes_full = False
        self._parked_full = False
        self._some_hold_few = False

    def apply(self, client: ConsumerClient, assignments: Sequence[Assignment], now: float) -> bool:
        """Pause and resume partitions; return whether the caller may fetch now. If not, it should ask again shortly."""
        self.fetch_limit = self._fetch_size
        may_fetch = True
        for load in self._measure(assignments):
            may_fetch = self._apply_to(client, load, now) and may_fetch
        return may_fetch

    def _measure(self, assignments: Sequence[Assignment]) -> list[_Load]:
        """Return the load of each partition, and note the total."""
        # At least one byte: an empty partition may take a message in.
        share = max(1, int(self.max_in_flight_bytes * _KEPT_PART) // max(1, len(assignments)))
        smallest_room = share
        reserved_bytes = all_parked_bytes = all_messages = all_bytes = 0
        loads = []
        self._some_hold_few = False
        for assignment in assignments:
            in_flight, in_bytes, parked, parked_bytes, unsent_bytes = assignment.tracker.load()
            # In flight, a message counts with the mean size of its fetch; parked, with its own. Parked small messages
            # must not leave large ones counted as healthy for ever, nor must large ones make room for others.
            healthy_bytes = max(0, in_bytes - max(parked_bytes, in_bytes * parked // max(1, in_flight)))
            healthy_bytes += unsent_bytes
            # The unused part of its share is kept for it.
            reserved_bytes += max(share, healthy_bytes)
            if healthy_bytes < share:
                smallest_room = min(smallest_room, share - healthy_bytes)
            all_messages += in_flight
            all_bytes += in_bytes
            all_parked_bytes += parked_bytes
            has_its_share = healthy_bytes >= _limit(share, assignment, PauseReason.BYTES)
            loads.append(_Load(assignment, in_flight - parked, parked, has_its_share))
            self._some_hold_few = self._some_hold_few or in_flight - parked < self.max_in_flight // 2
        self.in_flight = all_messages
        # Resume at half the limit, so that a partition does not flap.
        self._bytes_full = reserved_bytes >= max(1, self.max_in_flight_bytes // (2 if self._bytes_full else 1))
        if self._bytes_full:
            # Only partitions below their share fetch now. The limit is what fits into a share, by the mean size.
            self.fetch_limit = max(1, min(self.fetch_limit, smallest_room * all_messages // max(1, all_bytes)))
        most_parked = self.max_in_flight_bytes // PARKED_SHARE
        self._parked_full = all_parked_bytes >= max(1, most_parked // (2 if self._parked_full else 1))
        return loads

    def _apply_to(self, client: ConsumerClient, load: _Load, now: float) -> bool:
        """Pause or resume one partition if needed; return whether the caller may fetch."""
        assignment, wanted, may_fetch = load.assignment, self._reason(load, now), True
        since = now if assignment.full_since is None else assignment.full_since
        assignment.full_since = None if wanted is None else since
        if self._app_pause(assignment) is not None:
            wanted = PauseReason.APP
        elif wanted and assignment.paused is None and now - since < GRACE_S:
            may_fetch = self._some_hold_few and self._reason(load, now, over=_OVERSHOOT) is None
            wanted = None
        is_paused = assignment.paused is not None
        if is_paused and wanted not in (None, PauseReason.APP):
            assignment.paused = wanted
        elif wanted is not assignment.paused:
            self.set_pause(client, assignment, wanted)
        return may_fetch

    def _reason(self, load: _Load, now: float, over: int = 1) -> PauseReason | None:
        """Return the limit that a partition has reached, or None. `over` multiplies the limit of messages."""
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
        """Pause new assignments of topics that the app has paused.

        If the bytes are full, pause all new ones: each would bring a fetch beyond the limit (I5).
        """
        for assignment in assignments:
            if self._app_pause(assignment) is not None:
                self.set_pause(client, assignment, PauseReason.APP)
            elif self._bytes_full:
                self.set_pause(client, assignment, PauseReason.BYTES)

    def set_pause(self, client: ConsumerClient, assignment: Assignment, reason: PauseReason | None) -> None:
        """Pause a partition for a reason, or resume it with None. After an error the next call tries again."""
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
    """Return the current limit: half of it for a partition that is paused because of it."""
    return max(1, limit // (2 if assignment.paused is reason else 1))


def _map_room(assignment: Assignment, in_flight: int, now: float, fetch_size: int) -> int:
    """Return how many messages may be taken in so that the offset map always fits into the commit metadata.

    The map must fit in whatever order the messages become done: messages that are cut from a map are handled again.
    """
    tracker = assignment.tracker
    position = tracker.position
    dense = _MAP_ANY - (position - tracker.watermark)
    if dense >= fetch_size:
        return dense
    if now >= assignment.map_look:
        assignment.map_look = now + _MAP_INTERVAL_S
        free = MAX_METADATA_CHARS - len(tracker.commit_point().metadata)
        assignment.map_end = position + int(free / _MAP_COST) - in_flight
    # That measurement counted the messages in flight as open; later ones count by their offsets. In a log with holes,
    # messages span more offsets than their number: so not all of `dense` may be taken at once.
    return max(min(dense, _MAP_ONCE), assignment.map_end - position)
