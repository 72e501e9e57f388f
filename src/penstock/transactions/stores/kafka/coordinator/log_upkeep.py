"""Housekeeping of the half, op and done logs of the partitions owned: what of them is needed, and is it still there.

It deletes what lies below the checkpoints: half and op first, and of the done log only what speaks of nothing that is
left in those. It finds out that somebody else deleted what was needed, or made a topic again: then it says so, and the
partition is given up and taken over again from what is there. And it tells how far the half log goes to those that wait
for a half. Nothing here waits: brokers are asked, and their answers looked for later. What is in an answer was true at
some time after the question: that is what makes an end that was asked for worth more than one that a fetch brought
along.
"""

from __future__ import annotations

import logging
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

_log = logging.getLogger("penstock.transactions")

#: Seconds between two looks at the logs, and two deletions of what is not needed; and between two looks where somebody
#: waits for the answer.
UPKEEP_S = 5.0
_WAITED_FOR_INTERVAL_S = 0.2
#: Seconds that a broker may take to answer, and that a look may take in all, with what the library is late.
_ANSWER_S = 5.0
_CALL_LIMIT_S = 20.0

#: What was deleted, and the errors of what was refused.
_Deleted = tuple[dict[TopicPartition, Any], dict[TopicPartition, KafkaException]]
#: Where logs begin and end, by log and half partition.
_Bounds = Mapping[tuple[str, int], tuple[int, int]]


class _Asked(NamedTuple):
    """A partition as it was when the brokers were asked: how far it was read, and what was not needed any more."""

    partition: HalfPartition
    positions: Mapping[str, int]
    points: Mapping[str, int]


class _Look(NamedTuple):
    """A question to the brokers about partitions, by their numbers, and the answer to come."""

    asked_at: float
    asked: Mapping[int, _Asked]
    call: BackgroundCall[tuple[Offsets, Offsets, TopicIds]]


class LogUpkeep:
    """Tends the logs. Used by the coordinator's thread; never waits.

    Nothing is deleted for a while after it has `begun`, in monotonic seconds.
    """

    def __init__(self, context: CoordinatorContext, admin: AdminClient, *, begun: float = float("-inf")) -> None:
        self._context, self._ration = context, context.ration
        self._admin = admin
        self._names = names_of(context.topics)
        self._logs = {topic: log for log, topic in self._names.items()}
        self._looking: _Look | None = None
        self._asked_at, self._truncated_at = float("-inf"), begun
        # A deletion that is under way; it gives what was deleted, and what was refused.
        self._deleting: BackgroundCall[_Deleted] | None = None

    def look(self, owned: Mapping[int, HalfPartition], now: float) -> None:
        """Ask how far the logs go, now and then and where somebody waits for that; act upon the answer.

        Called often, also while a Kafka transaction is under way: that one knows where the done log ended as it began.
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

        # What is read since lies behind the ends that are found.
        asked = {number: _Asked(p, p.positions(), p.committed) for number, p in owned.items()}
        what = f"a look at the logs of {self._context.topics.prefix}"
        return _Look(now, asked, BackgroundCall(what, ask, _CALL_LIMIT_S, self._context.left))

    def _known(self, begins: Offsets, ends: Offsets, topics: TopicIds) -> tuple[_Bounds, Mapping[str, str]]:
        """Return bounds by log and half partition, and topic ids by log; say what brokers did not tell of."""
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
        """Take the answer to a look; return below which offsets nothing is needed of logs that are as they were."""
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
        """Tell whether logs of a partition are those that were read; else it is given up."""
        partition = asked.partition
        for log, (low, end) in bounds.items():
            topic_id = ids.get(log)
            is_other = topic_id is not None and partition.ids.get(log, topic_id) != topic_id
            is_cut = not is_other and asked.positions[log] > end
            # What was read since the question lies behind the end that was found.
            position = asked.positions[log] if is_cut else min(partition.needed_from(log), end)
            needed = Committed(position, low, end, {})
            fate = needed.fate(is_other=is_other or is_cut)
            if fate is not Fate.INTACT:
                # Where the end of the same topic was cut off, no position that is committed tells the next owner.
                self._context.counts.lost += is_cut
                partition.give_up(needed.explained(log, f"{self._names[log]}:{partition.number}", fate))
            elif topic_id is not None:
                partition.ids[log] = topic_id
        return not partition.is_given_up

    def _delete(self, points: list[TopicPartition]) -> BackgroundCall[_Deleted]:
        """Begin to delete what lies below these points."""

        def delete() -> _Deleted:
            return all_answered(self._admin.delete_records(points, request_timeout=_ANSWER_S), _ANSWER_S)

        what = f"trimming the logs of {self._context.topics.prefix}"
        return BackgroundCall(what, delete, _CALL_LIMIT_S, self._context.left)

    def _take_deletion(self) -> None:
        """Take in what became of a deletion: what failed is tried again, after some time."""
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
            what = f"topic {topic} cannot be truncated, so that what is settled stays in it and it grows"
            if not self._context.note_missing_right(refusal, what, topic_right(Operation.DELETE, topic)):
                text = "%s:%d cannot be truncated below offset %d: %s; what is settled stays in it; trying again"
                self._ration.warn(f"truncate {topic}", text, topic, place.partition, place.offset, reason(refusal))
