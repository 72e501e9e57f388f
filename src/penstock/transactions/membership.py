"""Which half partitions are this coordinator's, and the reading of their half and op logs.

One consumer is a member of the coordinators' group and reads nothing, so that reading never depends on the group's
protocol; others read half and op of the same partitions (`two_logs`), which no group assignor would keep together.
Taking partitions over has a thread of its own, for it may have to wait for a predecessor's transaction to end, and the
other partitions shall not.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.config import ClientConfig
from penstock.errors import PenstockError, StoppedError
from penstock.kafka import base_config, client_refused, reason
from penstock.transactions.owned import OwnedPartition
from penstock.transactions.takeover import Inheritance, LogReader
from penstock.transactions.topics import StoreTopics
from penstock.transactions.two_logs import TwoLogs

_log = logging.getLogger("penstock.transactions")

_BACK_OFF_S = 0.2
#: What the client says when brokers go away.
_CUT_OFF = frozenset({KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN})  # noqa: SLF001 - public constants look so
#: Heartbeats in the time of a session: by its next one a member hears that another's partitions are to be shared.
_BEATS = 12


class Membership:
    """One coordinator's membership. Used by the coordinator's thread; its callbacks run there, too.

    Args:
        bootstrap_servers: Kafka's addresses.
        config: settings of consumers, by librdkafka's names.
        topics: the store's topics.
        logs: finds out what a partition was left with.
        own: makes the object that drives a partition taken over.
        stopping: set when the coordinator ends.
        instance: name of this member, the same after a restart: then it gets its partitions back at once.
        session_timeout_s: seconds after which a member that fell silent loses its partitions.

    Raises:
        ConfigurationError: the client library refused a setting.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        config: ClientConfig,
        *,
        topics: StoreTopics,
        logs: LogReader,
        own: Callable[[int, Inheritance], OwnedPartition],
        stopping: threading.Event,
        instance: str | None,
        session_timeout_s: float,
    ) -> None:
        self._topics = topics
        self._inheritances = logs
        self._own = own
        self._stopping = stopping
        #: The partitions owned now. Changed by the coordinator's thread; other threads read a copy.
        self.owned: dict[int, OwnedPartition] = {}
        # Partitions being taken over, each with the token of that assignment: what comes back with another is stale.
        self._taking: dict[int, object] = {}
        # Whether a connection to a broker was lost since somebody asked. The coordinator's thread serves the callback.
        self._was_cut_off = False
        # Filled by the take-over threads, emptied by the coordinator's.
        self._taken: queue.SimpleQueue[tuple[int, object, Inheritance]] = queue.SimpleQueue()
        common = {
            **base_config(bootstrap_servers, config),
            "group.id": topics.coordinators,
            "enable.auto.commit": False,
        }
        member: dict[str, Any] = {
            "topic.metadata.refresh.interval.ms": 10_000,
            "session.timeout.ms": int(session_timeout_s * 1000),
            "heartbeat.interval.ms": int(session_timeout_s * 1000) // _BEATS,
            "partition.assignment.strategy": "cooperative-sticky",
            **common,
            # The member reads nothing: the end is a place without records.
            "auto.offset.reset": "latest",
            "error_cb": self._hear,
        }
        if instance is not None:
            member["group.instance.id"] = instance
        reader = {
            # An idle log answers ten times a second, so that it is soon known that all of it was read.
            "fetch.wait.max.ms": 100,
            **common,
            # A log that does not have the next offset was cut or made again: that is looked into, never read past.
            "auto.offset.reset": "error",
            "isolation.level": "read_uncommitted",
        }
        reader.pop("group.instance.id", None)
        try:
            self._member = Consumer(member)
            #: The logs of the partitions owned.
            self.logs = TwoLogs(reader, topics)
        except KafkaException as error:
            raise client_refused(error) from error

    def join(self) -> None:
        """Join the group of coordinators."""
        self._member.subscribe(
            [self._topics.half], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )

    def serve(self) -> None:
        """Take part in the group, and start to read partitions whose take-over is finished. Does not wait.

        Raises:
            PenstockError: the group has no place for this member any more: another took its instance name.
        """
        message = self._member.poll(0)
        error = message.error() if message is not None else None
        # A fenced static member hears of it in a message whose error is not marked fatal.
        if error is not None and (error.fatal() or error.code() == KafkaError._FATAL):  # noqa: SLF001 - the library's public constants look so
            raise PenstockError(
                f"the coordinator is shut out of {self._topics.coordinators}: {reason(error)}; "
                "each coordinator that runs needs an instance name of its own"
            )
        while self._taking:
            try:
                number, token, inheritance = self._taken.get_nowait()
            except queue.Empty:
                return
            if self._taking.get(number) is token:
                del self._taking[number]
                self.owned[number] = self._own(number, inheritance)
                self.logs.add(number, inheritance.half_position, inheritance.op_position)

    def was_cut_off(self) -> bool:
        """Tell whether a connection to a broker was lost since this was asked last."""
        was, self._was_cut_off = self._was_cut_off, False
        return was

    def _hear(self, error: KafkaError) -> None:
        if error.code() in _CUT_OFF:
            self._was_cut_off = True

    def leave(self) -> None:
        """Give all partitions up and leave the group."""
        self._member.close()
        self.logs.close()
        self.owned.clear()

    def group_metadata(self) -> Any:
        """Return the proof of membership that fences a coordinator whose partitions were given to another.

        It matches what `owned` says: the group's generation cannot move past a loss of partitions before `serve`
        has told of it, for the client library waits for the callback.
        """
        return self._member.consumer_group_metadata()

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_assign(partitions)
        consumer.pause(partitions)
        tokens = {place.partition: object() for place in partitions}
        self._taking.update(tokens)
        if tokens:
            name = f"penstock-takeover-{self._topics.prefix}"
            threading.Thread(target=self._take_over, args=(tokens,), name=name, daemon=True).start()

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for place in partitions:
            self._taking.pop(place.partition, None)
            if self.owned.pop(place.partition, None) is not None:
                self.logs.remove(place.partition)
        consumer.incremental_unassign(partitions)

    def _take_over(self, tokens: dict[int, object]) -> None:
        """Find out where to start; runs in a thread of its own, and gives the result to the coordinator's."""
        while not self._stopping.is_set():
            try:
                inheritances = self._inheritances.take_over(tokens)
            except KafkaException as error:
                _log.warning("partitions %s cannot be taken over yet: %s", sorted(tokens), reason(error))
                self._stopping.wait(_BACK_OFF_S)
            except StoppedError:
                return
            else:
                for number, inheritance in inheritances.items():
                    self._taken.put((number, tokens[number], inheritance))
                return


__all__ = ["Membership"]
