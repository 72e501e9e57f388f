"""`penstock run --processes` with an app on a real broker; tests/supervisor has the ends of processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kafka_tools import committed, produce
from penstock.devbroker import DevBroker
from penstock.group_offsets.group import Group
from stalls import running
from waiting import wait_until

PARTITIONS = 4

APP = """
import os
import penstock.app

app = penstock.app.App("{topic}", bootstrap_servers="{servers}", workers=4, commit_interval=0.2,
                       config={{"session.timeout.ms": 300_000}})
out = os.open("handled", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
who = f'{{os.environ["PENSTOCK_PROCESS"]}} {{os.getpid()}}'

@app.handler("{topic}")
def handle(message):  # one write of a short line is atomic
    os.write(out, f"{{who}} {{message.partition}} {{message.offset}}\\n".encode())
"""


Call = tuple[str, int, tuple[int, int]]


def calls() -> list[Call]:
    """Return the calls of the handler: number and id of the process, partition and offset."""
    lines = Path("handled").read_text().splitlines(keepends=True) if Path("handled").exists() else []
    found = [line.split() for line in lines if line.endswith("\n")]
    return [(process, int(pid), (int(partition), int(offset))) for process, pid, partition, offset in found]


def pids(process: str) -> set[int]:
    return {pid for number, pid, _ in calls() if number == process}


@pytest.mark.thorough
def test_two_processes_share_the_work_and_one_that_is_killed_has_its_partitions_again_within_its_session(
    tmp_path: Path,
    broker: DevBroker,
    new_topic: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    topic, sent = new_topic(PARTITIONS), 0
    Path("shop.py").write_text(APP.format(servers=broker.bootstrap_servers, topic=topic))

    def send_until(condition: Callable[[], bool]) -> None:
        """Write to each partition until that is so, and wait until all was handled."""

        def send() -> bool:
            nonlocal sent
            for number in range(PARTITIONS):
                produce(broker.bootstrap_servers, topic, [(b"k", b"v")], partition=number)
            sent += 1
            return condition()

        wait_until(send, interval=0.3)
        wait_until(lambda: len({place for _, _, place in calls()}) == sent * PARTITIONS)

    with running(tmp_path, "shop:app", "--processes", "2") as process:
        send_until(lambda: bool(pids("1") and pids("2")))
        os.kill(*pids("1"), signal.SIGKILL)
        send_until(lambda: len(pids("1")) == 2)

    said = capfd.readouterr().err
    assert process.returncode == 0, said
    assert "process 1 was ended by SIGKILL; it is started again in 0.5 s (restart 1 of 10)" in said
    assert len(pids("2")) == 1
    # The sessions of stopped members need no waiting: they have left.
    assert Group(broker.bootstrap_servers, {}, topic).state().members == ()
    # What was handled is committed at the end.
    found = committed(broker.bootstrap_servers, topic, topic, PARTITIONS)
    assert {position.offset for position in found.values()} == {sent}
