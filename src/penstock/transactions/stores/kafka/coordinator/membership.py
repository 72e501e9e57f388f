"""The coordinator's group membership: its half partitions, and the reading of their half and op logs.

One consumer is a member of the coordinators' group and reads nothing, so that reading does not depend on the group
protocol. Other consumers read half and op of the same partitions (`log_feed`): no assignor would keep these together.
Other threads recover partitions (`logs.recovery`).
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

#: The client's errors after it lost a connection to a broker.
_CUT_OFF = frozenset({KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN})  # noqa: SLF001 - public constants look so
#: A fenced member joins again at most this often within this many seconds. If another process uses its instance name,
#: both join again and fence each other, until one of them reaches the limit and ends.
_REJOINS, _REJOIN_WINDOW_S = 3, 60.0
#: Seconds that a rebalance may take, unless the session time-out is longer.
_REBALANCE_BUDGET_S = 10.0
#: Heartbeats within the session time-out. Members learn of a rebalance with their next heartbeat.
_HEARTBEATS = 12
#: Milliseconds until the client fetches again after the loop has taken its records.
_FETCH_MS = 5


class Membership:
    """One coordinator's membership. Used by the coordinator's thread; its callbacks run there, too.

    Args:
        instance: the name of this member, the same after a restart: then it gets its partitions back at once.
        session_timeout_s: seconds after which a silent member loses its partitions.

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
        #: Recovers assigned partitions.
        self.recoveries = recoveries
        #: The partitions owned now. Changed by the coordinator's thread; other threads read a copy.
        self.owned: dict[int, HalfPartition] = {}
        # Whether a connection was lost since the last was_cut_off(). The callback runs on the coordinator's thread.
        self._was_cut_off = False
        # The user's own callback.
        self._error_cb: Callable[[KafkaError], object] | None = config.get("error_cb")
        # The times at which this member joined again after it was fenced.
        self._rejoined: deque[float] = deque(maxlen=_REJOINS)
        member: dict[str, Any] = {
            "topic.metadata.refresh.interval.ms": 10_000,
            "session.timeout.ms": int(session_timeout_s * 1000),
            "heartbeat.interval.ms": int(session_timeout_s * 1000) // _HEARTBEATS,
            # A rebalance waits this long for lost members, as after the restart of a broker: it keeps them, and may
            # not notice that their sessions end (seen with Kafka 4.2). The loop polls many times a second.
            "max.poll.interval.ms": int(max(session_timeout_s, _REBALANCE_BUDGET_S) * 1000),
            "partition.assignment.strategy": "cooperative-sticky",
            **config,
            "group.id": self._topics.coordinators,
            "enable.auto.commit": False,
            # The member reads nothing: there are no records at the end.
            "auto.offset.reset": "latest",
            "error_cb": self._on_error,
        }
        if instance is not None:
            member["group.instance.id"] = instance
        reader = {
            # An idle log answers ten times a second, so that the end of reading is soon known.
            "fetch.wait.max.ms": 100,
            # Fetch only after the loop has taken all fetched records. A fetch for each small batch of a producer would
            # cost the broker more than all other work.
            "queued.min.messages": 1,
            "fetch.queue.backoff.ms": _FETCH_MS,
            # A log without the next offset was truncated or replaced. That is an error; it is never skipped.
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
        """Take part in the group, and start to read recovered partitions. Does not wait.

        Raises `PenstockError` if another process uses this member's instance name.
        """
        message = self._member.poll(0)
        error = message.error() if message is not None else None
        # A fenced static member gets a message whose error is not marked fatal.
        if error is not None and (error.fatal() or error.code() == KafkaError._FATAL):  # noqa: SLF001 - the library's public constants look so
            self._rejoin(f"the coordinator is shut out of {self._topics.coordinators}: {reason(error)}")
            return
        if error is not None:
            self._context.note_unreadable(
                error, f"no partitions of {self._topics.half} are assigned", self._topics.half
            )
        for number, recovered in self.recoveries.found(time.monotonic()):
            self.owned[number] = HalfPartition(self._context, number, recovered)
            self.logs.add(number, recovered.starts[HALF], recovered.starts[OP])

    def give_up(self, number: int) -> None:
        """Recover an owned partition again. It must have no part in an open Kafka transaction."""
        self._forget([number])
        self.recoveries.begin([number])

    def _rejoin(self, what: str) -> None:
        """Join again with a new client, or raise `PenstockError` if another process uses the instance name.

        If the broker that coordinates the group fails or cannot write, it may know of a join of this member whose
        answer never arrived. Then it fences this member in favour of itself (seen with Kafka 4.3, librdkafka 2.16). A
        fenced client is unusable, so a new one joins; it owns nothing yet.
        """
        now = time.monotonic()
        if len(self._rejoined) == _REJOINS and now - self._rejoined[0] < _REJOIN_WINDOW_S:
            raise PenstockError(f"{what}; each coordinator that runs needs an instance name of its own")
        _log.warning("%s; it joins again", what)
        self._rejoined.append(now)
        fenced, self._member = self._member, self._make_member()
        self._forget([*self.owned, *self.recoveries.partitions])
        end_within(CLOSE_S, f"closing a member of {self._topics.coordinators}", fenced.close)
        self.join()

    def was_cut_off(self) -> bool:
        """Return whether a connection to a broker was lost since the last call."""
        was, self._was_cut_off = self._was_cut_off, False
        return was

    def _on_error(self, error: KafkaError) -> None:
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
        """Return the group metadata with which the broker fences a coordinator that lost its partitions.

        It matches `owned`: the client library waits for the revoke callback in `serve`, so the group's generation
        cannot change before `owned` has.
        """
        return self._member.consumer_group_metadata()

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_assign(partitions)
        consumer.pause(partitions)
        self.recoveries.begin(place.partition for place in partitions)

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if consumer is not self._member:
            return  # a fenced member that closes on another thread: its partitions are forgotten already
        self._forget(place.partition for place in partitions)
        consumer.incremental_unassign(partitions)

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.recoveries.forget(number)
            if self.owned.pop(number, None) is not None:
                self.logs.remove(number)
