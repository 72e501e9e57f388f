"""Committed transactions a second, and their time to visible, compared with plain sends on the same broker.

    python benchmarks/transactions.py [--rounds 3] [--warm-up 75] [--in-flight 1 16 64 256 2000] [--rocketmq]
    python benchmarks/transactions.py --restart [--settled 1000000] [--pending 10000]
    python benchmarks/transactions.py --disk [--settled 1000000]
    python benchmarks/transactions.py --trace [--in-flight 16 64 256] [--pace 100 5000]

Starts an embedded Kafka, a coordinator and a read_committed reader, each in its own process, and sends 128-byte
messages. CPU is that of sender and coordinator, for each message. The rate counts the messages that the reader got,
from the first send to the last message; a latency runs from before the send (and any wait for room) to the reader's
hands. For each number in flight, several rounds of:

- **futures**: one thread that `submit`s and has so many open; **sent**: the same without waiting for stored decisions;
- **many**: the same by `submit_many`, an eighth at a time;
- **threads**: as many threads that call `send`; **async**: as many tasks that await `send_async`;
- **plain**: idempotent acks=all sends, as many open from one thread, to the same reader.

Then **paced** load at 100/s and at half of the greatest rate, one **Kafka transaction per message** from 1 and 16
producers, plain sends that wait for nothing, and with `--rocketmq` RocketMQ's transactional sends in the same run, with
the wanted ratios: `peers/rocketmq` fetches it once into penstock's cache.

`--trace` follows messages through all hops and prints the time of each, with so many in flight and at these rates.

`--restart` measures the time of a new coordinator to take over a store with so many settled and pending transactions.
`--disk` measures the disk use of half, op and done while so many are settled, on a broker that removes unneeded files
at once (by default within six minutes).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from peers.rocketmq.runner import measure_rocketmq
from transaction_trace import STAMP, Trace, report

from penstock import clients
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.devbroker import DevBroker
from penstock.outgoing import Outgoing
from penstock.transactions import Coordinator, TransactionalProducer
from penstock.transactions.acked_producer import AckedProducer

PARTITIONS = 8
SIZE = 128
KEYS = [b"%d" % number for number in range(10_000)]
PADDING = os.urandom(SIZE - STAMP)
#: For `--disk`: by default a broker looks for unneeded files every five minutes, and keeps them for another minute.
_SOON = {"log.retention.check.interval.ms": "5000", "log.segment.delete.delay.ms": "1000"}
#: Wanted rate for each number in flight: a factor, and the number of RocketMQ's threads whose rate it multiplies.
WANTED = {16: (0.8, 16), 64: (1.2, 64), 256: (3.0, 64), 2_000: (7.0, 64)}

Figures = dict[str, float]


class Child:
    """A process of this script in another role. It answers each line with one line of JSON."""

    def __init__(self, role: str, *arguments: str) -> None:
        command = [sys.executable, __file__, "--role", role, *arguments]
        self._process = subprocess.Popen(  # noqa: S603 - this very script
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._heard()

    def ask(self, line: str = "") -> Any:
        """Send a line and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def say(answer: Any) -> None:
    """Answer the parent."""
    print(json.dumps(answer), flush=True)


def coordinate(servers: str, traced: str = "") -> None:
    """Role: the coordinator, which sends no checks. Each line asks for its statistics, or for its trace."""
    trace = Trace()
    if traced:
        trace.of_coordinator()
    with Coordinator(bootstrap_servers=servers, transaction_timeout=3600) as coordinator:
        say("ready")
        for line in sys.stdin:
            if line.strip() == "trace":
                say(trace.take())
                continue
            now = coordinator.statistics()
            counts = {"committed": now.committed, "pending": now.pending, "groups": now.groups, "owned": now.partitions}
            say({**counts, "cpu_s": time.process_time()})


