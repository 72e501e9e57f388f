"""The consumer client in memory: confluent-kafka's `Consumer`, as far as penstock calls it.

Nothing happens between its calls. What a real client does in the background (joining, heartbeats, fetching) happens at
the beginning of `poll` and `consume`; callbacks are called from within those and `close`, without the broker's lock.
"""

from __future__ import annotations

from confluent_kafka import KafkaException, Message, TopicPartition

from penstock.clients.cluster import RebalanceCallback
from penstock.testing.memory import codes
from penstock.testing.memory.client.fetching import FetchedPartition
from penstock.testing.memory.client.group_client import ANSWER_S, GroupClient, failed
from penstock.testing.memory.faults import Operation
from penstock.testing.memory.group.group import Gone
from penstock.testing.memory.log.log import Place


class MemoryConsumer(GroupClient):
    """A consumer on the broker in memory: made by `TestBroker.consumer`. For one thread, as the real one is here."""

    _closed = False

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("Consumer closed")

    # Membership

    def subscribe(
        self,
        topics: list[str],
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
        on_lost: RebalanceCallback | None = None,
    ) -> None:
        """Join the group; the callbacks are called from within `poll`, `consume` and `close`."""
        self._require_open()
        self._callbacks = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}
        with self._state.lock:
            self._wants(topics)

    def unsubscribe(self) -> None:
        """Want no topic any more; a callback gives back what is assigned."""
        self._require_open()
        with self._state.lock:
            self._wants(())

    def memberid(self) -> str:
        """Return the id that the coordinator gave, or an empty text."""
        return "" if self._member is None else self._member.name

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Begin with these partitions, at their offsets; `KafkaException` where one is assigned already."""
        self._require_open()
        with self._state.lock:
            for partition in partitions:
                if (partition.topic, partition.partition) in self._fetcher.assigned:
                    text = f"{partition.topic} [{partition.partition}] is already part of the current assignment"
                    raise failed(codes.CONFLICT, text)
            for partition in partitions:
                self._fetcher.assign((partition.topic, partition.partition), partition.offset)

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """Stop with these partitions; `KafkaException` where one is not assigned."""
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
        """Return the next message or error; None where there is none, after the clock went on by `timeout`."""
        found = self.consume(1, timeout)
        return found[0] if found else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Return up to so many messages of what is there.

        Where nothing is there the clock goes on by `timeout` seconds, and what is there then is returned.
        `RuntimeError` where it is closed, or where nothing is there and without a timeout it would wait for ever.
        """
        self._require_open()
        found = self._turn(num_messages)
        if found or timeout == 0:
            return found
        if timeout < 0:
            raise RuntimeError("nothing is there, and on a test broker nobody else will bring it; give a timeout")
        self._state.clock.sleep(timeout)
        return self._turn(num_messages)

    def _turn(self, wanted: int) -> list[Message]:
        fetcher = self._fetcher
        early: list[Message] = []
        before: dict[Place, FetchedPartition] = {}
        with self._state.lock:
            now = self._state.clock.monotonic()
            self._state.coordinator.tick(now)
            member = self._member
            if member is not None:
                member.polled_at = now
                if not (member.needs_client or self._answers or self._errors):
                    if not self._cut_off:
                        fetcher.refill()
                    return fetcher.take(wanted)
                if member.change is not None and wanted > 1 and self._state.chance.getrandbits(1):
                    # The callbacks come in the middle: some messages are counted out, but not handed over yet.
                    before = dict(fetcher.assigned)
                    early = fetcher.take(self._state.chance.randrange(wanted))
        self._serve()
        with self._state.lock:
            # Of a partition that the callbacks gave back nothing is handed over.
            found = [record for record in early if fetcher.assigned.get(_place(record)) is before.get(_place(record))]
            while self._errors and len(found) < wanted:
                found.append(self._errors.popleft())
            if not self._cut_off:
                fetcher.refill()
            return found + fetcher.take(wanted - len(found))

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Hand over nothing of these partitions, and forget what was fetched of them."""
        self._require_open()
        with self._state.lock:
            for partition in partitions:
                self._fetcher.pause((partition.topic, partition.partition))

    def resume(self, partitions: list[TopicPartition]) -> None:
        """Hand over again, from the position."""
        self._require_open()
        with self._state.lock:
            for partition in partitions:
                self._fetcher.resume((partition.topic, partition.partition))

    def seek(self, partition: TopicPartition) -> None:
        """Go on from an offset, or a logical one, and forget what was fetched; `KafkaException` if unassigned."""
        self._require_open()
        place = (partition.topic, partition.partition)
        with self._state.lock:
            if place not in self._fetcher.assigned:
                raise failed(codes.STATE, f"Failed to seek to offset {partition.offset}: Local: Erroneous state")
            self._fetcher.seek(place, partition.offset)

    def consumer_group_metadata(self) -> object:
        """Return nothing: positions are not committed in transactions here."""

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return the next offset to hand over; -1001 before the first message and for what is not assigned."""
        self._require_open()
        found = []
        with self._state.lock:
            for partition in partitions:
                part = self._fetcher.assigned.get((partition.topic, partition.partition))
                found.append(
                    TopicPartition(
                        partition.topic, partition.partition, codes.INVALID if part is None else part.position
                    )
                )
        return found

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int] | None:
        """Return the first offset of the log and the one after its last.

        For a reader of committed messages the end is the last stable offset, unless `cached`. `KafkaException` where
        there is no such partition, or the broker did not answer.
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
                self._state.clock.sleep(timeout if timeout >= 0 else ANSWER_S)
                raise failed(codes.TIMED_OUT, "Failed to get watermark offsets: Local: Timed out")
            if log is None:
                raise failed(codes.UNKNOWN_PARTITION, "Failed to get watermark offsets: Local: Unknown partition")
            return log.start, self._fetcher.end_of(log)

    # Offsets

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition] | None:
        """Commit offsets with their metadata; the answer to an asynchronous one comes to `on_commit`.

        `KafkaException` where it was refused, whole or in part, or no answer came within 60 s of the clock.
        """
        self._require_open()
        points = [offset for offset in offsets if offset.offset >= 0]
        if not points:
            raise failed(codes.NO_OFFSET, "Commit failed: Local: No offset stored")
        with self._state.lock:
            self._state.coordinator.tick(self._state.clock.monotonic())
            if self._member is not None and self._member.gone is Gone.FENCED:
                raise failed(codes.FATAL, "Commit failed: Local: Fatal error")
            if not asynchronous:
                return self._send_and_wait(points)
            self._send(points)
            return None

    def committed(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """Return the group's offsets with their metadata; an offset of -1001 where there is none.

        `KafkaException` where the coordinator did not answer within `timeout` seconds of the clock.
        """
        self._require_open()
        with self._state.lock:
            self._state.coordinator.tick(self._state.clock.monotonic())
            return self._ask_committed(partitions, timeout)

    # The end

    def close(self) -> None:
        """Revoke what is assigned and leave the group; with an instance id the group waits for the return."""
        if self._closed:
            return
        with self._state.lock:
            self._state.coordinator.tick(self._state.clock.monotonic())
        self._leave()
        self._serve_answers()
        self._closed = True

    def die(self) -> None:
        """End as a process that is killed: no callback, no word to the group. For the broker."""
        with self._state.lock:
            self._closed = True
            self._hear_no_more()

    def cut_off(self) -> None:
        """Let nothing of it reach the broker from now on. For the broker."""
        with self._state.lock:
            self._cut_off = True
            self._hear_no_more()

    def heal(self) -> None:
        """Let it reach the broker again; what was held arrives. For the broker."""
        with self._state.lock:
            self._state.coordinator.tick(self._state.clock.monotonic())
            self._cut_off = False
            if self._member is not None and self._member.gone is None:
                self._state.coordinator.group(self._group).heard(self._member, self._state.clock.monotonic())
            self._state.coordinator.tick(self._state.clock.monotonic())


def _place(message: Message) -> Place:
    return message.topic() or "", message.partition() or 0
