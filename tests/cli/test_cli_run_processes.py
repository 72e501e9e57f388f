from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import Message, Producer

from kafka_tools import committed
from penstock.devbroker import DevBroker
from waiting import wait_until

PARTITIONS = 4
KEYS = 40

APP = """
import os, time
import penstock.app

app = penstock.app.App("{group}", bootstrap_servers="{servers}", workers=4, commit_interval=0.2,
                       config={{"session.timeout.ms": {session_ms}}})
out = os.open("handled", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
who = f'{{os.environ["PENSTOCK_PROCESS"]}} {{os.getpid()}}'
os.write(out, f"up {{who}}\\n".encode())

@app.handler("{topic}")
def handle(message):
    place = f"{{who}} {{message.key.decode()}} {{message.partition}} {{message.offset}}"
    os.write(out, f"begun {{place}}\\n".encode())
    # A slow handler is what is tested.
    time.sleep(0.4 if message.value == b"slow" else 0)
    os.write(out, f"ended {{place}}\\n".encode())
"""


class Call(NamedTuple):
    process: str
    pid: int
    key: str
    partition: int
    offset: int


class Bench:
    """An app in a folder, its topic, and what its processes wrote down. One write of a short line is atomic."""

    def __init__(self, folder: Path, servers: str, topic: str, *, session_ms: int = 45_000) -> None:
        self.folder = folder
        self.servers = servers
        self.topic = topic
        self.group = f"group-of-{topic}"
        self.sent: set[tuple[int, int]] = set()
        self._producer = Producer({"bootstrap.servers": servers, "linger.ms": 5, "enable.idempotence": True})
        (folder / "shop.py").write_text(
            APP.format(group=self.group, servers=servers, topic=topic, session_ms=session_ms)
        )

    @contextmanager
    def run(self, count: int = 2) -> Iterator[subprocess.Popen[bytes]]:
        """Run the app in so many processes; none is left behind."""
        with (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock", "run", "shop:app", "--processes", str(count)],
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for pid in self.pids():
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)

    def send(self, rounds: int, value: bytes = b"v") -> None:
        """Write so many messages of each key, durably; one that is b"slow" takes its handler 0.4 s."""
        failures: list[object] = []

        def delivered(error: object, message: Message) -> None:
            if error is None:
                self.sent.add((message.partition(), message.offset()))
            else:
                failures.append(error)

        for _ in range(rounds):
            for key in range(KEYS):
                self._producer.produce(
                    self.topic, value, key=b"key%d" % key, partition=key % PARTITIONS, on_delivery=delivered
                )
        assert self._producer.flush(60) == 0
        assert not failures

    def send_until_both_work(self) -> None:
        """Write until every process has a share; their joining and what it hands over is past then."""

        def both() -> bool:
            self.send(1)
            return len({call.process for call in self.calls("ended")}) == 2

        wait_until(both, timeout=60, interval=0.3)
        self.wait_for_all()

    def wait_for_all(self, timeout: float = 60) -> None:
        """Wait until everything that was sent has been handled."""
        wait_until(lambda: self.sent <= {(one.partition, one.offset) for one in self.calls("ended")}, timeout)

    def calls(self, kind: str) -> list[Call]:
        """Return the calls of the handler that have begun, or ended, in their order."""
        found = []
        for line in self._lines():
            if line[0] == kind:
                _, process, pid, key, partition, offset = line
                found.append(Call(process, int(pid), key, int(partition), int(offset)))
        return found

    def pids(self, process: str | None = None) -> list[int]:
        """Return the processes that came up, of one number or of all."""
        return [int(line[2]) for line in self._lines() if line[0] == "up" and process in {None, line[1]}]

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def _lines(self) -> list[list[str]]:
        path = self.folder / "handled"
        return (
            [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            if (path.exists())
            else []
        )


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}


