"""The cost of telemetry and reports for a consumer: the same app without and with them, in alternating rounds.

usage: python benchmarks/telemetry.py [--rounds N] [--count N] [--work 20us,empty] [--only metrics,tracing,report,...]

off       no telemetry and no reports; all others are compared with it
metrics   no spans: a meter provider of the SDK that is read every 5 s, and a tracer provider without spans
sampled   the same, with the times of only one message of a hundred: `Telemetry(sample_ratio=0.01)`
tracing   `Telemetry(sample_ratio=0.01)`: those metrics and, of one message of a hundred, a span, exported to nowhere
headers   tracing of messages with two headers, one of them the `traceparent` of a trace that is not sampled; compared
          with `bare`, the same messages without telemetry
report    `App(report=True)`, a report every 2 s

The handler always uses the processor for the same number of microseconds. CPU is that of all threads of the process,
from the first handler call to the last. Other load hardly changes it, so use its ratios. They are medians of each
round's ratio to `off` of the same round; the runs of a round alternate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import NoOpTracerProvider

import penstock
from penstock.devbroker import DevBroker

KEYS = 10_000
PARTITIONS = 8
SIZE = 100
RATIO = 0.01
HEADERS: list[tuple[str, str | bytes | None]] = [
    ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"),
    ("content-type", b"application/json"),
]


@dataclass(frozen=True)
class Cost:
    """The cost of a run, in microseconds a message."""

    wall: float
    cpu: float


class Nowhere(SpanExporter):
    """Counts spans and drops them."""

    def __init__(self) -> None:
        self.count = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Count them."""
        self.count += len(spans)
        return SpanExportResult.SUCCESS


class Unread(MetricExporter):
    """Drops metrics."""

    def export(self, *_: Any, **__: Any) -> MetricExportResult:
        """Do nothing."""
        return MetricExportResult.SUCCESS

    def force_flush(self, *_: Any, **__: Any) -> bool:
        """Do nothing."""
        return True

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


class Span:
    """Records the first and the last call of a handler, in wall time and in CPU time of the process."""

    def __init__(self, count: int) -> None:
        self.done = threading.Event()
        self._turn = iter(range(1, count + 1))
        self._count = count
        self._begun = self._ended = (0.0, 0.0)

    def tick(self) -> None:
        """Count a call."""
        turn = next(self._turn)
        if turn == 1:
            self._begun = (time.perf_counter(), time.process_time())
        if turn == self._count:
            self._ended = (time.perf_counter(), time.process_time())
            self.done.set()

    @property
    def cost(self) -> Cost:
        """The cost between the first and the last call."""
        wall, cpu = (1e6 * (ended - begun) / self._count for begun, ended in zip(self._begun, self._ended, strict=True))
        return Cost(wall, cpu)


def steps_of(microseconds: float) -> int:
    """Return the number of steps of `work` for so many microseconds of CPU on this machine: the least of ten tries."""
    steps = 100_000

    def once() -> float:
        begun = time.thread_time()
        work(steps)
        return time.thread_time() - begun

    return round(steps * microseconds / 1e6 / min(once() for _ in range(10)))


def work(steps: int) -> None:
    """Use the processor, in Python."""
    for _ in range(steps):
        pass


def filled(bootstrap: str, count: int, headers: list[tuple[str, str | bytes | None]]) -> str:
    """Make a topic with `count` messages."""
    topic = f"telemetry-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result()
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "batch.size": 1_000_000})
    value = b"x" * SIZE
    for number in range(count):
        while True:
            try:
                producer.produce(topic, value, key=b"k%d" % (number % KEYS), headers=headers)
                break
            except BufferError:
                producer.poll(0.1)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()
    return topic


def cost_of(bootstrap: str, topic: str, count: int, steps: int, variant: str) -> Cost:
    """Consume all of a topic in a new group and return the cost."""
    seen, exporter = Span(count), Nowhere()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(exporter))
    meters = MeterProvider(
        [PeriodicExportingMetricReader(Unread(), export_interval_millis=5_000)], shutdown_on_exit=False
    )
    telemetry = {
        "metrics": penstock.Telemetry(NoOpTracerProvider(), meters),
        "sampled": penstock.Telemetry(NoOpTracerProvider(), meters, sample_ratio=RATIO),
        "tracing": penstock.Telemetry(tracers, meters, sample_ratio=RATIO),
        "headers": penstock.Telemetry(tracers, meters, sample_ratio=RATIO),
    }.get(variant)
    app = penstock.App(
        f"bench-{uuid.uuid4().hex}",
        bootstrap_servers=bootstrap,
        workers=8,
        telemetry=telemetry,
        report=variant == "report",
    )
    tick = seen.tick

    def handle(_message: penstock.Message) -> None:
        if steps:
            work(steps)
        tick()

    app.handler(topic)(handle)
    with app.start():
        if not seen.done.wait(900):
            sys.exit(f"{variant} did not end")
    tracers.shutdown()
    meters.shutdown()
    if variant in ("tracing", "headers") and not 0.5 * RATIO * count < exporter.count < 3 * RATIO * count + 1000:
        sys.exit(f"{variant}: {exporter.count} spans of {count} messages")
    return seen.cost


def table(rounds: dict[str, list[Cost]]) -> None:
    """Print the cost of each variant and its ratios."""
    print("| variant | CPU, us a message | wall | CPU, to off | min to max | wall, to off |\n|---|---|---|---|---|---|")
    for name, costs in rounds.items():
        base = rounds["bare" if name in {"bare", "headers"} else "off"]
        cpu = sorted(cost.cpu / off.cpu for cost, off in zip(costs, base, strict=True))
        wall = [cost.wall / off.wall for cost, off in zip(costs, base, strict=True)]
        print(
            f"| {name} | {statistics.median(cost.cpu for cost in costs):.2f} "
            f"| {statistics.median(cost.wall for cost in costs):.2f} | {statistics.median(cpu):.3f} "
            f"| {cpu[0]:.3f} to {cpu[-1]:.3f} | {statistics.median(wall):.3f} |"
        )
    sys.stdout.flush()


def main() -> None:
    """Run the chosen variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=100_000, help="messages of a run; ten times with an empty handler")
    parser.add_argument("--work", default="20us,empty")
    parser.add_argument("--only", default="metrics,sampled,tracing,headers,report")
    given = parser.parse_args()
    wanted = given.only.split(",")
    variants = ["off", *(name for name in wanted if name != "headers"), *(["bare"] * ("headers" in wanted))]
    variants += ["headers"] * ("headers" in wanted)
    with DevBroker() as broker:
        for kind_of_work in given.work.split(","):
            microseconds = 0 if kind_of_work == "empty" else int(kind_of_work.removesuffix("us"))
            count = given.count if microseconds else 10 * given.count
            steps = steps_of(microseconds) if microseconds else 0
            plain = filled(broker.bootstrap_servers, count, [])
            with_headers = filled(broker.bootstrap_servers, count, HEADERS) if "headers" in wanted else plain
            topics = {"headers": with_headers, "bare": with_headers}
            rounds: dict[str, list[Cost]] = {name: [] for name in variants}
            for number in range(given.rounds + 1):
                for name in variants if number % 2 else reversed(variants):
                    cost = cost_of(broker.bootstrap_servers, topics.get(name, plain), count, steps, name)
                    if number:  # the first round is warm-up
                        rounds[name].append(cost)
            print(f"\nhandler: {kind_of_work}, {count} messages, {given.rounds} rounds\n")
            table(rounds)


if __name__ == "__main__":
    main()
