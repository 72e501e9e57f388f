"""Which half partitions are this coordinator's, and the reading of their half and op logs.

One consumer is a member of the coordinators' group and reads nothing, so that reading never depends on the group's
protocol; others read half and op of the same partitions (`log_feed`), which no group assignor would keep together.
Partitions are recovered by other threads (`logs.recovery`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from penstock import clients
from penstock.clients.bounded_calls import CLOSE_S, end_within
from penstock.clients.kafka_errors import reason
from penstock.clients.reading import reading_settings
from penstock.errors import PenstockError
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition
from penstock.transactions.stores.kafka.coordinator.log_feed import LogReader
from penstock.transactions.stores.kafka.logs.recovered_partition import HALF, OP
from penstock.transactions.stores.kafka.logs.recovery import Recoveries

_log = logging.getLogger("penstock.transactions")

#: What the client says when brokers go away.
_CUT_OFF = frozenset({KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN})  # noqa: SLF001 - public constants look so
#: How often a member that is shut out comes back within so many seconds. Another process that has its name comes back,
#: too: the one that is shut out more often by then ends.
_COMES_BACK, _WITHIN_S = 3, 60.0
#: Seconds that a rebalance may take, if the session is not longer.
_REBALANCE_BUDGET_S = 10.0
#: Heartbeats in the time of a session: by its next one a member hears that another's partitions are to be shared.
_BEATS = 12
#: Milliseconds between two looks whether the loop has taken what was fetched.
_FETCH_MS = 5


class Membership:
    """One coordinator's membership. Used by the coordinator's thread; its callbacks run there, too.

    Args:
        instance: name of this member, the same after a restart: then it gets its partitions back at once.
        session_timeout_s: seconds after which a member that fell silent loses its partitions.

    Raises:
        ConfigurationError: the client library refused a setting.
    """

    def __init__(
        self,
        context: CoordinatorContext,
        recoveries: Recoveries,
        *,
        instance: str | None,
        session_timeout_s: float,
    ) -> None:
        self._context, self._topics = context, context.topics
        bootstrap_servers, config = context.bootstrap_servers, context.config
        #: The partitions that come to it.
        self.recoveries = recoveries
        #: The partitions owned now. Changed by the coordinator's thread; other threads read a copy.
        self.owned: dict[int, HalfPartition] = {}
        # Whether a connection to a broker was lost since somebody asked. The coordinator's thread serves the callback.
        self._was_cut_off = False
        # The user's own.
        self._error_cb: Callable[[KafkaError], object] | None = config.get("error_cb")
        # When this member came back after it was shut out.
        self._came_back: deque[float] = deque(maxlen=_COMES_BACK)
        member: dict[str, Any] = {
            "topic.metadata.refresh.interval.ms": 10_000,
            "session.timeout.ms": int(session_timeout_s * 1000),
            "heartbeat.interval.ms": int(session_timeout_s * 1000) // _BEATS,
            # So long a rebalance waits for members that are gone, as after the restart of a broker: it keeps them, and
            # may not see that their sessions end (Kafka 4.2, seen). The loop polls many times a second.
            "max.poll.interval.ms": int(max(session_timeout_s, _REBALANCE_BUDGET_S) * 1000),
            "partition.assignment.strategy": "cooperative-sticky",
            **config,
            "group.id": self._topics.coordinators,
            "enable.auto.commit": False,
            # The member reads nothing: the end is a place without records.
            "auto.offset.reset": "latest",
            "error_cb": self._hear,
        }
        if instance is not None:
            member["group.instance.id"] = instance
        reader = {
            # An idle log answers ten times a second, so that it is soon known that all of it was read.
            "fetch.wait.max.ms": 100,
            # Nothing is fetched before the loop has taken what is there: it takes it in pieces, a few milliseconds
            # apart, and a fetch for each small batch of a producer would cost the broker more than all the rest.
            "queued.min.messages": 1,
            "fetch.queue.backoff.ms": _FETCH_MS,
            # A log that does not have the next offset was cut or made again: that is looked into, never read past.
            "auto.offset.reset": "error",
            "enable.partition.eof": False,
        }
        settings = reading_settings(config, self._topics.coordinators, "read_uncommitted", reader)
        self._make_member = partial(clients.consumer, bootstrap_servers, member)
        self._member = self._make_member()
        #: The logs of the partitions owned.
        self.logs = LogReader(lambda: clients.consumer(bootstrap_servers, settings), self._topics)

    def join(self) -> None:
        """Join the group of coordinators."""
        self._member.subscribe(
            [self._topics.half], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )

    def serve(self) -> None:
        """Take part in the group, and start to read partitions whose recovery is finished. Does not wait.

        Raises `PenstockError` where the group has no place for this member any more: another took its instance name.
        """
        message = self._member.poll(0)
        error = message.error() if message is not None else None
        # A fenced static member hears of it in a message whose error is not marked fatal.
        if error is not None and (error.fatal() or error.code() == KafkaError._FATAL):  # noqa: SLF001 - the library's public constants look so
            self._shut_out(f"the coordinator is shut out of {self._topics.coordinators}: {reason(error)}")
            return
        if error is not None:
            self._context.note_unreadable(
                error, f"no partitions of {self._topics.half} are to be had", self._topics.half
            )
        for number, recovered in self.recoveries.found(time.monotonic()):
            self.owned[number] = HalfPartition(self._context, number, recovered)
            self.logs.add(number, recovered.starts[HALF], recovered.starts[OP])

    def give_up(self, number: int) -> None:
        """Have a partition recovered again that is owned. No Kafka transaction may be under way that has part in it."""
        self._forget([number])
        self.recoveries.begin([number])

    def _shut_out(self, what: str) -> None:
        """Come back, or raise `PenstockError` where another process has the instance name.

        When the node that coordinates the group goes, or cannot write, a join of this member may be known to it whose
        answer never came: then it shuts this member out for its own sake (Kafka 4.3, librdkafka 2.16, seen). A client
        that was shut out is of no use any more: another one joins, which owns nothing yet.
        """
        now = time.monotonic()
        if len(self._came_back) == _COMES_BACK and now - self._came_back[0] < _WITHIN_S:
            raise PenstockError(f"{what}; each coordinator that runs needs an instance name of its own")
        _log.warning("%s; it joins again", what)
        self._came_back.append(now)
        fenced, self._member = self._member, self._make_member()
        self._forget([*self.owned, *self.recoveries.partitions])
        end_within(CLOSE_S, f"closing a member of {self._topics.coordinators}", fenced.close)
        self.join()

    def was_cut_off(self) -> bool:
        """Tell whether a connection to a broker was lost since this was asked last."""
        was, self._was_cut_off = self._was_cut_off, False
        return was

    def _hear(self, error: KafkaError) -> None:
        if error.code() in _CUT_OFF:
            self._was_cut_off = True
        if self._error_cb is not None:
            self._error_cb(error)

    def leave(self) -> None:
        """Give all partitions up and leave the group."""
        self._member.close()
        self.logs.close()
        self.owned.clear()

    def group_metadata(self) -> Any:
        """Return the proof of membership that fences a coordinator whose partitions were given to another.

        It matches what `owned` says: the group's generation cannot move past a loss of partitions before `serve`
        has reported it, for the client library waits for the callback.
        """
        return self._member.consumer_group_metadata()

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_assign(partitions)
        consumer.pause(partitions)
        self.recoveries.begin(place.partition for place in partitions)

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if consumer is not self._member:
            return  # it was shut out, and closes on a thread of its own: what it had is forgotten already
        self._forget(place.partition for place in partitions)
        consumer.incremental_unassign(partitions)

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.recoveries.forget(number)
            if self.owned.pop(number, None) is not None:
                self.logs.remove(number)
