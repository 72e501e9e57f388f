"""How fast penstock consumes, compared with bare loops and threads in the same run.

usage: python benchmarks/consume.py [--rounds N] [--only W0,json,W1,A1,W2,P2,...]

W0  empty handler, 1,000,000 messages of 100 B, 10,000 keys, 8 partitions, 8 workers; compared with two bare loops:
    one with the client's own defaults, one with penstock's fetch settings
json     the empty handler with `decoder="json"`, 300,000 messages of 110 B; compared with a bare loop and `json.loads`
model    the same with a pydantic model; compared with a bare loop that validates with it
filter   the empty handler with a filter that reads the key and accepts all, 500,000 messages; compared with no filter
batch    a handler of `batch=100`; compared with the empty handler of single messages
header   `key="header:account"`; compared with the empty handler, for which the header is only fetched
W1  10 ms handler, 60,000 messages, 64 workers; compared with 64 bare threads that only sleep
A1  10 ms `async def` handler, 300,000 messages, 1,000 at once; compared with 1,000 bare asyncio tasks that only sleep
W2  1 ms handler, 300,000 messages, 64 workers; compared with 64 bare threads
A2  the same with `async def` handlers, 64 at once; compared with 64 bare asyncio tasks
P2  the same in two processes of one group, 32 workers each: `penstock run --processes 2`; compared with 64 bare threads
W3  5 ms handler, 60,000 messages of which 2 % have one key, 64 workers; compared with the ideal, 1,200 x 5 ms
poison   W1 with 1 ms, and one key of 10,000 that fails for ever; compared with a run without it
tracker  1,000,000 offsets in runs of 500, registered, then completed at random by 20 threads
memory   a backlog of 1,000,000 messages of 1 KB: resident memory while it is consumed

Rounds alternate between penstock and the others, so that a machine that slows down slows all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tenacity
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pydantic import BaseModel

from penstock.consumer import ConsumerSettings, LitePushConsumer, handler, retry
from penstock.devbroker import DevBroker
from penstock.message import Message
from penstock.offsets import Tracker

KEYS = 10_000
PARTITIONS = 8
SIZE = 100


@dataclass(frozen=True)
class Work:
    """One workload."""

    name: str
    count: int
    workers: int
    handler_s: float
    hot_every: int = 0
    mode: str = "threads"
    size: int = SIZE
    #: The form of the values: random bytes, or JSON with an account in a header.
    form: str = "bytes"


WORKS = {
    "W0": Work("W0", 1_000_000, 8, 0.0),
    "json": Work("json", 300_000, 8, 0.0, form="json"),
    "model": Work("model", 300_000, 8, 0.0, form="json"),
    "filter": Work("filter", 500_000, 8, 0.0),
    "batch": Work("batch", 500_000, 8, 0.0),
    "header": Work("header", 300_000, 8, 0.0, form="json"),
    "W1": Work("W1", 60_000, 64, 0.010),
    "A1": Work("A1", 300_000, 1000, 0.010, mode="tasks"),
    "W2": Work("W2", 300_000, 64, 0.001),
    "A2": Work("A2", 300_000, 64, 0.001, mode="tasks"),
    "P2": Work("P2", 300_000, 64, 0.001, mode="processes"),
    "W3": Work("W3", 60_000, 64, 0.005, hot_every=50),
    "poison": Work("poison", 300_000, 64, 0.001),
    "memory": Work("memory", 1_000_000, 8, 0.0, size=1024),
}


class Payment(BaseModel):
    """The content of a JSON value."""

    id: int
    account: str
    amount: float
    currency: str
    text: str


#: Further options of the handler, in rows that measure an option.
OPTIONS: dict[str, dict[str, Any]] = {
    "json": {"decoder": "json"},
    "model": {"decoder": Payment},
    "filter": {"filter": lambda message: message.key is not None},
    "batch": {"batch": 100},
    "header": {"key": "header:account"},
}
#: The decoders of bare loops.
DECODERS: dict[str, Callable[[bytes], object]] = {"json": json.loads, "model": Payment.model_validate_json}


def produce(bootstrap: str, work: Work) -> str:
    """Make the workload's topic and fill it."""
    topic = make_topic(bootstrap, work)
    fill(bootstrap, topic, work)
    return topic


def make_topic(bootstrap: str, work: Work) -> str:
    """Make an empty topic for a workload."""
    topic = f"{work.name.lower()}-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result()
    return topic


