"""How fast results of handlers are published, from one topic into another, compared with other programs.

usage: python benchmarks/publish.py [--messages N] [--slow-messages N] [--rounds N] [--seconds S]
                                    [--warm-up S] [--only empty,slow,latency] [--rate R] [--pc-threads N]

empty    an empty handler, 8 workers
slow     a handler of 5 ms, 64 workers; compared with 64 bare threads that sleep and produce, and consume nothing
latency  messages at 100/s and at half of the exactly-once rate (or at --rate): time from sent to visible

Contenders:
  at-least-once          penstock: the results of a handler are published
  exactly-once           the same in Kafka transactions of 100 ms: `App(exactly_once=True)`
  bare-loop              confluent-kafka: consume, produce, flush, commit
  bare-transactions      confluent-kafka: one Kafka transaction per 100 ms with its offsets
  pc-asynchronous        Parallel Consumer's `pollAndProduce`, by key, in its default mode
  pc-transactional       the same in its transactional mode, which also commits every 100 ms

Messages have 100 B and one of 10,000 keys, in 8 partitions. It starts its own broker; each contender runs in a process
of its own, and so does a read_committed reader. The reader checks that each message has a result, that the results of a
key are in order, and that exactly-once results come once. A rate counts the results that became visible between two
moments: when a fifth and when 95 % of all were visible. Rounds go through all contenders in turn, so that a machine
that slows down slows all.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from consume import assigned, spread
from peers.parallel_consumer.runner import VERSION, runner_command
from publish_contenders import Task, key_of, value_of
from publish_reader import Found

from penstock import clients
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.devbroker import DevBroker
from penstock.errors import DevBrokerError

PARTITIONS = 8
PARTS = ("empty", "slow", "latency")
OURS, STRICT = "at-least-once", "exactly-once"
#: Contenders whose results come once; contenders without an order.
ONCE = (STRICT, "bare-transactions", "pc-transactional")
UNORDERED = ("bare-threads",)
EMPTY = (OURS, STRICT, "bare-loop", "bare-transactions", "pc-asynchronous", "pc-transactional")
SLOW = (OURS, STRICT, "bare-threads", "pc-asynchronous", "pc-transactional")
LATENCY = (OURS, STRICT, "bare-transactions")
#: Wanted exactly-once rate, as a multiple of another contender's rate.
WANTED = {"empty": {OURS: 0.8, "pc-transactional": 2.0}, "slow": {"bare-threads": 0.95, "pc-transactional": 2.0}}
WANTED_MS = "p50 150 ms, p99 300 ms"
#: Their speed with an empty handler differs much. They get more or fewer messages, so that each takes some seconds.
SHARE = {"bare-loop": 4.0, "bare-transactions": 4.0, "pc-asynchronous": 0.5, "pc-transactional": 0.5}
#: A rate over fewer seconds says little.
SHORTEST_S = 0.5
#: Seconds at the beginning of paced load that are not counted.
SKIPPED_S = 2.0

_HERE = Path(__file__).parent
_LONGEST_S = 660.0


@dataclass(frozen=True)
class Work:
    """One workload."""

    name: str
    workers: int
    handler_s: float
    count: int


class Bench:
    """A broker, and methods that run contenders on it."""

    def __init__(self, servers: str, runner: Sequence[str], pc_threads: int) -> None:
        self.servers, self._runner, self._pc_threads = servers, runner, pc_threads
        self._admin = clients.admin(servers, {})

    @property
    def has_peers(self) -> bool:
        """Whether Parallel Consumer can be run."""
        return bool(self._runner)

    def topic(self) -> str:
        """Make an empty topic."""
        name = f"publish-{uuid.uuid4().hex[:8]}"
        ensure_topics(self._admin, [TopicSpec(name, PARTITIONS)])
        return name

    def filled(self, count: int) -> str:
        """Make a topic with `count` messages."""
        name = self.topic()
        producer = Producer({"bootstrap.servers": self.servers, "enable.idempotence": True, "linger.ms": 20})
        for number in range(count):
            send(producer, name, number)
        assert producer.flush(60) == 0
        return name

    def measure(self, name: str, work: Work, source: str) -> Found:
        """Run a contender over the messages of a topic, and return what a reader saw."""
        with self._reader() as (reader, target), self._contender(name, work, source, target) as (process, _):
            say(reader, {"count": work.count, "skip_s": 0.0})
            hear(reader, process, name)
            end(process)
            return judged(name, reader)

    def paced(self, name: str, work: Work, rate: float, seconds: float) -> Found:
        """Run a contender under load at a rate, and return what a reader saw."""
        source = self.topic()
        with self._reader() as (reader, target), self._contender(name, work, source, target) as (process, group):
            deadline = time.monotonic() + 60
            while sum(assigned(self._admin, group)) != PARTITIONS:
                if time.monotonic() > deadline or process.poll() is not None:
                    sys.exit(f"{name} did not begin")
                time.sleep(0.1)
            count = self._send_at(rate, seconds + SKIPPED_S, source)
            say(reader, {"count": count, "skip_s": SKIPPED_S})
            hear(reader, process, name)
            end(process)
            return judged(name, reader)

    def _send_at(self, rate: float, seconds: float, topic: str) -> int:
        """Send at a rate, in ticks of at least a millisecond; return the number of sent messages."""
        producer = Producer({"bootstrap.servers": self.servers, "enable.idempotence": True, "linger.ms": 1})
        count, begun = 0, time.monotonic()
        while (passed := time.monotonic() - begun) < seconds:
            while count < passed * rate:
                send(producer, topic, count)
                count += 1
            producer.poll(0)
            time.sleep(max(0.001, begun + count / rate - time.monotonic()))
        assert producer.flush(60) == 0
        return count

    @contextmanager
    def _reader(self) -> Iterator[tuple[subprocess.Popen[str], str]]:
        target = self.topic()
        command = [sys.executable, str(_HERE / "publish_reader.py"), self.servers, target, str(PARTITIONS)]
        with child(command) as process:
            hear(process, process, "the reader")
            yield process, target

    @contextmanager
    def _contender(
        self, name: str, work: Work, source: str, target: str
    ) -> Iterator[tuple[subprocess.Popen[str], str]]:
        peer = name.startswith("pc-")
        workers = self._pc_threads if peer and not work.handler_s else work.workers
        task = Task(self.servers, source, target, uuid.uuid4().hex, workers, work.handler_s, work.count)
        if peer:
            command = [*self._runner, name.removeprefix("pc-")]
        else:
            command = [sys.executable, str(_HERE / "publish_contenders.py"), name]
        with child([*command, *task.arguments()]) as process:
            yield process, task.group


def send(producer: Producer, topic: str, number: int) -> None:
    """Send one message, when there is room for it."""
    while True:
        try:
            producer.produce(topic, value_of(number), key_of(number))
        except BufferError:
            producer.poll(0.1)
        else:
            return


@contextmanager
def child(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process that ends when its standard input does."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ours
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Let a child end in order; kill it if it does not."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def say(process: subprocess.Popen[str], words: Any) -> None:
    """Send a line to a child."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(words) + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str], other: subprocess.Popen[str], name: str) -> str:
    """Return the next line of a child; fail if the other child has ended."""
    assert process.stdout is not None
    deadline = time.monotonic() + _LONGEST_S
    while not select.select([process.stdout], [], [], 0.2)[0]:
        if time.monotonic() > deadline or other.poll() is not None:
            sys.exit(f"{name} ended before all was visible, or never ends")
    line = process.stdout.readline()
    if not line:
        sys.exit(f"the reader ended while it watched {name}")
    return line


