"""Housekeeping of the half, op and done logs of the partitions owned: what of them is needed, and is it still there.

It deletes what lies below the checkpoints: half and op first, and of the done log only what speaks of nothing that is
left in those. It finds out that somebody else deleted what was needed, or made a topic again: then it says so, and the
partition is given up and taken over again from what is there. And it tells how far the half log goes to those that wait
for a half. Nothing here waits: brokers are asked on a thread, and their answers looked for later.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.clients.bounded_calls import BackgroundCall, NotAnsweredError
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import Operation, topic_right
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition
from penstock.transactions.stores.kafka.coordinator.log_feed import LogReader
from penstock.transactions.stores.kafka.logs.recovered_partition import (
    DONE,
    HALF,
    LOGS,
    OP,
    Committed,
    Fate,
    explained,
    fate_of,
)
from penstock.transactions.stores.kafka.logs.topic_lookup import ANSWER_S, Look, look_at_logs

_log = logging.getLogger("penstock.transactions")

#: Seconds between two looks at the logs, and two deletions of what is not needed.
UPKEEP_S = 5.0
#: Op records that may wait for a half before no more are read; the leader of its log may be away for long.
_WAITING = 20_000
#: Seconds between two looks where somebody waits for the answer, and after which one is abandoned.
_WAITED_FOR_INTERVAL_S = 0.2
_CALL_LIMIT_S = 3 * ANSWER_S


class _Asked(NamedTuple):
    """How far a partition was read when the brokers were asked, and what was not needed any more then."""

    partition: HalfPartition
    positions: Mapping[str, int]
    points: Mapping[str, int]


class LogUpkeep:
    """Tends the logs. Used by the coordinator's thread; never waits.

    Nothing is deleted for a while after it has `begun`, in monotonic seconds.
    """

    def __init__(
        self, context: CoordinatorContext, admin: AdminClient, logs: LogReader, *, begun: float = float("-inf")
    ) -> None:
        self._topics = topics = context.topics
        self._counts, self._ration = context.counts, context.ration
        self._rights, self._left = context.rights, context.left
        self._admin = admin
        self._names = {HALF: topics.half, OP: topics.op, DONE: topics.done}
        self._logs = logs
        # A look that is under way, and one that was not acted upon yet, each with how far the logs had been read when
        # it began: what is read since lies behind the ends that it finds.
        self._looking: tuple[BackgroundCall[Look], Mapping[int, _Asked]] | None = None
        self._seen: tuple[Look, Mapping[int, _Asked]] | None = None
        self._asked_at, self._truncated_at = float("-inf"), begun
        # Partitions whose ops are not read on.
        self._paused: dict[int, HalfPartition] = {}
        # Deletions under way, by log and partition: from whom, and below which offset.
        self._deleting: dict[tuple[str, int], tuple[HalfPartition, int, Future[Any]]] = {}

    def look(self, owned: Mapping[int, HalfPartition], now: float) -> None:
        """Ask how far the logs go where somebody waits for that, or it was not asked for some time; take the answer.

        Called often, also while a Kafka transaction is under way.
        """
        if self._looking is not None:
            self._take_look(*self._looking, owned)
        self._bound_waiting(owned)
        is_wanted = any(partition.feed.wants_look(now) for partition in owned.values())
        if (
            owned
            and self._looking is None
            and now - self._asked_at >= (_WAITED_FOR_INTERVAL_S if is_wanted else UPKEEP_S)
        ):
            self._asked_at = now
            asked = {number: _Asked(p, p.positions(), p.committed) for number, p in owned.items()}
            look = partial(look_at_logs, self._admin, self._topics, list(owned))
            self._looking = (
                BackgroundCall(f"a look at the logs of {self._topics.prefix}", look, _CALL_LIMIT_S, self._left),
                asked,
            )

    def _take_look(
        self, call: BackgroundCall[Look], asked: Mapping[int, _Asked], owned: Mapping[int, HalfPartition]
    ) -> None:
        """Take the answer of a look, if it is there."""
        try:
            look = call.answer()
        except (KafkaException, NotAnsweredError) as error:
            text = reason(error) if isinstance(error, KafkaException) else error
            self._ration.warn("bounds", "the logs of %s cannot be looked at: %s", self._topics.prefix, text)
            self._looking = None
            return
        if look is None:
            return
        self._looking, self._seen = None, (look, asked)
        for name, why in look.failures.items():
            text = "it is not known where %s begins and ends: %s; asking again"
            self._ration.warn(f"bounds {name}", text, name, why)
        for number, partition in owned.items():
            bounds = look.bounds.get((HALF, number))
            if bounds is not None and number in asked and asked[number].partition is partition:
                partition.feed.learn_half_end(bounds.end, look.asked_at)

    def _bound_waiting(self, owned: Mapping[int, HalfPartition]) -> None:
        """Read no more ops of a partition while many wait for halves, or they would fill the memory."""
        for number, partition in owned.items():
            is_paused = self._paused.get(number) is partition
            if partition.feed.waiting >= _WAITING and not is_paused:
                self._paused[number] = partition
                self._logs.pause_ops(number)
            elif is_paused and partition.feed.waiting <= _WAITING // 2:
                del self._paused[number]
                self._logs.resume_ops(number)

    def maintain(self, owned: Mapping[int, HalfPartition], now: float) -> None:
        """Act upon the last answer, and delete what is not needed.

        Called while no Kafka transaction is under way or in doubt: where the done log ended when the answer came, all
        that it holds is known, and the positions that are committed next are those of the logs as they are now.
        """
        self._take_deletions(owned)
        seen, self._seen = self._seen, None
        if seen is None:
            return
        look, read_to = seen
        mine = {number: asked for number, asked in read_to.items() if owned.get(number) is asked.partition}
        for number, asked in mine.items():
            self._compare(number, asked, look)
        if now - self._truncated_at >= UPKEEP_S:
            self._truncated_at = now
            self._truncate({number: asked for number, asked in mine.items() if _is_intact(number, asked, look)})

    def _compare(self, number: int, asked: _Asked, look: Look) -> None:
        """Find out whether the logs of a partition are those that were read; give it up where one is not."""
        partition = asked.partition
        for log in LOGS:
            bounds, topic_id = look.bounds.get((log, number)), look.ids.get(log)
            if bounds is None:
                continue
            is_other = topic_id is not None and partition.ids.get(log, topic_id) != topic_id
            is_cut = not is_other and asked.positions[log] > bounds.end
            # What was read since the question lies behind the end that was found.
            position = asked.positions[log] if is_cut else min(partition.needed_from(log), bounds.end)
            needed = Committed(position, *bounds, {})
            fate = fate_of(*needed[:3], is_other=is_other or is_cut)
            if fate is not Fate.INTACT:
                # Where the end of the same topic was cut off, no position that is committed tells the next owner.
                self._counts.lost += is_cut
                self.give_up(partition, explained(log, f"{self._names[log]}:{number}", needed, fate))
                return
            if topic_id is not None:
                partition.ids[log] = topic_id
        half, done = look.bounds.get((HALF, number)), look.bounds.get((DONE, number))
        if half is not None and partition.state.held:
            partition.sweep(half.end, asked.positions[OP])
        if done is not None:
            partition.mark(done.end)

    def give_up(self, partition: HalfPartition, why: str) -> None:
        """Have a partition taken over again: a log of it is not as it was read."""
        if not partition.is_given_up:
            partition.is_given_up = True
            _log.error(
                "half partition %d is given up, and taken over again from what its logs hold now: %s",
                partition.number,
                why,
            )

    def _truncate(self, intact: Mapping[int, _Asked]) -> None:
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
            futures = self._admin.delete_records(list(wanted), request_timeout=ANSWER_S)
        except KafkaException as error:
            self._ration.warn("truncate", "the logs of %s cannot be truncated: %s", self._topics.prefix, reason(error))
            return
        for place, future in futures.items():
            log, number = wanted[place]
            self._deleting[log, number] = intact[number].partition, intact[number].points[log], future

    def _take_deletions(self, owned: Mapping[int, HalfPartition]) -> None:
        """Take in what became of deletions: what failed is tried again, after some time."""
        for key in [key for key, (_, _, future) in self._deleting.items() if future.done()]:
            partition, point, future = self._deleting.pop(key)
            log, number = key
            try:
                future.result()
            except KafkaException as error:
                self._tell_not_deleted(self._names[log], number, point, error)
            else:
                self._rights.granted(topic_right(Operation.DELETE, self._names[log]))
                if owned.get(number) is partition:
                    partition.truncated(log, point)

    def _tell_not_deleted(self, topic: str, number: int, point: int, error: KafkaException) -> None:
        if is_missing_right(error):
            what = f"topic {topic} cannot be truncated, so that what is settled stays in it and it grows"
            self._rights.refused(what, topic_right(Operation.DELETE, topic))
            return
        what = "what is settled stays in it, and it grows; it is tried again"
        text = "%s:%d cannot be truncated below offset %d: %s; %s"
        self._ration.warn(f"truncate {topic}", text, topic, number, point, reason(error), what)


def _is_intact(number: int, asked: _Asked, look: Look) -> bool:
    """Tell whether all logs of a partition are known to be those that were read."""
    return not asked.partition.is_given_up and all((log, number) in look.bounds for log in LOGS)
