"""Compares penstock with similar libraries in one run: the table of `docs/performance.md`.

usage: python benchmarks/side_by_side.py [--small] [--only W0,W1,W2,W3,transactions] [--rounds N] [--share PART]
                                         [--limit S] [--seconds S] [--warm-up S]

W0  empty handler, 1,000,000 messages; compared with a bare `consume` loop with penstock's fetch settings
W1  10 ms handler, 60,000 messages, 64 at once; compared with 64 bare threads that only sleep
W2  1 ms handler, 300,000 messages, 64 at once; compared with the same
W3  5 ms handler, 60,000 messages of which 2 % have one key, 64 at once; the ideal is 10,000/s
transactions  128-byte messages, each in a transaction, 16 and 64 in flight, from before the send to a consumer's hands:
    penstock (one thread that submits; "sent" does not wait for stored decisions, as RocketMQ does not), RocketMQ from
    so many threads, and one Kafka transaction per message from so many producers

Messages of W0 to W3 have 100 B and one of 10,000 keys, in 8 partitions. All read the same topics of one embedded Kafka,
each time as a new group in its own process. The process measures itself from the beginning of the first handler to the
end of the last one, or to its time limit. Rounds go through all in turn, so that a machine that slows down slows all.

Peers are fetched once into penstock's cache: jars by the Ivy inside pyspark, Python packages by pip into separate
environments. The table marks peers that cannot be fetched or that fail. The whole run takes about 25 minutes on two
cores, --small about five.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from confluent_kafka import Producer
from consume import Work, produce, spread
from peers.environment import BENCHMARKS
from peers.faststream import runner as faststream
from peers.measurement import Task
from peers.parallel_consumer import runner as parallel_consumer
from peers.quix import runner as quix
from peers.rocketmq import runner as rocketmq

import transactions
from penstock.devbroker import DevBroker
from penstock.errors import DevBrokerError

OURS = "penstock"
IN_FLIGHT = (16, 64)
WORKS = {
    "W0": Work("W0", 1_000_000, 8, 0.0),
    "W1": Work("W1", 60_000, 64, 0.010),
    "W2": Work("W2", 300_000, 64, 0.001),
    "W3": Work("W3", 60_000, 64, 0.005, hot_every=50),
}
#: Handlers at once of a peer with an empty handler; penstock has 8 threads.
EMPTY_WIDTH = {"parallel-consumer": 256, "faststream-confluent": 64, "faststream-aiokafka": 64}
#: Default sizes of a run.
WHOLE = {"rounds": 3, "share": 1.0, "limit": 20.0, "seconds": 5.0, "warm_up": 75.0}
SMALL = {"rounds": 1, "share": 0.2, "limit": 6.0, "seconds": 2.0, "warm_up": 10.0}
#: Shown for a missing measurement.
NONE = "-"
#: Remarks in the table. Standard error has the reasons.
ABSENT, FAILED, CUT = "**not available**", "**failed**", "not all within the limit"
#: Errors that prevent a peer's installation or measurement.
FAILURES = (DevBrokerError, OSError, subprocess.SubprocessError, ValueError)


@dataclass
class Row:
    """The measurements of one contender in one workload, round by round."""

    label: str
    rates: list[float] = field(default_factory=list)
    #: CPU of its process, in µs for each message.
    cpu_us: list[float] = field(default_factory=list)
    #: ms from send to visible.
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    remarks: set[str] = field(default_factory=set)

    def markdown(self, work: str, ours: Row) -> str:
        """Return a line of the table; ratios are of the same round."""
        remark = "".join(f"; {each}" for each in sorted(self.remarks))
        if not self.rates:
            return f"| {work} | {self.label}{remark} | {' | '.join([NONE] * 4)} |"
        # A failed round has no rate to compare.
        ratios = [mine / our for mine, our in zip(self.rates, ours.rates, strict=False)]
        ratio = "1" if self is ours else spread(ratios, "{:.2f}") if len(ours.rates) == len(self.rates) else NONE
        cpu = f"{statistics.median(self.cpu_us):.1f}" if self.cpu_us else NONE
        waits = f"{statistics.median(self.p50):.1f} / {statistics.median(self.p99):.1f}" if self.p50 else NONE
        return f"| {work} | {self.label}{remark} | {spread(self.rates)} | {ratio} | {cpu} | {waits} |"


class Contenders:
    """The commands of all consumers; an unavailable peer is looked up once."""

    def __init__(self) -> None:
        own = [sys.executable, str(BENCHMARKS / "side_by_side_contenders.py")]
        self._makers: dict[str, Callable[[], list[str]]] = {
            **{name: partial(list, [*own, name]) for name in (OURS, "penstock-async", "bare-loop", "bare-threads")},
            "parallel-consumer": lambda: parallel_consumer.runner_command("ConsumeRunner"),
            "faststream-confluent": lambda: faststream.runner_command("confluent"),
            "faststream-aiokafka": lambda: faststream.runner_command("aiokafka"),
            "quix": quix.runner_command,
        }
        self._commands: dict[str, list[str] | None] = {}

    @staticmethod
    def rows(work: Work) -> dict[str, Row]:
        """Return the contenders of a workload with their labels."""
        wide = f"{work.workers} at once"
        client = f"FastStream {faststream.VERSION}"
        peers = {
            "parallel-consumer": f"Parallel Consumer {parallel_consumer.VERSION}, by key",
            "faststream-confluent": f"{client}, confluent-kafka, at most once, in no order",
            "faststream-aiokafka": f"{client}, aiokafka, at most once, in no order",
            "quix": f"Quix Streams {quix.VERSION}, one thread, by partition",
        }
        if not work.handler_s:
            ours = {OURS: f"**penstock**, by key, {work.workers} threads", "bare-loop": "bare loop, calls nothing"}
        else:
            ours = {
                OURS: "**penstock**, by key",
                "penstock-async": "penstock, by key, `async def`",
            }
            if not work.hot_every:
                ours["bare-threads"] = f"bare threads, {wide}, consume nothing"
        return {name: Row(label) for name, label in {**ours, **peers}.items()}

    def measure(self, name: str, row: Row, task: Task) -> None:
        """Run one contender and add its measurements to its row."""
        command = self._command(name)
        if command is None:
            row.remarks.add(ABSENT)
            return
        try:
            completed = subprocess.run(  # noqa: S603 - programs of this folder
                [*command, *task.arguments()],
                check=True,
                timeout=120 + task.limit_s,
                capture_output=True,
                text=True,
                env={**os.environ, **({} if command[0] == sys.executable else {"PYTHONPATH": str(BENCHMARKS)})},
            )
            found = json.loads(completed.stdout.strip().splitlines()[-1])
            handled, seconds = found["handled"], found["seconds"]
            row.rates.append(handled / seconds)
            row.cpu_us.append(found["cpu_s"] / handled * 1e6)
        except (*FAILURES, IndexError) as error:
            row.remarks.add(FAILED)
            tell(row.label, error)
        else:
            if handled < task.count:
                row.remarks.add(CUT)

    def _command(self, name: str) -> list[str] | None:
        """Return a contender's command, fetched and compiled if necessary; None if that failed."""
        if name not in self._commands:
            try:
                self._commands[name] = self._makers[name]()
            except FAILURES as error:
                self._commands[name] = None
                tell(name, error)
        return self._commands[name]