def test_two_processes_share_the_partitions_and_handle_each_message_once_in_the_order_of_its_key(
    tmp_path: Path, broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    bench = Bench(tmp_path, broker.bootstrap_servers, new_topic(PARTITIONS))
    with bench.run() as process:
        bench.send_until_both_work()
        bench.send(25)
        bench.wait_for_all()
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)

    assert code == 0, bench.log()
    calls = bench.calls("ended")
    assert len(calls) == len(bench.sent)
    assert {call.process for call in calls} == {"1", "2"}
    last = calls[-25 * KEYS :]
    assert {call.process for call in last} == {"1", "2"}
    assert len({(call.process, call.partition) for call in last}) == PARTITIONS
    by_key: dict[str, list[int]] = defaultdict(list)
    for call in calls:
        by_key[call.key].append(call.offset)
    assert all(offsets == sorted(set(offsets)) for offsets in by_key.values())


def test_a_process_that_is_killed_is_started_again_and_everything_is_handled(
    tmp_path: Path, broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    bench = Bench(tmp_path, broker.bootstrap_servers, new_topic(PARTITIONS), session_ms=6000)
    with bench.run() as process:
        bench.send_until_both_work()
        (victim,) = bench.pids("1")
        bench.send(10)

        os.kill(victim, signal.SIGKILL)
        bench.send(10)
        bench.wait_for_all()
        wait_until(lambda: len(bench.pids("1")) == 2)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)

    assert code == 0, bench.log()
    assert "process 1 was ended by SIGKILL; it is started again in 0.5 s (restart 1 of 10)" in bench.log()
    assert len(bench.pids("2")) == 1


def test_no_process_is_left_when_the_supervising_one_is_killed(
    tmp_path: Path, broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    bench = Bench(tmp_path, broker.bootstrap_servers, new_topic(PARTITIONS))
    with bench.run() as process:
        bench.send_until_both_work()
        pids = bench.pids()
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)

        process.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids), timeout=60)

    # What they had handled is committed.
    found = committed(bench.servers, bench.group, bench.topic, PARTITIONS)
    assert {one.offset for one in found.values()} == {len(bench.sent) // PARTITIONS}


def test_a_signal_drains_every_process(tmp_path: Path, broker: DevBroker, new_topic: Callable[..., str]) -> None:
    bench = Bench(tmp_path, broker.bootstrap_servers, new_topic(PARTITIONS))
    with bench.run() as process:
        bench.send_until_both_work()
        before = len(bench.calls("ended"))
        bench.send(4, b"slow")  # eight seconds of work for all workers
        wait_until(lambda: {call.process for call in bench.calls("begun")[before:]} == {"1", "2"})

        process.send_signal(signal.SIGTERM)
        # In this order: what ends in between does not look as if it had never begun.
        ended = len(bench.calls("ended"))
        in_hand = len(bench.calls("begun")) - ended
        code = process.wait(90)

    assert code == 0, bench.log()
    assert in_hand > 0, "the signal found nothing to drain"
    ended = bench.calls("ended")
    assert sorted(bench.calls("begun")) == sorted(ended)
    found = committed(bench.servers, bench.group, bench.topic, PARTITIONS)
    handled = {number: sum(call.partition == number for call in ended) for number in range(PARTITIONS)}
    assert {number: found[number].offset for number in found} == handled


@pytest.mark.parametrize(
    ("module", "says"),
    [("1 / 0\n", "ZeroDivisionError"), ("app = 1\n", "not a penstock.App"), (None, "no module shop")],
)
def test_a_module_that_cannot_be_run_ends_the_run_with_code_2(tmp_path: Path, module: str | None, says: str) -> None:
    if module is not None:
        (tmp_path / "shop.py").write_text(module)

    done = subprocess.run(
        [sys.executable, "-m", "penstock", "run", "shop:app", "--processes", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "is started again" not in done.stderr


@pytest.mark.chaos
def test_without_a_broker_a_run_of_processes_ends_with_code_3(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP.format(group="g", servers="127.0.0.1:1", topic="orders", session_ms=45_000))

    done = subprocess.run(
        [sys.executable, "-m", "penstock", "run", "shop:app", "--processes", "1", "--max-restarts", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )

    assert done.returncode == 3, done.stderr
    assert "[1] penstock: no Kafka broker answered at 127.0.0.1:1" in done.stderr
