"""Two ways to store a coordinator's position in the publishing Kafka transaction: in its group, or as a record.

    python benchmarks/positions.py [--sizes 1 20 500] [--rounds 10]

Starts an embedded Kafka. Transactions as the coordinator's (messages to a target of four partitions, a record of the
done log) alternate: sixty store the position in the group, by `send_offsets_to_transaction`, as penstock does. Sixty
write one more record to the done log instead, which a transactional id for each half partition would fence. Prints the
latency of a transaction and the broker's CPU seconds for it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from pathlib import Path
from statistics import quantiles
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from penstock import clients
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.devbroker import DevBroker

PARTITIONS, IN_A_ROW = 4, 60
LIMIT_S = 30.0


class Publisher:
    """Publishes with one transactional id, in one of both ways."""

    def __init__(self, servers: str, way: str, group_metadata: Any) -> None:
        self._way, self._metadata, self._position = way, group_metadata, 0
        self._producer = Producer({"bootstrap.servers": servers, "transactional.id": way, "linger.ms": 0})
        self._producer.init_transactions(LIMIT_S)

    def publish(self, size: int) -> float:
        """Run a transaction of `size` messages; return its milliseconds."""
        producer, begun = self._producer, time.perf_counter()
        producer.begin_transaction()
        for number in range(size):
            producer.produce("target", bytes(200), partition=number % PARTITIONS)
        producer.produce("done", bytes(100), partition=0)
        self._position += size
        if self._way == "record":
            producer.produce("done", b"%d" % self._position, partition=0)
        producer.flush(LIMIT_S)
        if self._way == "group":
            positions = [TopicPartition("half", 0, self._position)]
            producer.send_offsets_to_transaction(positions, self._metadata, LIMIT_S)
        producer.commit_transaction(LIMIT_S)
        return (time.perf_counter() - begun) * 1000


def cpu_s(pid: int | None) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure both ways in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 20, 500], help="messages in a transaction")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    # A measured broker has both compilers of the JVM.
    os.environ.setdefault("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+TieredCompilation")
    print(f"load {os.getloadavg()[0]:.1f}")
    with DevBroker() as broker:
        servers = broker.bootstrap_servers
        topics = [TopicSpec("target", PARTITIONS), TopicSpec("done", 1), TopicSpec("half", 1)]
        ensure_topics(clients.admin(servers, {}), topics)
        member = Consumer({"bootstrap.servers": servers, "group.id": "coordinators"})
        member.subscribe(["half"])
        while not member.assignment():
            member.poll(0.1)
        publishers = {way: Publisher(servers, way, member.consumer_group_metadata()) for way in ("group", "record")}
        for publisher in publishers.values():
            for _ in range(5 * IN_A_ROW):
                publisher.publish(20)
        for size in options.sizes:
            took, cpu = defaultdict[str, list[float]](list), defaultdict[str, float](float)
            for _ in range(options.rounds):
                for way, publisher in publishers.items():
                    before = cpu_s(broker.pid)
                    took[way] += [publisher.publish(size) for _ in range(IN_A_ROW)]
                    cpu[way] += cpu_s(broker.pid) - before
                    member.poll(0)
            for way, found in took.items():
                cuts = quantiles(found, n=100)
                print(
                    f"{size:>5} messages, position in the {way:<6}  p50 {cuts[49]:>5.2f}  p99 {cuts[98]:>6.2f} ms  "
                    f"broker {cpu[way] / len(found) * 1000:>5.2f} ms CPU",
                    flush=True,
                )
        member.close()
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
