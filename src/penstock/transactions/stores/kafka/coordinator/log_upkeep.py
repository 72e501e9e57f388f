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
from concurrent.futures import Future
from typing import Any, NamedTuple

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.clients.bounded_calls import BackgroundCall, NotAnsweredError
from penstock.clients.kafka_errors import reason
from penstock.clients.rights import Operation, topic_right
from penstock.clients.topics import FIRST, LAST, Offsets, TopicIds, ask_offsets, ask_topic_ids
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition
from penstock.transactions.stores.kafka.logs.recovered_partition import (
    DONE,
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


class _ReadTo(NamedTuple):
    """How far a partition was read when the brokers were asked, and what was not needed any more then."""

    partition: HalfPartition
    positions: Mapping[str, int]
    points: Mapping[str, int]


class _Look(NamedTuple):
    """A question to the brokers: how far the logs had been read when it was asked, and the answer to come."""

    asked_at: float
    read_to: Mapping[int, _ReadTo]
    call: BackgroundCall[tuple[Offsets, Offsets, TopicIds]]


class _Seen(NamedTuple):
    """What the brokers answered to a look: bounds by log and half partition, and topic ids by log."""

    read_to: Mapping[int, _ReadTo]
    bounds: Mapping[tuple[str, int], tuple[int, int]]
    ids: Mapping[str, str]


class LogUpkeep:
    """Tends the logs. Used by the coordinator's thread; never waits.

    Nothing is deleted for a while after it has `begun`, in monotonic seconds.
    """

    def __init__(self, context: CoordinatorContext, admin: AdminClient, *, begun: float = float("-inf")) -> None:
        self._context, self._ration = context, context.ration
        self._admin = admin
        self._names = names_of(context.topics)
        self._logs = {topic: log for log, topic in self._names.items()}
        # A look that is under way, and one that was not acted upon yet.
        self._looking: _Look | None = None
        self._seen: _Seen | None = None
        self._asked_at, self._truncated_at = float("-inf"), begun
        # Deletions under way, by log and partition: from whom, and below which offset.
        self._deleting: dict[tuple[str, int], tuple[HalfPartition, int, Future[Any]]] = {}

    def look(self, owned: Mapping[int, HalfPartition], now: float) -> None:
        """Ask how far the logs go where somebody waits for that, or it was not asked for some time; take the answer.

        Called often, also while a Kafka transaction is under way.
        """
        is_wanted = any(partition.feed.wants_look(now) for partition in owned.values())
        interval_s = _WAITED_FOR_INTERVAL_S if is_wanted else UPKEEP_S
        if owned and self._looking is None and now - self._asked_at >= interval_s:
            self._asked_at = now
            self._looking = self._ask(owned, now)
        look = self._looking
        if look is None:
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
            self._take(look, *answer, owned)

    def _ask(self, owned: Mapping[int, HalfPartition], now: float) -> _Look:
        places = [(topic, number) for topic in self._logs for number in owned]

        def ask() -> tuple[Offsets, Offsets, TopicIds]:
            lows, ends = (
                ask_offsets(self._admin, dict.fromkeys(places, spec), _ANSWER_S, IsolationLevel.READ_UNCOMMITTED)
                for spec in (FIRST, LAST)
            )
            return lows, ends, ask_topic_ids(self._admin, self._logs, _ANSWER_S)

        # What is read since lies behind the ends that are found.
        read_to = {number: _ReadTo(p, p.positions(), p.committed) for number, p in owned.items()}
        what = f"a look at the logs of {self._context.topics.prefix}"
        return _Look(now, read_to, BackgroundCall(what, ask, _CALL_LIMIT_S, self._context.left))

    def _take(
        self, look: _Look, begins: Offsets, bounded: Offsets, topics: TopicIds, owned: Mapping[int, HalfPartition]
    ) -> None:
        """Take the answer to a look."""
        (lows, no_lows), (ends, no_ends) = begins, bounded
        unknown = {f"{topic}:{number}": reason(why) for (topic, number), why in {**no_lows, **no_ends}.items()}
        for name, why in {**unknown, **topics.failures}.items():
            text = "it is not known where %s begins and ends: %s; asking again"
            self._ration.warn(f"bounds {name}", text, name, why)
        bounds = {
            (self._logs[topic], number): (low, ends[topic, number])
            for (topic, number), low in lows.items()
            if (topic, number) in ends
        }
        self._seen = _Seen(look.read_to, bounds, {self._logs[name]: found for name, found in topics.ids.items()})
        for number, asked in look.read_to.items():
            if (HALF, number) in bounds and owned.get(number) is asked.partition:
                asked.partition.feed.learn_half_end(bounds[HALF, number][1], look.asked_at)

    def maintain(self, owned: Mapping[int, HalfPartition], now: float) -> None:
        """Act upon the last answer, and delete what is not needed.

        Called while no Kafka transaction is under way or in doubt: where the done log ended when the answer came, all
        that it holds is known, and the positions that are committed next are those of the logs as they are now.
        """
        self._take_deletions(owned)
        seen, self._seen = self._seen, None
        if seen is None:
            return
        mine = {number: asked for number, asked in seen.read_to.items() if owned.get(number) is asked.partition}
        for number, asked in mine.items():
            self._compare(number, asked, seen)
        if now - self._truncated_at >= UPKEEP_S:
            self._truncated_at = now
            # Those alone whose logs are all known to be those that were read.
            self._truncate(
                {
                    number: asked
                    for number, asked in mine.items()
                    if not asked.partition.is_given_up and all((log, number) in seen.bounds for log in LOGS)
                }
            )

    def _compare(self, number: int, asked: _ReadTo, seen: _Seen) -> None:
        """Find out whether the logs of a partition are those that were read; give it up where one is not."""
        partition = asked.partition
        for log in LOGS:
            if (log, number) not in seen.bounds:
                continue
            low, end = seen.bounds[log, number]
            topic_id = seen.ids.get(log)
            is_other = topic_id is not None and partition.ids.get(log, topic_id) != topic_id
            is_cut = not is_other and asked.positions[log] > end
            # What was read since the question lies behind the end that was found.
            position = asked.positions[log] if is_cut else min(partition.needed_from(log), end)
            needed = Committed(position, low, end, {})
            fate = needed.fate(is_other=is_other or is_cut)
            if fate is not Fate.INTACT:
                # Where the end of the same topic was cut off, no position that is committed tells the next owner.
                self._context.counts.lost += is_cut
                partition.give_up(needed.explained(log, f"{self._names[log]}:{number}", fate))
                return
            if topic_id is not None:
                partition.ids[log] = topic_id
        if partition.state.held and (HALF, number) in seen.bounds:
            partition.sweep(seen.bounds[HALF, number][1], asked.positions[OP])
        if (DONE, number) in seen.bounds:
            partition.mark(seen.bounds[DONE, number][1])

    def _truncate(self, intact: Mapping[int, _ReadTo]) -> None:
        """Delete what was not needed when the logs were found to be as they were read, save where that is under way."""
        wanted = {
            TopicPartition(self._names[log], number, point): (log, number)
            for number, asked in intact.items()
            for log, point in asked.points.items()
            if point > asked.partition.truncated_to[log] and (log, number) not in self._deleting
        }
        if not wanted:
            return
        try:
            futures = self._admin.delete_records(list(wanted), request_timeout=_ANSWER_S)
        except KafkaException as error:
            prefix = self._context.topics.prefix
            self._ration.warn("truncate", "the logs of %s cannot be truncated: %s", prefix, reason(error))
            return
        for place, future in futures.items():
            log, number = wanted[place]
            self._deleting[log, number] = intact[number].partition, intact[number].points[log], future

    def _take_deletions(self, owned: Mapping[int, HalfPartition]) -> None:
        """Take in what became of deletions: what failed is tried again, after some time."""
        for log, number in [key for key, (_, _, future) in self._deleting.items() if future.done()]:
            partition, point, future = self._deleting.pop((log, number))
            topic = self._names[log]
            right = topic_right(Operation.DELETE, topic)
            try:
                future.result()
            except KafkaException as error:
                what = f"topic {topic} cannot be truncated, so that what is settled stays in it and it grows"
                if not self._context.lacks(error, what, right):
                    text = "%s:%d cannot be truncated below offset %d: %s; what is settled stays in it; trying again"
                    self._ration.warn(f"truncate {topic}", text, topic, number, point, reason(error))
            else:
                self._context.rights.granted(right)
                if owned.get(number) is partition:
                    partition.truncated(log, point)
