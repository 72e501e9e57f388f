"""The consumer client in memory: the part of confluent-kafka's `Consumer` that penstock calls.

Nothing happens between its calls. The background work of a real client (joining, heartbeats, fetching) happens at the
beginning of `poll` and `consume`. These two and `close` call the callbacks, without the broker's lock.
"""

from __future__ import annotations

from confluent_kafka import KafkaException, Message, TopicPartition

from penstock.testing.memory import codes
from penstock.testing.memory.client.fetching import FetchedPartition
from penstock.testing.memory.client.group_client import ANSWER_S, GroupClient, failed
from penstock.testing.memory.faults import Operation
from penstock.testing.memory.log import Place


class MemoryConsumer(GroupClient):
    """A consumer on the broker in memory, made by `TestBroker.consumer`. For one thread, as penstock's real one."""

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Add these partitions, at their offsets; `KafkaException` if one is already assigned."""
        self._require_open()
        with self._state.lock:
            for partition in partitions:
                if (partition.topic, partition.partition) in self._fetcher.assigned:
                    text = f"{partition.topic} [{partition.partition}] is already part of the current assignment"
                    raise failed(codes.CONFLICT, text)
            for partition in partitions:
                self._fetcher.assign((partition.topic, partition.partition), partition.offset)

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """Remove these partitions; `KafkaException` if one is not assigned."""
        self._require_open()
        with self._state.lock:
            for partition in partitions:
                if (partition.topic, partition.partition) not in self._fetcher.assigned:
                    place = f"{partition.topic} [{partition.partition}]"
                    text = f"{place} can't be unassigned: it is not in the current assignment"
                    raise failed(codes.INVALID_ARGUMENT, text)
            for partition in partitions:
                self._fetcher.unassign((partition.topic, partition.partition))

    # Messages

    def poll(self, timeout: float = -1) -> Message | None:
        """Return the next message or error. If there is none, move the clock by `timeout`; None if still none."""
        found = self.consume(1, timeout)
        return found[0] if found else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Return up to `num_messages` messages that are available.

        If there are none, move the clock by `timeout` seconds and try once more. `RuntimeError` if the consumer is
        closed, or if there are no messages and it would wait for ever, without a timeout.
        """
        self._require_open()
        found = self._poll_once(num_messages)
        if found or timeout == 0:
            return found
        if timeout < 0:
            raise RuntimeError("there is no message, and on a test broker none can arrive in this call; give a timeout")
        self._clock.sleep(timeout)
        return self._poll_once(num_messages)

    def _poll_once(self, wanted: int) -> list[Message]:
        fetcher = self._fetcher
        taken: list[Message] = []
        before: dict[Place, FetchedPartition] = {}
        with self._state.lock:
            now = self._tick()
            member = self._member
            if member is not None:
                member.polled_at = now
                if not (member.needs_client or self._answers or self._errors):
                    if not self._cut_off:
                        fetcher.refill()
                    return fetcher.take(wanted)
                if member.change is not None and wanted > 1 and self._state.chance.getrandbits(1):
                    # The callbacks interrupt the call: some messages are taken, but not returned yet.
                    before = dict(fetcher.assigned)
                    taken = fetcher.take(self._state.chance.randrange(wanted))
        self._serve()
        with self._state.lock:
            # Drop messages of partitions that the callbacks unassigned.
            found = [record for record in taken if fetcher.assigned.get(_place(record)) is before.get(_place(record))]
            while self._errors and len(found) < wanted:
                found.append(self._errors.popleft())
            if not self._cut_off:
                fetcher.refill()
            return found + fetcher.take(wanted - len(found))

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Return no messages of these partitions, and drop their fetched messages."""
        self._require_open()
        with self._state.lock:
            for partition in partitions:
                self._fetcher.pause((partition.topic, partition.partition))

    def resume(self, partitions: list[TopicPartition]) -> None:
        """Return messages of these partitions again, from their positions."""
        self._require_open()
        with self._state.lock:
            for partition in partitions:
                self._fetcher.resume((partition.topic, partition.partition))

    def consumer_group_metadata(self) -> object:
        """Return None: transactions do not commit positions here."""

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return the next offset of each partition; -1001 before its first message and if it is not assigned."""
        self._require_open()
        found = []
        with self._state.lock:
            for partition in partitions:
                part = self._fetcher.assigned.get((partition.topic, partition.partition))
                offset = codes.INVALID if part is None else part.position
                found.append(TopicPartition(partition.topic, partition.partition, offset))
        return found

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int] | None:
        """Return the first offset of the log, and its end.

        For a reader of committed messages the end is the last stable offset, unless `cached`. `KafkaException` if there
        is no such partition, or the broker did not answer.
        """
        self._require_open()
        place = (partition.topic, partition.partition)
        with self._state.lock:
            log = self._state.logs.get(place)
            if cached:
                known = log is not None and place in self._fetcher.assigned
                return (log.start, log.end) if log is not None and known else (codes.INVALID, codes.INVALID)
            fault = self._state.faults.take(Operation.WATERMARKS)
            if fault is not None:
                raise KafkaException(fault.error)
            if self._cut_off:
                self._clock.sleep(timeout if timeout >= 0 else ANSWER_S)
                raise failed(codes.TIMED_OUT, "Failed to get watermark offsets: Local: Timed out")
            if log is None:
                raise failed(codes.UNKNOWN_PARTITION, "Failed to get watermark offsets: Local: Unknown partition")
            return log.start, self._fetcher.end_of(log)


def _place(message: Message) -> Place:
    return message.topic() or "", message.partition() or 0
