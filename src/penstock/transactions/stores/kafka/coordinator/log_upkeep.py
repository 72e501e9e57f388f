"""Log upkeep of owned partitions: truncates the half, op and done logs, and detects lost records and replaced topics.

It deletes records below the checkpoints: first of half and op, and of done only those that no record of half or op
needs. If another program deleted needed records or replaced a topic, it logs an error and gives the partition up, which
is then recovered from the present logs. It also looks up the end of the half log for decisions that wait for a half.

No method waits: brokers are asked, and the answer is processed later. An answer is true at some time after its request.
So the requested end of a log proves more than the end that came with a fetch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition

from penstock.clients.answers import all_answered
from penstock.clients.bounded_calls import BackgroundCall, NotAnsweredError
from penstock.clients.factory import AdminClient
from penstock.clients.kafka_errors import reason
from penstock.clients.rights import Operation, topic_right
from penstock.clients.topics import FIRST, LAST, Offsets, TopicIds, ask_offsets, ask_topic_ids
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition
from penstock.transactions.stores.kafka.logs.recovered_partition import (
    HALF,
    LOGS,
    OP,
    Committed,
    Fate,
    names_of,
)

#: Seconds between two looks at the logs, and between two deletions; and between two looks if a decision waits for one.
UPKEEP_S = 5.0
_WAITED_FOR_INTERVAL_S = 0.2
#: Seconds for a broker's answer; and for a whole look, including delays of the client library.
_ANSWER_S = 5.0
_CALL_LIMIT_S = 20.0

#: Deleted places, and refused places with their errors.
_Deleted = tuple[dict[TopicPartition, Any], dict[TopicPartition, KafkaException]]
#: First and end offsets by log and half partition.
_Bounds = Mapping[tuple[str, int], tuple[int, int]]


class _Asked(NamedTuple):
    """A partition at the time of the request: its read positions, and the offsets below which it needs no records."""

    partition: HalfPartition
    positions: Mapping[str, int]
    points: Mapping[str, int]


class _Look(NamedTuple):
    """A request to the brokers about partitions (by number), and its pending answer."""

    asked_at: float
    asked: Mapping[int, _Asked]
    call: BackgroundCall[tuple[Offsets, Offsets, TopicIds]]


class LogUpkeep:
    """Looks after the logs. Used by the coordinator's thread; never waits.

    The first deletion comes `UPKEEP_S` after `begun`, in monotonic seconds.
    """

    def __init__(self, context: CoordinatorContext, admin: AdminClient, *, begun: float = float("-inf")) -> None:
        self._context, self._ration = context, context.ration
        self._admin = admin
        self._names = names_of(context.topics)
        self._logs = {topic: log for log, topic in self._names.items()}
        self._looking: _Look | None = None
        self._asked_at, self._truncated_at = float("-inf"), begun
        # The running deletion.
        self._deleting: BackgroundCall[_Deleted] | None = None

    def look(self, owned: Mapping[int, HalfPartition], now: float) -> None:
        """Request the bounds of the logs if it is time or a decision waits for them; process the answer.

        Called often, also during a Kafka transaction, which has saved the end of the done log at its begin.
        """
        self._take_deletion()
        look = self._looking
        if look is None:
            is_wanted = any(partition.feed.wants_half_end(now) for partition in owned.values())
            if owned and now - self._asked_at >= (_WAITED_FOR_INTERVAL_S if is_wanted else UPKEEP_S):
                self._asked_at = now
                self._looking = self._ask(owned, now)
            return
        try:
            answer = look.call.answer()
        except (KafkaException, NotAnsweredError) as error:
            self._looking = None
            prefix = self._context.topics.prefix
            self._ration.warn("bounds", "the logs of %s cannot be looked at: %s", prefix, reason(error))
            return
        if answer is not None:
            self._looking = None
            unneeded = self._take(look, *self._known(*answer), owned)
            if unneeded and self._deleting is None and now - self._truncated_at >= UPKEEP_S:
                self._truncated_at = now
                self._deleting = self._delete(unneeded)

    def _ask(self, owned: Mapping[int, HalfPartition], now: float) -> _Look:
        places = [(topic, number) for topic in self._logs for number in owned]

        def ask() -> tuple[Offsets, Offsets, TopicIds]:
            lows, ends = (
                ask_offsets(self._admin, dict.fromkeys(places, spec), _ANSWER_S, IsolationLevel.READ_UNCOMMITTED)
                for spec in (FIRST, LAST)
            )
            return lows, ends, ask_topic_ids(self._admin, self._logs, _ANSWER_S)

        # Records read after the request may lie above the ends in the answer.
        asked = {number: _Asked(p, p.positions(), p.committed) for number, p in owned.items()}
        what = f"a look at the logs of {self._context.topics.prefix}"
        return _Look(now, asked, BackgroundCall(what, ask, _CALL_LIMIT_S, self._context.left))

    def _known(self, begins: Offsets, ends: Offsets, topics: TopicIds) -> tuple[_Bounds, Mapping[str, str]]:
        """Return bounds by log and half partition, and topic ids by log; log what is missing in the answers."""
        (lows, no_lows), (highs, no_highs) = begins, ends
        unknown = {f"{topic}:{number}": reason(why) for (topic, number), why in {**no_lows, **no_highs}.items()}
        for name, why in {**unknown, **topics.failures}.items():
            text = "it is not known where %s begins and ends: %s; asking again"
            self._ration.warn(f"bounds {name}", text, name, why)
        bounds = {
            (self._logs[topic], number): (low, highs[topic, number])
            for (topic, number), low in lows.items()
            if (topic, number) in highs
        }
        return bounds, {self._logs[name]: found for name, found in topics.ids.items()}

    def _take(
        self, look: _Look, bounds: _Bounds, ids: Mapping[str, str], owned: Mapping[int, HalfPartition]
    ) -> list[TopicPartition]:
        """Process the answer to a look; return the offsets below which intact logs can be truncated."""
        unneeded: list[TopicPartition] = []
        for number, asked in look.asked.items():
            partition = asked.partition
            if owned.get(number) is not partition:
                continue
            found = {log: bounds[log, number] for log in LOGS if (log, number) in bounds}
            if HALF in found:
                partition.feed.learn_half_end(found[HALF][1], look.asked_at)
            if self._are_intact(asked, found, ids) and len(found) == len(LOGS):
                partition.take_bounds(found, asked.positions[OP])
                unneeded += [
                    TopicPartition(self._names[log], number, point)
                    for log, point in asked.points.items()
                    if point > found[log][0]
                ]
        return unneeded

    def _are_intact(self, asked: _Asked, bounds: Mapping[str, tuple[int, int]], ids: Mapping[str, str]) -> bool:
        """Return whether the logs of a partition are intact; otherwise give the partition up."""
        partition = asked.partition
        for log, (low, end) in bounds.items():
            topic_id = ids.get(log)
            is_other = topic_id is not None and partition.ids.get(log, topic_id) != topic_id
            is_cut = not is_other and asked.positions[log] > end
            # Records read after the request may lie above the end in the answer.
            position = asked.positions[log] if is_cut else min(partition.needed_from(log), end)
            needed = Committed(position, low, end, {})
            fate = needed.fate(is_other=is_other or is_cut)
            if fate is not Fate.INTACT:
                # If the end of the same topic was truncated, no committed position shows it to the next owner.
                self._context.counts.lost += is_cut
                partition.give_up(needed.explained(log, f"{self._names[log]}:{partition.number}", fate))
            elif topic_id is not None:
                partition.ids[log] = topic_id
        return not partition.is_given_up

    def _delete(self, points: list[TopicPartition]) -> BackgroundCall[_Deleted]:
        """Start to delete the records below these offsets."""

        def delete() -> _Deleted:
            return all_answered(self._admin.delete_records(points, request_timeout=_ANSWER_S), _ANSWER_S)

        what = f"trimming the logs of {self._context.topics.prefix}"
        return BackgroundCall(what, delete, _CALL_LIMIT_S, self._context.left)

    def _take_deletion(self) -> None:
        """Process the result of a deletion; a failed deletion is repeated later."""
        try:
            answer = None if self._deleting is None else self._deleting.answer()
        except (KafkaException, NotAnsweredError) as error:
            self._deleting = None
            prefix = self._context.topics.prefix
            self._ration.warn("truncate", "the logs of %s cannot be truncated: %s", prefix, reason(error))
            return
        if answer is None:
            return
        self._deleting = None
        deleted, failed = answer
        self._context.rights.granted(*{topic_right(Operation.DELETE, place.topic) for place in deleted})
        for place, refusal in failed.items():
            topic = place.topic
            what = f"topic {topic} cannot be truncated, so that it grows"
            if not self._context.note_missing_right(refusal, what, topic_right(Operation.DELETE, topic)):
                text = "%s:%d cannot be truncated below offset %d: %s; trying again"
                self._ration.warn(f"truncate {topic}", text, topic, place.partition, place.offset, reason(refusal))
