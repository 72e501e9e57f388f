"""The cost of the dashboard: 50 members with 200 partitions each report every 2 s, without and with a browser.

Prints the share of one core that its process takes, its memory over time, and the time between two states that a
browser gets. This process replays the reports into the topic; the dashboard runs in its own process. A browser is a
client that reads the events; with --chromium, a headless Chromium runs as well.

    python benchmarks/dashboard.py [--seconds 60] [--members 50] [--partitions 200] [--chromium]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock import clients
from penstock.clients.topics import ensure_topics
from penstock.consumer.latencies import BUCKETS
from penstock.devbroker import DevBroker
from penstock.fleet.reports.report import encode_report
from penstock.fleet.reports.reporter import topic_spec
from penstock.fleet_member import REPORTS_TOPIC, Sender

RATE = 20_000
TICKS = os.sysconf("SC_CLK_TCK")


def report(member: int, partitions: int, at: float, sequence: int, members: int) -> tuple[bytes, bytes]:
    """Return key and value of a report of a busy member."""
    chance = random.Random(member)  # noqa: S311 - any numbers will do
    sender = Sender("shop", f"host-{member:02d}-4711-ab12", f"host-{member:02d}", 4711)
    entries = [
        {
            "topic": "orders",
            "partition": member * partitions + number,
            "watermark": 1_000_000 + int(at * 10),
            "position": 1_000_400 + int(at * 10),
            "in_flight": 400,
            "bytes_in_flight": 180_000,
            "lag": 400 + chance.randrange(900),
            "gaps": chance.randrange(20),
            "handler": "charge",
            "blocking_offset": 1_000_000 + int(at * 10),
            "state": "queued" if number % 12 else "in handler",
            "age": chance.random() if number % 12 == 0 else None,
            "worker": None if number % 12 else f"penstock-worker-shop-{number % 16}",
            "key_hash": f"{chance.getrandbits(64):016x}",
        }
        for number in range(partitions)
    ]
    rate = RATE / members
    lanes = {
        "charge": {"depth": [chance.randrange(90) for _ in range(64)], "age": [chance.random() for _ in range(64)]}
    }
    counts = {
        "handled": int(rate * at),
        "failed": int(at),
        "in_flight": 400 * partitions,
        "busy_workers": 16,
        "workers": 16,
    }
    latencies = [int(rate * at / BUCKETS)] * BUCKETS
    description = {
        "partitions": entries,
        "counts": {**counts, **{f"other_{number}": number for number in range(20)}},
        "lanes": lanes,
        "latencies": {"handler": latencies, "done": latencies},
    }
    numbers = {"sequence": sequence, "interval_s": 2.0, "uptime_s": round(at, 1)}
    return sender.key, encode_report(sender, description, {"handled": rate, "failed": 0.02}, numbers)


def replay(servers: str, members: int, partitions: int, ending: threading.Event) -> None:
    """Write the reports of all members, each every 2 s, spread over that time."""
    producer = clients.producer(servers, {"compression.type": "zstd", "linger.ms": 0})
    begun, sequence = time.monotonic(), 0
    while not ending.is_set():
        sequence += 1
        for member in range(members):
            key, value = report(member, partitions, time.monotonic() - begun, sequence, members)
            producer.produce(REPORTS_TOPIC, value, key=key)
            producer.poll(0)
            due = begun + 2 * (sequence - 1) + 2 * (member + 1) / members
            ending.wait(max(0.0, due - time.monotonic()))
    producer.flush(10)


def cpu_s(process: int) -> float:
    """Return the seconds of processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mib(process: int) -> float:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


@contextmanager
def looking(port: int, path: str, came: Callable[[int], None]) -> Iterator[None]:
    """Ask for one state after the other as a browser does; call `came` with the size of each."""
    ending = threading.Event()

    def read() -> None:
        after = 0.0
        while not ending.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", f"{path}&after={after}")
            content = connection.getresponse().read()
            connection.close()
            after = json.loads(content)["made"]
            came(len(content))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(60)


def measured(title: str, process: int, seconds: float) -> float:
    """Print the share of a core that a process takes, and its memory; return the share."""
    begun, before = time.monotonic(), cpu_s(process)
    held = []
    while (left := begun + seconds - time.monotonic()) > 0:
        held.append(memory_mib(process))
        time.sleep(min(5.0, left))
    share = (cpu_s(process) - before) / (time.monotonic() - begun)
    memory = f"memory {held[0]:.0f} MiB at first, {held[-1]:.0f} MiB at last, {max(held):.0f} MiB at most"
    print(f"{title}: {share:.1%} of a core, {memory}, over {seconds:.0f} s", flush=True)
    return share


def serve(servers: str, stack: ExitStack) -> tuple[int, int]:
    """Start the dashboard; return its process and its port."""
    command = [sys.executable, "-m", "penstock", "dashboard", "--http", "127.0.0.1:0", "--bootstrap-servers", servers]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))  # noqa: S603 - ours
    stack.callback(process.terminate)
    assert process.stdout is not None
    line = process.stdout.readline()
    print(line, end="")
    return process.pid, int(line.partition("http://127.0.0.1:")[2].partition(";")[0])


def state(port: int) -> Any:
    """Return the state of all groups."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/api/groups")
    return json.loads(connection.getresponse().read())


def main() -> None:
    """Measure, and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--members", type=int, default=50)
    options.add_argument("--partitions", type=int, default=200)
    options.add_argument("--chromium", action="store_true")
    arguments = options.parse_args()
    ending = threading.Event()
    with ExitStack() as stack:
        broker = stack.enter_context(DevBroker())
        servers = broker.bootstrap_servers
        ensure_topics(clients.admin(servers, {}), [topic_spec(REPORTS_TOPIC)])
        size = len(report(0, arguments.partitions, 1.0, 1, arguments.members)[1])
        members, partitions = arguments.members, arguments.partitions
        print(f"{members} members x {partitions} partitions, {size / 1024:.0f} KiB a report, each every 2 s")
        sending = threading.Thread(target=replay, args=(servers, members, partitions, ending))
        sending.start()
        stack.callback(ending.set)
        process, port = serve(servers, stack)
        while not (groups := state(port).get("groups")) or groups[0]["living"] < arguments.members:
            time.sleep(0.5)
        measured("without a browser", process, arguments.seconds)
        for title, path in (
            ("one browser on all groups", "/api/groups?"),
            ("one browser on the group", "/api/groups?group=shop"),
        ):
            times: list[float] = []
            sizes: list[int] = []

            def came(length: int, times: list[float] = times, sizes: list[int] = sizes) -> None:
                times.append(time.monotonic())
                sizes.append(length)

            with looking(port, path, came):
                measured(title, process, arguments.seconds)
            gaps = [after - before for before, after in pairwise(times)]
            mean, most = sum(gaps) / len(gaps), max(gaps)
            print(f"  a state of {max(sizes) / 1024:.0f} KiB every {mean:.2f} s, {most:.2f} s at most")
        if arguments.chromium:
            found = shutil.which("chromium")
            assert found is not None, "no chromium on the path"
            from playwright.sync_api import sync_playwright

            with sync_playwright() as started:
                page = started.chromium.launch(executable_path=found, args=["--no-sandbox"]).new_page()
                page.goto(f"http://127.0.0.1:{port}/#/shop")
                measured("a Chromium on the page of the group", process, arguments.seconds)
        measured("without a browser again", process, arguments.seconds)
        ending.set()
        sending.join()


if __name__ == "__main__":
    main()
