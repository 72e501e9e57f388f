"""`penstock run --processes` with an app on a real broker; what becomes of processes is in test_cli_members."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kafka_tools import committed, produce
from penstock.devbroker import DevBroker
from penstock.group_offsets.group import Group
from support.processes import alive
from waiting import wait_until

PARTITIONS, KEYS = 4, 40

APP = """
import os
import penstock.app

app = penstock.app.App("{topic}", bootstrap_servers="{servers}", workers=4, commit_interval=0.2,
                       config={{"session.timeout.ms": 300_000}})
out = os.open("handled", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
who = f'{{os.environ["PENSTOCK_PROCESS"]}} {{os.getpid()}}'

@app.handler("{topic}")
def handle(message):  # one write of a short line is atomic
    os.write(out, f"{{who}} {{message.key.decode()}} {{message.partition}} {{message.offset}}\\n".encode())
"""


class Call(NamedTuple):
    process: str
    pid: int
    key: str
    partition: int
    offset: int


def calls() -> list[Call]:
    """Return the calls of the handler, in their order."""
    lines = Path("handled").read_text().splitlines(keepends=True) if Path("handled").exists() else []
    found = [line.split() for line in lines if line.endswith("\n")]
    return [Call(process, int(pid), key, int(number), int(offset)) for process, pid, key, number, offset in found]


@pytest.mark.thorough
def test_two_processes_share_the_work_and_one_that_is_killed_has_its_partitions_again_within_its_session(
    tmp_path: Path, broker: DevBroker, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    topic, sent = new_topic(PARTITIONS), 0
    Path("shop.py").write_text(APP.format(servers=broker.bootstrap_servers, topic=topic))

    def send(rounds: int) -> None:
        """Write so many messages of each key."""
        nonlocal sent
        for number in range(PARTITIONS):
            keys = range(number, KEYS, PARTITIONS)
            records = [(b"key%d" % key, b"v") for _ in range(rounds) for key in keys]
            produce(broker.bootstrap_servers, topic, records, partition=number)
        sent += rounds * KEYS

    def all_are_handled() -> bool:
        return len({(call.partition, call.offset) for call in calls()}) == sent

    def both_work() -> bool:
        send(1)
        return len({call.process for call in calls()}) == 2

    with Path("log").open("wb") as log:
        command = [sys.executable, "-m", "penstock", "run", "shop:app", "--processes", "2"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        # Their joining, and what it hands over, is past then.
        wait_until(both_work, interval=0.3)
        wait_until(all_are_handled)
        send(10)
        wait_until(all_are_handled)
        once = calls()
        victim = next(call.pid for call in once if call.process == "1")
        send(10)
        os.kill(victim, signal.SIGKILL)
        send(10)
        wait_until(all_are_handled)
        wait_until(lambda: send(1) or len({call.pid for call in calls() if call.process == "1"}) == 2, interval=0.3)
        wait_until(all_are_handled)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    finally:
        process.kill()
        process.wait()
        for pid in {call.pid for call in calls() if alive(call.pid)}:
            os.kill(pid, signal.SIGKILL)

    said = Path("log").read_text()
    assert code == 0, said
    assert {call.process for call in once[-10 * KEYS :]} == {"1", "2"}
    by_key: dict[str, list[int]] = defaultdict(list)
    for call in once:
        by_key[call.key].append(call.offset)
    assert all(offsets == sorted(set(offsets)) for offsets in by_key.values())
    assert "process 1 was ended by SIGKILL; it is started again in 0.5 s (restart 1 of 10)" in said
    assert len({call.pid for call in calls() if call.process == "2"}) == 1
    # Nobody waits for the sessions of those that were stopped: they have left.
    assert Group(broker.bootstrap_servers, {}, topic).state().members == ()
    # What was handled is committed at the end.
    found = committed(broker.bootstrap_servers, topic, topic, PARTITIONS)
    assert {one.offset for one in found.values()} == {sent // PARTITIONS}
