"""The campaign's own work: it writes messages for the workers and watches the progress."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter, defaultdict

import psycopg
from confluent_kafka import Consumer, Producer, TopicPartition

from endurance.plan import INPUTS, OUTPUTS, PARTITIONS, TARGETS
from endurance.stage import Stage, now

#: Keys of each topic of the workers.
KEYS = 200
#: Seconds for which what was fed may wait for brokers in the end, and between two looks at tables.
_FLUSH_S, _LOOK_S = 120.0, 0.5


class Watch:
    """Reads visible records, without a group, and the tables; records the progress of each stream."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.progress: dict[str, list[float]] = defaultdict(list)
        self.seen: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._count)]

    def start(self) -> None:
        """Begin to look."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(30)

    def _read(self) -> None:
        settings = {"bootstrap.servers": self._stage.cluster.bootstrap_servers, "group.id": "watch"}
        with contextlib.closing(Consumer({**settings, "enable.auto.commit": False})) as consumer:
            topics = (*OUTPUTS, *TARGETS)
            consumer.assign([TopicPartition(topic, number, 0) for topic in topics for number in range(PARTITIONS)])
            while not self._stopping.is_set():
                for message in consumer.consume(500, 0.2):
                    if message.error() is None:
                        topic = message.topic() or ""
                        self.seen[topic] += 1
                        self._note(topic)

    def _note(self, topic: str) -> None:
        stream = f"transactions ({topic.partition('-')[0]})" if topic in TARGETS else "results"
        if topic != "dlq.singles":
            self.progress[stream].append(now())

    def _count(self) -> None:
        tables = {"counted": "inbox", "stored": "Spark"}
        while not self._stopping.wait(_LOOK_S):
            for table, stream in tables.items():
                with contextlib.suppress(psycopg.Error), self._stage.connect() as connection:
                    (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone() or (0,)  # noqa: S608 - ours
                    if count > self.seen[table]:
                        self.seen[table] = count
                        self.progress[stream].append(now())


class Feeder:
    """Feeds numbered messages to the topics of the workers at a rate, from its own thread."""

    def __init__(self, servers: str, rate: float) -> None:
        self._producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 20})
        self._rate = rate
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)

    def start(self) -> None:
        """Begin to feed."""
        self._thread.start()

    def stop(self) -> None:
        """Stop feeding; return when all fed messages are stored or given up."""
        self._stopping.set()
        self._thread.join()
        self._producer.flush(_FLUSH_S)

    def _feed(self) -> None:
        begun = time.monotonic()
        for number in itertools.count():
            if number % 10 == 0:
                # The rate is part of the campaign.
                self._stopping.wait(max(0.0, begun + number / self._rate - time.monotonic()))
                self._producer.poll(0)
            if self._stopping.is_set():
                return
            topic = INPUTS[number % len(INPUTS)]
            serial = number // len(INPUTS)
            while True:
                try:
                    self._producer.produce(topic, str(serial), f"{topic}-{serial % KEYS}")
                    break
                except BufferError:
                    self._producer.poll(0.1)