def read(servers: str, topic: str, traced: str = "") -> None:
    """Role: the reader. A line with a number: wait for so many messages in all, and print their times."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "reader", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    lock, stopping, trace = threading.Lock(), threading.Event(), Trace()
    seen: list[tuple[int, int]] = []

    def follow() -> None:
        while not stopping.is_set():
            first = consumer.poll(0.1)
            if first is None:
                continue
            batch = [first, *consumer.consume(10_000, 0)]
            now = time.time_ns()
            with lock:
                seen.extend((now, int.from_bytes(m.value()[:STAMP], "big")) for m in batch if m.error() is None)
                for message in batch if traced else ():
                    trace.note("visible", message.value(), now)

    thread = threading.Thread(target=follow)
    thread.start()
    say("ready")
    for line in sys.stdin:
        if line.strip() == "trace":
            with lock:
                say(trace.take())
            continue
        wanted, deadline = int(line), time.monotonic() + 120
        while len(seen) < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        with lock:
            taken = seen[:]
            seen.clear()
        waits = sorted(now - sent for now, sent in taken)
        last = max((now for now, _ in taken), default=0)
        say({"count": len(taken), "last_ns": last, **{f"p{p}": waits[len(waits) * p // 100] / 1e6 for p in (50, 99)}})
    stopping.set()
    thread.join()
    consumer.close()


def stamped(at_ns: int = 0) -> bytes:
    """Return a value with the present time, or the planned send time."""
    return (at_ns or time.time_ns()).to_bytes(STAMP, "big") + PADDING


def by_futures(wide: int, end: float, submit: Callable[[bytes, bytes], Callable[[], object]]) -> int:
    """Send from one thread with `wide` open until `end`; return the number of sent messages."""
    count, open_ones = 0, deque[Callable[[], object]]()
    while time.monotonic() < end:
        if len(open_ones) >= wide:
            open_ones.popleft()()
        open_ones.append(submit(KEYS[count % len(KEYS)], stamped()))
        count += 1
    while open_ones:
        open_ones.popleft()()
    return count


def by_many(wide: int, end: float, bench: Bench) -> int:
    """Send from one thread, many at a time, with `wide` open until `end`; return the number of sent messages."""
    step, count, open_ones = max(1, wide // 8), 0, deque[Any]()
    while time.monotonic() < end:
        while len(open_ones) > wide - step:
            open_ones.popleft().result()
        keys = (KEYS[number % len(KEYS)] for number in range(count, count + step))
        open_ones += bench.producer.submit_many([Outgoing(bench.topic, stamped(), key) for key in keys])
        count += step
    while open_ones:
        open_ones.popleft().result()
    return count


def by_threads(wide: int, end: float, send: Callable[[bytes, bytes], object]) -> int:
    """Send from `wide` threads until `end`; return the number of sent messages."""
    counts = [0] * wide

    def work(me: int) -> None:
        number = me
        while time.monotonic() < end:
            send(KEYS[number % len(KEYS)], stamped())
            counts[me] += 1
            number += wide

    crowd = [threading.Thread(target=work, args=(me,)) for me in range(wide)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    return sum(counts)


def by_tasks(wide: int, end: float, producer: TransactionalProducer, topic: str) -> int:
    """Send from `wide` tasks of one event loop until `end`; return the number of sent messages."""
    counts = [0] * wide

    async def work(me: int) -> None:
        number = me
        while time.monotonic() < end:
            await producer.send_async(topic, key=KEYS[number % len(KEYS)], value=stamped())
            counts[me] += 1
            number += wide

    async def main() -> None:
        await asyncio.gather(*(work(me) for me in range(wide)))

    asyncio.run(main())
    return sum(counts)


def paced(rate: float, end: float, submit: Callable[[bytes, bytes], Callable[[], object]]) -> int:
    """Send at a rate until `end`, in ticks of at least a millisecond; return the number of sent messages."""
    count, begin, begin_ns = 0, time.monotonic(), time.time_ns()
    open_ones = deque[Callable[[], object]]()
    while (now := time.monotonic()) < end:
        while count < (now - begin) * rate:
            # The planned send time: the delay that a late sender causes counts, too.
            due_ns = begin_ns + int(count / rate * 1e9)
            open_ones.append(submit(KEYS[count % len(KEYS)], stamped(due_ns)))
            count += 1
        while len(open_ones) > 10_000:
            open_ones.popleft()()
        time.sleep(max(0.001, begin + count / rate - time.monotonic()))
    while open_ones:
        open_ones.popleft()()
    return count


class Bench:
    """A broker with a coordinator and a reader, and a producer to measure."""

    def __init__(self, servers: str, seconds: float, rounds: int, traced: str = "") -> None:
        self.servers, self.seconds, self.rounds = servers, seconds, rounds
        self.topic, self.other = f"bench-{time.time_ns()}", f"bench-plain-{time.time_ns()}"
        specs = [TopicSpec(self.topic, PARTITIONS), TopicSpec(self.other, PARTITIONS)]
        ensure_topics(clients.admin(servers, {}), specs)
        self.coordinator, self.reader = Child("coordinate", servers, traced), Child("read", servers, self.topic, traced)
        self.producer = TransactionalProducer("bench", bootstrap_servers=servers, send_timeout=60).start()
        self.plain = AckedProducer(servers, {}, 60.0, "bench")
        self.plain.start()
        self._plain_sent = 0
        while not self.coordinator.ask()["owned"]:
            time.sleep(0.1)

    def submit(self, key: bytes, value: bytes) -> Callable[[], object]:
        """Send in a transaction; the answer waits for its decision."""
        return self.producer.submit(self.topic, key=key, value=value).result

    def submit_sent(self, key: bytes, value: bytes) -> Callable[[], object]:
        """Send in a transaction; the answer waits until the decision is handed over."""
        return self.producer.submit(self.topic, key=key, value=value, wait="sent").result

    def send(self, key: bytes, value: bytes) -> object:
        """Send in a transaction and wait for its decision."""
        return self.producer.send(self.topic, key=key, value=value)

    def submit_plain(self, key: bytes, value: bytes) -> Callable[[], object]:
        """Send without a transaction."""
        self._plain_sent += 1
        sent = Future[None]()

        def report(error: KafkaError | None, _: object) -> None:
            if error is None:
                sent.set_result(None)
            else:
                sent.set_exception(KafkaException(error))

        self.plain.post(self.topic, self._plain_sent % PARTITIONS, key, value, headers=None, report=report)
        return lambda: sent.result(60)

    def measure(self, seconds: float, work: Callable[[float], int]) -> Figures:
        """Send, wait until the reader has all messages, and return the rate, the latencies in ms and the group size."""
        before, begin, cpu_s = self.coordinator.ask(), time.time_ns(), time.process_time()
        count = work(time.monotonic() + seconds)
        cpu_s = time.process_time() - cpu_s
        seen, after = self.reader.ask(str(count)), self.coordinator.ask()
        assert seen["count"] == count, f"sent {count}, visible {seen['count']}"
        group = (after["committed"] - before["committed"]) / max(1, after["groups"] - before["groups"])
        cpu_s += after["cpu_s"] - before["cpu_s"]
        return {
            "cpu_us": 1e6 * cpu_s / max(1, count),
            "rate": count / ((seen["last_ns"] - begin) / 1e9),
            "p50": seen["p50"],
            "p99": seen["p99"],
            "group": group,
        }

    def close(self) -> None:
        """End the producer and the children."""
        self.producer.stop()
        self.plain.stop(5)
        self.coordinator.close()
        self.reader.close()


def warm_up(bench: Bench, seconds: float) -> None:
    """Warm up the broker, the connections and the coordinator.

    A new broker compiles its code for a minute, on the cores that all share: its first Kafka transactions take five
    times as long as later ones.
    """
    end = time.monotonic() + seconds
    while True:
        for wide in (2_000, 64, 1):
            bench.measure(min(3.0, seconds), lambda end, wide=wide: by_futures(wide, end, bench.submit))
            bench.measure(min(1.0, seconds), lambda end, wide=wide: by_futures(wide, end, bench.submit_plain))
        if time.monotonic() >= end:
            return


def several(bench: Bench, what: str, wide: int, work: Callable[[float], int]) -> Figures:
    """Measure some rounds, print them as one line, and return the median."""
    rounds = [bench.measure(bench.seconds, work) for _ in range(bench.rounds)]
    middle = {name: median(figures[name] for figures in rounds) for name in rounds[0]}
    rates = " / ".join(f"{figures['rate']:,.0f}" for figures in sorted(rounds, key=lambda each: each["rate"]))
    print(
        f"{what:>10} {wide:>6}  {rates:>28}  {middle['p50']:>8.1f} {middle['p99']:>8.1f}  {middle['group']:>7.0f}"
        f"  {middle['cpu_us']:>7.1f}",
        flush=True,
    )
    return middle


def transactions_of_kafka(servers: str, topic: str, producers: int, seconds: float) -> float:
    """Return messages a second of producers that commit one Kafka transaction per message."""
    counts, go = [0] * producers, threading.Barrier(producers)

    def work(me: int) -> None:
        settings = {"bootstrap.servers": servers, "transactional.id": f"{topic}-{me}", "linger.ms": 0}
        producer = Producer(settings)
        producer.init_transactions(30)
        go.wait()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            producer.begin_transaction()
            producer.produce(topic, stamped(), KEYS[counts[me] % len(KEYS)])
            producer.commit_transaction(30)
            counts[me] += 1

    crowd = [threading.Thread(target=work, args=(me,)) for me in range(producers)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    return sum(counts) / seconds


def plain_without_waiting(servers: str, topic: str, seconds: float) -> float:
    """Return messages a second of idempotent sends that wait for nothing."""
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 20})
    count, begin = 0, time.monotonic()
    while time.monotonic() - begin < seconds:
        try:
            producer.produce(topic, PADDING, KEYS[count % len(KEYS)])
            count += 1
        except BufferError:
            producer.poll(0.01)
    assert producer.flush(30) == 0
    return count / (time.monotonic() - begin)


def throughput(servers: str, options: argparse.Namespace) -> None:
    """Measure on a broker and print the table."""
    bench = Bench(servers, options.seconds, options.rounds)
    warm_up(bench, options.warm_up)
    print(f"{SIZE}-byte messages, one broker, sender, coordinator and reader on {os.cpu_count()} cores; load {load()}")
    print(
        f"{'':>10} {'open':>6}  {'messages/s: min / median / max':>28}  {'p50 ms':>8} {'p99 ms':>8}  {'a group':>7}"
        f"  {'CPU us':>7}"
    )
    best: dict[int, float] = {}
    for wide in options.in_flight:
        ours = several(bench, "futures", wide, lambda end, wide=wide: by_futures(wide, end, bench.submit))
        sent = several(bench, "sent", wide, lambda end, wide=wide: by_futures(wide, end, bench.submit_sent))
        best[wide] = max(ours["rate"], sent["rate"] if wide <= 16 else 0)
        if wide <= options.most_threads:
            threads = several(bench, "threads", wide, lambda end, wide=wide: by_threads(wide, end, bench.send))
            best[wide] = max(best[wide], threads["rate"])
        if wide >= 256:
            many = several(bench, "many", wide, lambda end, wide=wide: by_many(wide, end, bench))
            best[wide] = max(best[wide], many["rate"])
        several(bench, "async", wide, lambda end, wide=wide: by_tasks(wide, end, bench.producer, bench.topic))
        several(bench, "plain", wide, lambda end, wide=wide: by_futures(wide, end, bench.submit_plain))
    for rate in (100.0, max(best.values()) / 2):
        several(bench, f"{rate:,.0f}/s", 0, lambda end, rate=rate: paced(rate, end, bench.submit))
    one_each = {n: transactions_of_kafka(servers, bench.other, n, options.seconds) for n in (1, 16)}
    print(f"one Kafka transaction per message: {one_each[1]:,.0f}/s from one producer, {one_each[16]:,.0f}/s from 16")
    print(f"greatest rate / that of 16: {max(best.values()) / one_each[16]:.1f} (wanted: 10)")
    print(f"plain sends that wait for nothing: {plain_without_waiting(servers, bench.other, options.seconds):,.0f}/s")
    bench.close()
    print(f"load {load()}")
    compare(best, options)


def compare(best: dict[int, float], options: argparse.Namespace) -> None:
    """Run RocketMQ on the same machine and print the wanted ratios."""
    if not options.rocketmq:
        print("RocketMQ was not measured: ask for it with --rocketmq")
        return
    theirs = measure_rocketmq(max(5.0, options.seconds), [1, 16, 64])
    for wide, figures in theirs.items():
        print(f"RocketMQ {wide:>3} threads: {figures['rate']:,.0f}/s, {figures['p50']:.1f} / {figures['p99']:.1f} ms")
    for wide, (factor, threads) in WANTED.items():
        if wide in best:
            ratio = best[wide] / theirs[threads]["rate"]
            print(f"{wide:>5} open / its {threads:>2} threads: {ratio:.2f} (wanted: {factor})")


def settle(bench: Bench, settled: int, pending: int) -> None:
    """Commit `settled` transactions, and leave `pending` ones undecided, spread among them."""
    every, left, open_ones = max(1, settled // max(1, pending)), pending, deque[Callable[[], object]]()

    async def undecided(count: int) -> None:
        async def settle_one() -> None:
            async with bench.producer.transaction(bench.other, key=b"k", value=PADDING) as tx:
                tx.unknown()

        await asyncio.gather(*(settle_one() for _ in range(count)))

    # A hundred at a time: an event loop for each would take most of the time.
    for number in range(settled):
        if left > 0 and number % (every * 100) == 0:
            asyncio.run(undecided(min(100, left)))
            left -= 100
        if len(open_ones) >= 2_000:
            open_ones.popleft()()
        open_ones.append(bench.submit(KEYS[number % len(KEYS)], PADDING))
    while open_ones:
        open_ones.popleft()()


def trace(servers: str, options: argparse.Namespace) -> None:
    """Follow messages through all hops, and print the time of each."""
    noted = Trace()
    noted.of_sender()
    bench = Bench(servers, options.seconds, 1, "traced")
    warm_up(bench, options.warm_up)
    works = {f"{wide:,} in flight": partial(by_futures, wide, submit=bench.submit) for wide in options.in_flight}
    works |= {f"{rate:,.0f}/s": partial(paced, rate, submit=bench.submit) for rate in options.pace}
    for what, work in works.items():
        taken = [noted, bench.coordinator, bench.reader]
        for one in taken:
            one.take() if isinstance(one, Trace) else one.ask("trace")
        figures = bench.measure(options.seconds, lambda end, work=work: work(end=end))
        print(f"\n{what}: {figures['rate']:,.0f}/s, CPU {figures['cpu_us']:.1f} us a message (traced), load {load()}")
        report([one.take() if isinstance(one, Trace) else one.ask("trace") for one in taken])
    bench.close()


def restart(servers: str, options: argparse.Namespace) -> None:
    """Measure the time of a new coordinator to take the store over."""
    bench = Bench(servers, 0, 0)
    settle(bench, options.settled, options.pending)
    while bench.coordinator.ask()["pending"] != options.pending:
        time.sleep(0.5)
    # Long enough for the coordinator to copy pending halves, and to trim its logs.
    time.sleep(12)
    bench.coordinator.close()
    begin = time.monotonic()
    bench.coordinator = Child("coordinate", servers)
    made = time.monotonic()
    while (now := bench.coordinator.ask())["pending"] != options.pending or now["owned"] < 2:
        assert time.monotonic() - begin < 300, now
        time.sleep(0.02)
    print(
        f"{options.settled:,} settled and {options.pending:,} pending: taken over in {time.monotonic() - begin:.1f} s, "
        f"of which {made - begin:.1f} s for the process itself; load {load()}"
    )
    bench.close()


def disk(servers: str, folder: Path, options: argparse.Namespace) -> None:
    """Print the disk use of half, op and done while transactions are settled."""
    bench = Bench(servers, 0, 0)
    step = max(1, options.settled // 10)
    for number in range(1, 11):
        settle(bench, step, 0)
        time.sleep(7)
        sizes = {name: held(folder, f"penstock.{name}-") for name in ("half", "op", "done")}
        text = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
        print(f"{number * step:>12,} settled: {text}", flush=True)
    bench.close()


def held(folder: Path, beginning: str) -> int:
    """Return the bytes on disk of partitions whose folder's name has this beginning."""
    files = (file for place in folder.rglob(f"{beginning}*") if place.is_dir() for file in place.iterdir())
    return sum(file.stat().st_blocks * 512 for file in files if file.exists())


