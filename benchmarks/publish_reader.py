"""The reader of `publish.py`: a read_committed reader in its own process, which judges what readers see.

usage: python benchmarks/publish_reader.py SERVERS TOPIC PARTITIONS

It prints `ready`, reads a line with the number of messages to wait for, and prints `all` when it has seen them. After
another line, which comes when the writer has ended, it reads to the end of the topic and prints `Found` as JSON.
"""

from __future__ import annotations

import bisect
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition
from publish_contenders import key_of, number_of

#: The visible parts of all messages between which the rate is measured: after the start, before the drain.
RATE_FROM, RATE_TO = 0.2, 0.95
#: Seconds to wait for the messages.
_LONGEST_S = 600.0


@dataclass(frozen=True)
class Found:
    """The findings of a reader."""

    missing: int
    #: Repeated results.
    repeated: int
    #: Results that came after a later one of their key, or with another key.
    misplaced: int
    #: Results/s between two moments, when a fifth and when 95 % were visible; and the seconds between them.
    rate: float
    span_s: float
    #: Milliseconds from sent to visible.
    p50: float
    p99: float


class Reader:
    """Reads a topic from its beginning and records when results became visible."""

    def __init__(self, servers: str, topic: str, partitions: int) -> None:
        self._places = [TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(partitions)]
        self._consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "reader",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.queue.backoff.ms": 10,
            }
        )
        self._consumer.assign(self._places)
        #: For each batch: time in ns, number of visible results, keys and values.
        self._seen: list[tuple[int, int, list[tuple[bytes | None, bytes]]]] = []
        self.count = 0

    def take(self) -> list[Message]:
        """Read the available messages, wait only for the first; return events that are not messages."""
        first = self._consumer.poll(0.1)
        batch = [] if first is None else [first, *self._consumer.consume(10_000, 0)]
        now, events = time.time_ns(), [message for message in batch if message.error() is not None]
        found = [(message.key(), message.value() or b"") for message in batch if message.error() is None]
        if found:
            self.count += len(found)
            self._seen.append((now, self.count, found))
        return events

    def distinct(self) -> int:
        """Return the number of messages with a result."""
        return len({value for _, _, found in self._seen for _, value in found})

    def read_to_the_end(self) -> None:
        """Read to the present end: an end that was reached before may have moved."""
        ends = {place.partition: place.offset for place in self._consumer.position(self._places)}
        self._consumer.assign([TopicPartition(p.topic, p.partition, max(0, ends[p.partition])) for p in self._places])
        open_ones, deadline = set(ends), time.monotonic() + 60
        while open_ones and time.monotonic() < deadline:
            for event in self.take():
                error = event.error()
                if error is not None and error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
                    open_ones.discard(event.partition())
        if open_ones:
            sys.exit(f"the ends of partitions {sorted(open_ones)} were not reached")

    def found(self, count: int, skip_s: float) -> Found:
        """Judge the results of `count` messages. Latencies leave out messages sent in the first seconds."""
        seen_numbers: set[int] = set()
        last: dict[bytes | None, int] = {}
        misplaced = 0
        waits: list[tuple[int, int]] = []
        for now, _, found in self._seen:
            for key, value in found:
                number = number_of(value)
                sent = int.from_bytes(value[:8], "big")
                if number not in seen_numbers:
                    misplaced += number < last.get(key, -1) or key != key_of(number)
                    last[key] = number
                    waits.append((sent, now - sent))
                seen_numbers.add(number)
        begun = min(sent for sent, _ in waits) + skip_s * 1e9 if waits else 0.0
        late = sorted(wait for sent, wait in waits if sent >= begun) or [0]
        rate, span_s = self._rate(count)
        return Found(
            missing=count - len(seen_numbers),
            repeated=self.count - len(seen_numbers),
            misplaced=misplaced,
            rate=rate,
            span_s=span_s,
            p50=late[len(late) // 2] / 1e6,
            p99=late[len(late) * 99 // 100] / 1e6,
        )

    def _rate(self, count: int) -> tuple[float, float]:
        counts = [seen for _, seen, _ in self._seen]
        places = [bisect.bisect_left(counts, count * part) for part in (RATE_FROM, RATE_TO)]
        if places[0] == places[1] or places[1] >= len(counts):
            return 0.0, 0.0
        (first_ns, first, _), (last_ns, last, _) = (self._seen[place] for place in places)
        span_s = (last_ns - first_ns) / 1e9
        return (last - first) / span_s, span_s

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()


def main() -> None:
    """Read, and print the findings."""
    servers, topic, partitions = sys.argv[1:]
    reader = Reader(servers, topic, int(partitions))
    print("ready", flush=True)
    answer_lines: list[str] = []
    line = threading.Thread(target=lambda: answer_lines.append(sys.stdin.readline()), daemon=True)
    line.start()
    while line.is_alive():
        reader.take()
    if not answer_lines[0]:
        return
    wanted = json.loads(answer_lines[0])
    deadline = time.monotonic() + _LONGEST_S
    while (reader.count < wanted["count"] or reader.distinct() < wanted["count"]) and time.monotonic() < deadline:
        reader.take()
    print("all", flush=True)
    if not sys.stdin.readline():
        return
    reader.read_to_the_end()
    print(json.dumps(asdict(reader.found(wanted["count"], wanted["skip_s"]))), flush=True)
    reader.close()


if __name__ == "__main__":
    main()