def fill(bootstrap: str, topic: str, work: Work, *, at_once: bool = False) -> None:
    """Write a workload's messages; `at_once`: in one transaction, so that consumers see all at once."""
    config = {"bootstrap.servers": bootstrap, "linger.ms": 20, "batch.size": 1_000_000, "enable.idempotence": True}
    producer = Producer({**config, "transactional.id": topic} if at_once else config)
    if at_once:
        producer.init_transactions()
        producer.begin_transaction()
    value = os.urandom(work.size)
    for number in range(work.count):
        headers: list[tuple[str, str | bytes | None]] = []
        if work.form == "json":
            account = f"k{number % KEYS}"
            payment = Payment(id=number, account=account, amount=number / 7, currency="EUR", text="x" * 20)
            value, headers = payment.model_dump_json().encode(), [("account", account)]
        key = b"hot" if work.hot_every and number % work.hot_every == 0 else b"k%d" % (number % KEYS)
        while True:
            try:
                producer.produce(topic, value, key=key, headers=headers)
                break
            except BufferError:
                producer.poll(0.1)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()
    if at_once:
        producer.commit_transaction()


def raw_consume(
    bootstrap: str, topic: str, count: int, *, tuned: bool, decode: Callable[[bytes], object] | None = None
) -> float:
    """Return messages/s of a bare `consume` loop, from the first message to the last; it may decode the values."""
    config = ConsumerSettings().client_config(uuid.uuid4().hex)
    if not tuned:
        for key in ("fetch.queue.backoff.ms", "max.partition.fetch.bytes"):
            del config[key]
    consumer = Consumer({**config, "bootstrap.servers": bootstrap, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    seen, begun = 0, 0.0
    while seen < count:
        batch = consumer.consume(10_000, 0.1)
        if batch and not begun:
            begun = time.perf_counter()
        if decode is None:
            seen += sum(message.error() is None for message in batch)
            continue
        for message in batch:
            if message.error() is None:
                decode(message.value() or b"")
                seen += 1
    took = time.perf_counter() - begun
    consumer.close()
    return count / took


def bare_threads(work: Work) -> float:
    """Return handler calls/s of bare threads that share a counter and only sleep."""
    left = iter(range(work.count))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                if next(left, None) is None:
                    return
            time.sleep(work.handler_s)

    threads = [threading.Thread(target=run) for _ in range(work.workers)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return work.count / (time.perf_counter() - begun)


def bare_tasks(work: Work) -> float:
    """Return handler calls/s of bare asyncio tasks that share a counter and only sleep."""

    async def main() -> float:
        left = iter(range(work.count))

        async def run() -> None:
            for _ in left:
                await asyncio.sleep(work.handler_s)

        begun = time.perf_counter()
        await asyncio.gather(*(run() for _ in range(work.workers)))
        return work.count / (time.perf_counter() - begun)

    return asyncio.run(main())


class Clock:
    """Records the first and the last call of a handler. Counting is atomic in C: `next` on an iterator."""

    def __init__(self, count: int) -> None:
        self.begun = self.ended = 0.0
        self.done = threading.Event()
        self._turn = iter(range(1, count + 1))
        self._lock = threading.Lock()
        self._count = count

    def tick_all(self, messages: list[Message]) -> None:
        """Count a call with several messages."""
        with self._lock:
            turns = list(islice(self._turn, len(messages)))
        # The batch that reaches the count may have more messages.
        if turns and turns[0] == 1:
            self.begun = time.perf_counter()
        if turns and turns[-1] == self._count:
            self.ended = time.perf_counter()
            self.done.set()

    def tick(self) -> None:
        """Count a call."""
        turn = next(self._turn)
        if turn == 1:
            self.begun = time.perf_counter()
        if turn == self._count:
            self.ended = time.perf_counter()
            self.done.set()


def penstock_rate(bootstrap: str, topic: str, work: Work, *, plain: bool = False) -> float:
    """Return messages/s of penstock, from the first handler call to the end of the last; `plain`: without options."""
    clock = Clock(work.count)
    tick, sleep, seconds = clock.tick, time.sleep, work.handler_s
    begun: list[float] = []

    def empty(_message: Message) -> None:
        tick()

    def sleeping(_message: Message) -> None:
        if not begun:
            begun.append(time.perf_counter())
        sleep(seconds)
        tick()

    async def waiting(_message: Message) -> None:
        if not begun:
            begun.append(time.perf_counter())
        await asyncio.sleep(seconds)
        tick()

    options = {} if plain else OPTIONS.get(work.name, {})
    function: Callable[..., object] = waiting if work.mode == "tasks" else sleeping if seconds else empty
    if "batch" in options:
        function = clock.tick_all
    tasks = work.mode == "tasks"
    consumer = LitePushConsumer(
        f"bench-{uuid.uuid4().hex}",
        {topic: handler(function, **options)},
        bootstrap_servers=bootstrap,
        settings=ConsumerSettings(max_concurrency=work.workers) if tasks else ConsumerSettings(workers=work.workers),
    )
    with consumer:
        if not clock.done.wait(600):
            sys.exit(f"{work.name} did not end: {consumer.statistics()}")
    handled = consumer.statistics().handled
    if handled != work.count:
        sys.exit(f"{work.name}: {handled} handled of {work.count}")
    return work.count / (clock.ended - (begun[0] if begun else clock.begun))


def processes_rate(bootstrap: str, work: Work) -> float:
    """Return messages/s of two processes of one group, from the first handler call in either to the last.

    The topic is filled after both have their partitions, and committed when all messages are written.
    """
    topic, admin = make_topic(bootstrap, work), AdminClient({"bootstrap.servers": bootstrap})
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "BENCH_BROKERS": bootstrap,
            "BENCH_TOPIC": topic,
            "BENCH_GROUP": f"bench-{uuid.uuid4().hex}",
            "BENCH_WORKERS": str(work.workers // 2),
            "BENCH_SECONDS": str(work.handler_s),
            "BENCH_FOLDER": folder,
        }
        command = [sys.executable, "-m", "penstock", "run", "process_app:app", "--processes", "2"]
        with subprocess.Popen(  # noqa: S603 - this Python
            command, cwd=Path(__file__).parent, env={**os.environ, **variables}, stdout=subprocess.DEVNULL
        ) as process:
            try:
                deadline = time.monotonic() + 600
                while (shares := assigned(admin, variables["BENCH_GROUP"])) != [PARTITIONS // 2] * 2:
                    if time.monotonic() > deadline or process.poll() is not None:
                        sys.exit(f"{work.name} did not begin: {shares}")
                    time.sleep(0.2)
                fill(bootstrap, topic, work, at_once=True)
                while sum((counts := reports(folder)).values()) < work.count:
                    if time.monotonic() > deadline or process.poll() is not None:
                        sys.exit(f"{work.name} did not end: {counts}")
                    time.sleep(0.05)
            finally:
                process.terminate()
        found = [json.loads(path.read_text()) for path in Path(folder).iterdir() if path.suffix == ".json"]
    seconds: float = max(times["ended"] for times in found) - min(times["begun"] for times in found)
    return work.count / seconds


def assigned(admin: AdminClient, group: str) -> list[int]:
    """Return the number of partitions of each member of a group."""
    try:
        found = admin.describe_consumer_groups([group])[group].result(30)
    except KafkaException:  # the broker has no coordinator for the group yet: ask again
        return []
    return [len(member.assignment.topic_partitions) for member in found.members]


def reports(folder: str) -> dict[str, int]:
    """Return the number of messages that each process has handled, by its last report."""
    return {path.name: json.loads(path.read_text())["count"] for path in Path(folder).glob("*.json")}


def poison_rate(bootstrap: str, topic: str, work: Work, *, poisoned: bool) -> float:
    """Return healthy messages/s; `poisoned`: the messages of one key fail for ever."""
    healthy = work.count - work.count // KEYS
    clock = Clock(healthy)
    sleep, seconds = time.sleep, work.handler_s
    begun: list[float] = []

    def sleeping(message: Message) -> None:
        if not begun:
            begun.append(time.perf_counter())
        sleep(seconds)
        if message.key == b"k7":
            if poisoned:
                raise ValueError
        else:
            clock.tick()

    policy = retry(stop=tenacity.stop_never, wait=tenacity.wait_fixed(0.1))
    consumer = LitePushConsumer(
        f"bench-{uuid.uuid4().hex}",
        {topic: handler(sleeping, retry=policy)},
        bootstrap_servers=bootstrap,
        settings=ConsumerSettings(workers=work.workers, stop_timeout=0.0),
    )
    with consumer:
        if not clock.done.wait(600):
            sys.exit(f"{work.name} did not end: {consumer.statistics()}")
        if poisoned and not consumer.statistics().failed:
            sys.exit("the poison did no harm: nothing was measured")
    return healthy / (clock.ended - begun[0])


def tracker_rate(offsets: int = 1_000_000, run: int = 500, threads: int = 20) -> float:
    """Return offsets/s of the tracker alone: registered in runs, completed at random by many threads."""
    tracker = Tracker(0)
    begun = time.perf_counter()
    work = [(tracker.register(range(base, base + run)), range(run)) for base in range(0, offsets, run)]
    random.Random(7).shuffle(work)  # noqa: S311 - a seed, not a secret

    def complete(part: int) -> None:
        for block, indexes in work[part::threads]:
            tracker.complete(block, indexes)

    workers = [threading.Thread(target=complete, args=(part,)) for part in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if tracker.watermark != offsets:
        sys.exit(f"the tracker stands at {tracker.watermark}")
    return offsets / (time.perf_counter() - begun)


def resident_mib() -> float:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024 / 1024


def memory(bootstrap: str, work: Work) -> None:
    """Consume a long backlog and print the resident memory at each fifth of it."""
    topic = produce(bootstrap, work)
    before, seen = resident_mib(), []
    lock, count = threading.Lock(), 0

    def count_one(_message: Message) -> None:
        nonlocal count
        with lock:
            count += 1
            if count % (work.count // 10) == 0:
                seen.append(resident_mib())

    with LitePushConsumer(
        f"bench-{uuid.uuid4().hex}",
        {topic: handler(count_one)},
        bootstrap_servers=bootstrap,
        settings=ConsumerSettings(workers=work.workers),
    ):
        deadline = time.monotonic() + 600
        while count < work.count:
            if time.monotonic() > deadline:
                sys.exit(f"memory: {count} of {work.count}")
            time.sleep(0.05)
    print(f"memory  {work.count:,} messages of {work.size} B; resident MiB before {before:.0f}, at each tenth:")
    print("    " + " ".join(f"{mib:.0f}" for mib in seen))


def spread(values: list[float], form: str = "{:,.0f}") -> str:
    """Return min / median / max."""
    return " / ".join(form.format(value) for value in (min(values), statistics.median(values), max(values)))


def grounds(bootstrap: str, topic: str, work: Work) -> dict[str, Callable[[], float]]:
    """Return the comparisons of a workload: names and functions that return messages/s."""
    if work.name == "W0":
        raw_consume(bootstrap, topic, work.count, tuned=True)  # fills the page cache
        return {
            "bare loop, defaults": lambda: raw_consume(bootstrap, topic, work.count, tuned=False),
            "bare loop, same settings": lambda: raw_consume(bootstrap, topic, work.count, tuned=True),
        }
    if work.name in OPTIONS:
        decode = DECODERS.get(work.name)
        if decode is None:
            return {"without it": lambda: penstock_rate(bootstrap, topic, work, plain=True)}
        return {"bare loop that decodes": lambda: raw_consume(bootstrap, topic, work.count, tuned=True, decode=decode)}
    if work.mode == "tasks":
        return {f"{work.workers} bare asyncio tasks": lambda: bare_tasks(work)}
    if work.name == "poison":
        return {"without poison": lambda: poison_rate(bootstrap, topic, work, poisoned=False)}
    ideal = work.hot_every / work.handler_s
    return {"ideal": lambda: ideal} if work.hot_every else {f"{work.workers} bare threads": lambda: bare_threads(work)}


def measure_penstock(bootstrap: str, topic: str, work: Work) -> float:
    """Return messages/s of penstock for the workload."""
    if work.mode == "processes":
        return processes_rate(bootstrap, work)
    if work.name == "poison":
        return poison_rate(bootstrap, topic, work, poisoned=True)
    return penstock_rate(bootstrap, topic, work)


def compare(bootstrap: str, work: Work, rounds: int) -> None:
    """Run one workload and its comparisons in turn, and print all with the ratios of each round."""
    topic = "" if work.mode == "processes" else produce(bootstrap, work)
    held_against = grounds(bootstrap, topic, work)
    found: dict[str, list[float]] = {name: [] for name in held_against}
    mine: list[float] = []
    for _ in range(rounds):
        for name, measure in held_against.items():
            found[name].append(measure())
        mine.append(measure_penstock(bootstrap, topic, work))
    print(f"{work.name}  {work.count:,} messages, {work.workers} {work.mode}, {work.handler_s * 1000:g} ms handler")
    print(f"    {'penstock':26} {spread(mine)} msg/s")
    for name, rates in found.items():
        print(f"    {name:26} {spread(rates)} msg/s")
        print(f"    {'  ratio to it':26} {spread([a / b for a, b in zip(mine, rates, strict=True)], '{:.3f}')}")
    sys.stdout.flush()


def main() -> None:
    """Parse the command line and run."""
    # A measured broker has both compilers of the JVM.
    os.environ.setdefault("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+TieredCompilation")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each workload (default 3)")
    parser.add_argument(
        "--only",
        default="W0,json,model,filter,batch,header,W1,A1,W2,A2,P2,W3,poison,tracker,memory",
        help="workloads, with commas between",
    )
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}; min / median / max of {options.rounds} rounds")
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    with DevBroker() as broker:
        for name in map(str.strip, options.only.split(",")):
            if name == "tracker":
                print(f"tracker  {spread([tracker_rate() for _ in range(options.rounds)])} offsets/s")
            elif name == "memory":
                memory(broker.bootstrap_servers, WORKS[name])
            else:
                compare(broker.bootstrap_servers, WORKS[name], options.rounds)
    print(f"load average after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