def judged(name: str, reader: subprocess.Popen[str]) -> Found:
    """Return what a reader saw. It must be complete, in order and, for some contenders, without repeated results."""
    say(reader, "end")
    found = Found(**json.loads(hear(reader, reader, "the reader")))
    wrong = {"missing": found.missing}
    if name in ONCE:
        wrong["repeated"] = found.repeated
    if name not in UNORDERED:
        wrong["misplaced"] = found.misplaced
    if any(wrong.values()):
        sys.exit(f"{name}: {wrong}")
    if found.repeated:
        print(f"    {name}: {found.repeated} results came twice")
    return found


def compare(bench: Bench, work: Work, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Run a workload with all contenders in turn, and print their rates and the ratios of exactly-once to each."""
    sources: dict[int, str] = {}
    rates: dict[str, list[float]] = {name: [] for name in names if bench.has_peers or not name.startswith("pc-")}
    for _ in range(rounds):
        for name, found in rates.items():
            its_own = replace(work, count=int(work.count * (1 if work.handler_s else SHARE.get(name, 1))))
            source = sources.get(its_own.count) or sources.setdefault(its_own.count, bench.filled(its_own.count))
            seen = bench.measure(name, its_own, source)
            if seen.span_s < SHORTEST_S:
                print(f"    {name}: measured over {seen.span_s:.2f} s only, which says little; give more messages")
            found.append(seen.rate)
    print(f"{work.name}  {work.count:,} messages, {work.workers} workers, {work.handler_s * 1000:g} ms handler")
    for name, found in rates.items():
        text = f"    {name:18} {spread(found):>28} msg/s"
        if name != STRICT and STRICT in rates:
            ratios = [mine / theirs if theirs else 0.0 for mine, theirs in zip(rates[STRICT], found, strict=True)]
            wanted = WANTED[work.name].get(name)
            text += f"   exactly-once to it {spread(ratios, '{:.2f}')}" + (f" (wanted: {wanted})" if wanted else "")
        print(text, flush=True)
    return rates


def latencies(bench: Bench, work: Work, load: float, options: argparse.Namespace) -> None:
    """Print the time from sent to visible at 100/s and at a load."""
    print(f"latency  from sent to visible, p50 / p99 ms, the middle of {options.rounds} (wanted: {WANTED_MS})")
    for rate in (100.0, load):
        for name in LATENCY:
            found = [bench.paced(name, work, rate, options.seconds) for _ in range(options.rounds)]
            p50, p99 = (statistics.median(getattr(result, p) for result in found) for p in ("p50", "p99"))
            print(f"    {rate:>8,.0f}/s  {name:18} {p50:>8.1f} {p99:>8.1f}", flush=True)


def warm_up(bench: Bench, work: Work, seconds: float) -> None:
    """Warm the broker up: after its start it compiles its code for a while."""
    until = time.monotonic() + seconds
    source = bench.filled(work.count) if seconds > 0 else ""
    while time.monotonic() < until:
        for name in ("bare-loop", "bare-transactions"):
            bench.measure(name, work, source)


def parallel_consumer() -> Sequence[str]:
    """Return the command of Parallel Consumer's runner; empty, with a printed reason, if it cannot be made."""
    try:
        return runner_command()
    except (DevBrokerError, OSError, subprocess.SubprocessError) as error:
        print(f"Parallel Consumer is not measured: it could not be fetched or compiled ({type(error).__name__})")
        return []


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=300_000, help="messages of the empty handler")
    parser.add_argument("--slow-messages", type=int, default=60_000, help="messages of the 5 ms handler")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each measurement (default 3)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of paced load (default 10)")
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds before the first measurement")
    parser.add_argument("--rate", type=float, help="messages/s of paced load; by default half of exactly-once's rate")
    parser.add_argument("--pc-threads", type=int, default=256, help="Parallel Consumer's with an empty handler")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    options = parser.parse_args()
    parts = [part.strip() for part in options.only.split(",")]
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if "latency" in parts and "empty" not in parts and options.rate is None:
        parser.error("latency needs --rate, or empty beside it to know what half load is")
    empty = Work("empty", 8, 0.0, options.messages)
    slow = Work("slow", 64, 0.005, options.slow_messages)
    runner = parallel_consumer() if {"empty", "slow"} & set(parts) else []
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, Parallel Consumer {VERSION}", end="; ")
    print(f"min / median / max of {options.rounds} rounds; load average before: {os.getloadavg()[0]:.1f}", flush=True)
    with DevBroker() as broker:
        bench = Bench(broker.bootstrap_servers, runner, options.pc_threads)
        warm_up(bench, empty, options.warm_up)
        load = options.rate
        if "empty" in parts:
            rates = compare(bench, empty, EMPTY, options.rounds)
            load = load or statistics.median(rates[STRICT]) / 2
        if "slow" in parts:
            compare(bench, slow, SLOW, options.rounds)
        if "latency" in parts:
            latencies(bench, empty, load, options)
    print(f"load average after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