def tell(who: str, error: Exception) -> None:
    """Print why something could not be measured."""
    print(f"{who}: {error}", file=sys.stderr, flush=True)
    if isinstance(error, subprocess.CalledProcessError) and error.stderr:
        print("\n".join(error.stderr.splitlines()[-5:]), file=sys.stderr, flush=True)


def consuming(servers: str, contenders: Contenders, work: Work, options: argparse.Namespace) -> list[str]:
    """Measure one workload with all contenders in turn and return its lines of the table."""
    # With fewer messages an empty handler would end too soon. The limit ends slow contenders.
    its_own = replace(work, count=int(work.count * options.share)) if work.handler_s else work
    topic, rows = produce(servers, its_own), contenders.rows(work)
    for _ in range(options.rounds):
        for name, row in rows.items():
            width = work.workers if work.handler_s else EMPTY_WIDTH.get(name, work.workers)
            contenders.measure(name, row, Task(servers, topic, its_own.count, width, work.handler_s, options.limit))
    return [row.markdown(work.name, rows[OURS]) for row in rows.values()]


class KafkaTransactions:
    """Producers with one Kafka transaction of one message at a time each."""

    def __init__(self, servers: str, topic: str, count: int) -> None:
        self._topic, self._idle = topic, queue.SimpleQueue[Producer]()
        for number in range(count):
            name = f"{topic}-{count}-{number}"
            producer = Producer({"bootstrap.servers": servers, "transactional.id": name, "linger.ms": 0})
            producer.init_transactions(30)
            self._idle.put(producer)

    def send(self, key: bytes, value: bytes) -> None:
        """Send one message in a transaction and commit it."""
        producer = self._idle.get()
        producer.begin_transaction()
        producer.produce(self._topic, value, key)
        producer.commit_transaction(30)
        self._idle.put(producer)


