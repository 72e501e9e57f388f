"""Counters in PostgreSQL by the inbox, while members kill themselves at every step, fail, freeze, join and leave."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from chaos.counting import STEPS, Counting
from databases import new_database
from penstock.devbroker import DevBroker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

MESSAGES = int(os.environ.get("PENSTOCK_INBOX_MESSAGES", "20000"))
SECONDS = float(os.environ.get("PENSTOCK_INBOX_SECONDS", "90"))
KEYS = 500
PARTITIONS = 6
#: How often a member passes a step until it is killed there.
PASSES = 300


def test_each_message_counts_once_whatever_dies(postgresql_url: str, tmp_path: Path) -> None:
    with DevBroker() as broker:
        for topic in ("singles", "batched"):
            broker.create_topic(topic, PARTITIONS)
        group = Counting(broker, new_database(postgresql_url), ("singles", "batched"), PARTITIONS, tmp_path)
        try:
            harm(group)
            met = group.met()
            print(f"{2 * MESSAGES} messages: {met}; {len(group.processes)} members")  # noqa: T201 - the figures of the run

            assert group.faults() == []
            assert all(met[f"killed {step}"] for step in STEPS)
            assert met["known"] > 0
        finally:
            group.close()


def harm(group: Counting) -> None:
    """Feed, and start others for members that died, while one is frozen now and then; then wait until all is done."""
    # Two are replaced at once by their names; for the third the group waits until its session is over.
    slots: list[str | None] = ["first", "second", None]
    seeds = itertools.count()

    def start(instance: str | None) -> subprocess.Popen[bytes]:
        seed = next(seeds)
        return group.start(instance, seed=seed, failures=0.002, dies_at={STEPS[seed % 4]: PASSES})

    members = [start(instance) for instance in slots]
    begun = time.monotonic()
    for turn in range(int(SECONDS)):
        group.feed(max(1, int(MESSAGES / SECONDS)), KEYS)
        # The rhythm of the faults is what is tested.
        time.sleep(max(0.0, begun + turn + 1 - time.monotonic()))
        for slot, member in enumerate(members):
            if member.poll() is not None:
                members[slot] = start(slots[slot])
        # Longer than its session: another handles what it is at, and it does not know.
        if turn % 20 == 5:
            members[2].send_signal(signal.SIGSTOP)
        if turn % 20 == 15:
            members[2].send_signal(signal.SIGCONT)
    members[2].send_signal(signal.SIGCONT)
    for _ in range(2):
        group.start()
    group.wait_done(240)
    for member in members:
        member.kill()
        member.wait()
    group.stop()
