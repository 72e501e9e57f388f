"""What tests do to a broker with the bare client: write, read, commit, and watch handlers."""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka import Message as ClientMessage
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, OffsetSpec

from penstock.message import Message
from waiting import wait_until

#: The fixtures that make topics, and write records to one.
NewTopic, Write = Callable[..., str], Callable[..., None]

#: Seconds a broker on a busy machine may take for an answer.
ANSWER_S = 30.0

#: For brokers that stand still and are not killed. One that stands still for longer than its session shuts itself out
#: and names no broker for a moment; a client that hears this may never find a broker again (librdkafka, issue 5301).
#: One that was killed comes back only when its session is over.
STEADY = {"broker.session.timeout.ms": "60000"}


def produce(bootstrap: str, topic: str, records: Iterable[tuple[bytes | None, bytes | None]], **extra: object) -> None:
    """Write key and value pairs, durably."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "enable.idempotence": True})
    failures: list[object] = []
    for key, value in records:
        producer.produce(topic, value, key=key, on_delivery=lambda error, _: error and failures.append(error), **extra)
        producer.poll(0)
    assert producer.flush(60) == 0
    assert not failures


def transactional(bootstrap: str) -> Producer:
    """Return a producer that has begun nothing yet, with transactions initialised."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"test-{uuid.uuid4().hex}"})
    producer.init_transactions(60)
    return producer


def wait_for_markers(bootstrap: str, *topics: str, timeout: float = 60.0) -> None:
    """Wait until no transaction is open in the topics: a broker answers an EndTxn before it has written the markers.

    Until then readers of committed records see less than was committed.
    """
    admin = AdminClient({"bootstrap.servers": bootstrap})
    # One by one: a broker that many tests share has thousands of others.
    known = {topic: admin.list_topics(topic, timeout=ANSWER_S).topics[topic] for topic in topics}
    parts = [TopicPartition(topic, number) for topic in topics for number in known[topic].partitions]

    def ends(level: IsolationLevel) -> list[int]:
        asked = {part: OffsetSpec.latest() for part in parts}
        answers = admin.list_offsets(asked, isolation_level=level, request_timeout=ANSWER_S)
        return [answers[part].result(ANSWER_S).offset for part in parts]

    def no_transaction_is_open() -> bool:
        try:
            # In this order: a record that comes in between makes another look, never a wrong answer.
            return ends(IsolationLevel.READ_COMMITTED) == ends(IsolationLevel.READ_UNCOMMITTED)
        except KafkaException:
            return False  # a topic that is new has no leader for a moment

    wait_until(no_transaction_is_open, timeout)


def read_all(
    bootstrap: str, topic: str, *, timeout: float = 60.0, committed_only: bool = True, left_open: bool = False
) -> list[ClientMessage]:
    """Return every message of a topic up to its present end.

    Args:
        bootstrap: address of the broker.
        topic: which.
        timeout: seconds the reading may take.
        committed_only: whether only committed messages are wanted.
        left_open: whether the test keeps a transaction open in the topic; otherwise all are waited for.
    """
    if committed_only and not left_open:
        wait_for_markers(bootstrap, topic)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"read-{uuid.uuid4().hex}",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            # An empty answer tells the end: the broker shall not hold it back for half a second.
            "fetch.wait.max.ms": 10,
            "isolation.level": "read_committed" if committed_only else "read_uncommitted",
        }
    )
    partitions = consumer.list_topics(topic, timeout=ANSWER_S).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
    found, ended, deadline = [], set(), time.monotonic() + timeout
    while len(ended) < len(partitions):
        assert time.monotonic() < deadline, f"{topic} was not read to its end within {timeout} s"
        message = consumer.poll(0.5)
        if message is None:
            continue
        error = message.error()
        if error is None:
            found.append(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            ended.add(message.partition())
        # The client recovers from other errors, or the deadline fails.
    consumer.close()
    return found


def committed(bootstrap: str, group: str, topic: str, partitions: int) -> dict[int, TopicPartition]:
    """Return a group's committed offset, with metadata, of each partition."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    answer = consumer.committed([TopicPartition(topic, number) for number in range(partitions)], timeout=ANSWER_S)
    consumer.close()
    return {one.partition: one for one in answer}


def ends(bootstrap: str, topic: str, partitions: int, isolation: str = "read_committed") -> dict[int, int]:
    """Return the end offset of each partition.

    Readers of committed records see an end below that of the log until the markers of a transaction are written: who
    asks whether a group has read everything means `read_uncommitted`, for its own offsets may be committed before.
    """
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "ends", "isolation.level": isolation})
    answer = {
        number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=ANSWER_S)[1]
        for number in range(partitions)
    }
    consumer.close()
    return answer


@dataclass(frozen=True)
class Call:
    """One call of a handler."""

    key: bytes | None
    partition: int
    offset: int
    value: bytes | None
    thread: str
    begun: float
    ended: float


class Recorder:
    """A handler that writes down its calls and finds overlaps of a key while they happen (I1).

    Args:
        seconds: how long each call takes.
        hold_after: calls after so many wait for `go`, so that what a test does next falls in mid-stream for certain.
    """

    def __init__(self, seconds: float = 0.0, *, hold_after: int | None = None) -> None:
        self.seconds = seconds
        self.calls: list[Call] = []
        self.overlaps: list[bytes | None] = []
        #: Set by the test to let held calls go on.
        self.go = threading.Event()
        self._hold_after = hold_after
        self._begun = 0
        self._running: dict[bytes | None, int] = defaultdict(int)
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> None:
        """Take the time asked for."""
        begun = time.monotonic()
        with self._lock:
            self._begun += 1
            held = self._hold_after is not None and self._begun > self._hold_after
            self._running[message.key] += 1
            if self._running[message.key] > 1:
                self.overlaps.append(message.key)
        if held:
            self.go.wait(120)
        if self.seconds:
            # A slow handler is what is tested.
            time.sleep(self.seconds)
        with self._lock:
            self._running[message.key] -= 1
            self.calls.append(
                Call(
                    message.key,
                    message.partition,
                    message.offset,
                    message.value,
                    threading.current_thread().name,
                    begun,
                    time.monotonic(),
                )
            )

    def by_key(self) -> dict[bytes | None, list[int]]:
        """Return the offsets of each key in the order of handling."""
        found: dict[bytes | None, list[int]] = defaultdict(list)
        for call in list(self.calls):
            found[call.key].append(call.offset)
        return found

    def places(self) -> list[tuple[int, int]]:
        """Return partition and offset of each call."""
        return [(call.partition, call.offset) for call in list(self.calls)]


def limit(admin: AdminClient, topic: str, size: int) -> None:
    """Set the largest batch that a topic takes, and wait until its broker knows."""
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    for done in admin.incremental_alter_configs([resource]).values():
        done.result()

    def is_known() -> bool:
        found = admin.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, topic)])
        return next(iter(found.values())).result()["max.message.bytes"].value == str(size)

    wait_until(is_known)