def load() -> str:
    """Return the machine's load averages."""
    return " ".join(f"{each:.1f}" for each in os.getloadavg())


@contextmanager
def a_broker(options: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Yield the addresses of a broker, and its data folder."""
    # A measured broker has both compilers of the JVM, as RocketMQ's has.
    os.environ.setdefault("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+TieredCompilation")
    if options.bootstrap:
        yield options.bootstrap, Path()
        return
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        DevBroker(data_dir=folder, config=_SOON if options.disk else {}) as broker,
    ):
        yield broker.bootstrap_servers, Path(folder)


def main() -> None:
    """Run a role, or the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each measurement")
    parser.add_argument("--warm-up", type=float, default=75.0, help="seconds before the first measurement")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64, 256, 2_000], help="open transactions")
    parser.add_argument("--most-threads", type=int, default=256, help="with more open ones, threads are left out")
    parser.add_argument("--rocketmq", action="store_true", help="measure RocketMQ beside it")
    parser.add_argument("--trace", action="store_true", help="say where the time of a message goes, hop by hop")
    parser.add_argument("--pace", type=float, nargs="*", default=[100.0, 5_000.0], help="rates for --trace")
    parser.add_argument("--restart", action="store_true", help="measure a coordinator's restart")
    parser.add_argument("--disk", action="store_true", help="measure what the store holds on disk")
    parser.add_argument("--settled", type=int, default=1_000_000, help="settled transactions for --restart and --disk")
    parser.add_argument("--pending", type=int, default=10_000, help="pending transactions for --restart")
    parser.add_argument("--bootstrap", help="measure on this broker instead of an embedded one (not with --disk)")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        {"coordinate": coordinate, "read": read}[options.role[0]](*options.role[1:])
        return
    with a_broker(options) as (servers, folder):
        if options.restart:
            restart(servers, options)
        elif options.trace:
            trace(servers, options)
        elif options.disk:
            disk(servers, folder, options)
        else:
            throughput(servers, options)


if __name__ == "__main__":
    main()