def transacting(servers: str, options: argparse.Namespace) -> list[str]:
    """Measure transactions in turn and return their lines of the table."""
    rows = {wide: transaction_rows() for wide in IN_FLIGHT}
    bench = transactions.Bench(servers, options.seconds, options.rounds)
    if options.warm_up:
        transactions.warm_up(bench, options.warm_up)
    with ExitStack() as ending:
        ending.callback(bench.close)
        peer: rocketmq.RocketMQ | None = None
        try:
            peer = ending.enter_context(rocketmq.rocketmq())
        except FAILURES as error:
            tell("rocketmq", error)
            for its_rows in rows.values():
                its_rows["rocketmq"].remarks.add(ABSENT)
        for _ in range(options.rounds):
            for wide, its_rows in rows.items():
                for name, figures in transaction_figures(bench, peer, wide, its_rows).items():
                    row = its_rows[name]
                    row.rates.append(figures["rate"])
                    row.p50.append(figures["p50"])
                    row.p99.append(figures["p99"])
    return [row.markdown(f"{wide} in flight", its[OURS]) for wide, its in rows.items() for row in its.values()]


def transaction_rows() -> dict[str, Row]:
    """Return the contenders of transactions with their labels."""
    labels = {
        OURS: "**penstock**, decisions stored",
        "sent": "penstock, decisions sent",
        "rocketmq": f"RocketMQ {rocketmq.VERSION}, decisions sent",
        "kafka": "one Kafka transaction per message",
    }
    return {name: Row(label) for name, label in labels.items()}


def transaction_figures(
    bench: transactions.Bench, peer: rocketmq.RocketMQ | None, wide: int, rows: dict[str, Row]
) -> dict[str, transactions.Figures]:
    """Measure one round of transactions, with `wide` in flight."""
    by_futures = transactions.by_futures
    found = {
        OURS: bench.measure(bench.seconds, lambda end: by_futures(wide, end, bench.submit)),
        "sent": bench.measure(bench.seconds, lambda end: by_futures(wide, end, bench.submit_sent)),
        "kafka": kafka_figures(bench, wide),
    }
    if peer is not None:
        try:
            found["rocketmq"] = peer.measure(wide, bench.seconds)
        except FAILURES as error:
            rows["rocketmq"].remarks.add(FAILED)
            tell("rocketmq", error)
    return found


def kafka_figures(bench: transactions.Bench, wide: int) -> transactions.Figures:
    """Measure one Kafka transaction per message; its many clients exist only meanwhile."""
    kafka = KafkaTransactions(bench.servers, bench.topic, wide)
    return bench.measure(bench.seconds, lambda end: transactions.by_threads(wide, end, kafka.send))


def main() -> None:
    """Parse the command line and run."""
    # A measured broker has both compilers of the JVM.
    os.environ.setdefault("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+TieredCompilation")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help=f"a quick run: {SMALL}")
    parser.add_argument("--only", default=",".join((*WORKS, "transactions")), help="works, with commas between")
    parser.add_argument("--rounds", type=int, help="rounds of each work (default 3)")
    parser.add_argument("--share", type=float, help="part of the messages of W1 to W3 (default 1)")
    parser.add_argument("--limit", type=float, help="seconds that a contender may take (default 20)")
    parser.add_argument("--seconds", type=float, help="length of each round of transactions (default 5)")
    parser.add_argument("--warm-up", type=float, help="seconds before transactions are measured (default 75)")
    options = parser.parse_args()
    for name, value in (SMALL if options.small else WHOLE).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    parts = [part.strip() for part in options.only.split(",")]
    if unknown := sorted(set(parts) - {*WORKS, "transactions"}):
        parser.error(f"no such work: {', '.join(unknown)}; there are {', '.join((*WORKS, 'transactions'))}")
    before = os.getloadavg()[0]
    with DevBroker() as broker:
        contenders, lines, loads = Contenders(), [], []
        for name in parts:
            if name == "transactions":
                lines += transacting(broker.bootstrap_servers, options)
            else:
                lines += consuming(broker.bootstrap_servers, contenders, WORKS[name], options)
            loads.append(f"{os.getloadavg()[0]:.1f} after {name}")
            print(f"load average {loads[-1]}", file=sys.stderr, flush=True)
    print_table(lines, options, f"{before:.1f} before, {', '.join(loads)}")


def print_table(lines: Sequence[str], options: argparse.Namespace, load: str) -> None:
    """Print the table."""
    print(
        f"{os.cpu_count()} cores, Python {sys.version.split()[0]}; {options.rounds} rounds in turn, "
        f"{options.share:g} of the messages, at most {options.limit:g} s each; "
        f"load average {load}\n"
    )
    columns = ("messages/s, min / median / max", "to penstock", "its CPU, µs a message", "to visible p50 / p99, ms")
    print(f"| work | who | {' | '.join(columns)} |\n{'|---' * (2 + len(columns))}|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
