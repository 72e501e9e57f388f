"""What handlers return, where a part of Spark is killed while results are committed: each result once (I9)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kafka_tools import read_all
from penstock.devbroker import DevBroker
from waiting import wait_until

pytestmark = pytest.mark.chaos  # a JVM of its own for each

CHILD = Path(__file__).with_name("publishing_child.py")
#: Messages of 16 keys in each source partition, and results of each message.
PARTITIONS, MESSAGES, RESULTS = 4, 100, 3


@dataclass
class Query:
    """A query of a child."""

    broker: DevBroker
    source: str
    target: str
    folder: Path

    def run(self, run: str, kill: str) -> subprocess.CompletedProcess[str]:
        """Run it until it has read all, or is killed."""
        plan = {"servers": self.broker.bootstrap_servers, "source": self.source, "target": self.target,
                "folder": str(self.folder), "run": run, "kill": kill}  # fmt: skip
        arguments = [sys.executable, str(CHILD), json.dumps(plan)]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=800, check=False)

    def calls(self, run: str) -> int:
        """Return how often handlers were called in a run."""
        return len((self.folder / f"calls-{run}").read_text().splitlines())

    def visible(self) -> dict[tuple[int, int], list[dict[str, Any]]]:
        """Return what readers of committed messages see of each message; by its partition, in its order."""
        found = defaultdict(list)
        for message in read_all(self.broker.bootstrap_servers, self.target):
            body = json.loads(message.value() or b"")
            found[body["partition"], body["offset"]].append(body)
        for partition in range(PARTITIONS):
            offsets = [offset for source, offset in found if source == partition]
            assert offsets == sorted(offsets)
        return found

    def judge(self) -> set[str]:
        """Assert that each message's results are there, whole, once and of one call; return the runs they are of."""
        found = self.visible()
        assert found.keys() == {(partition, offset) for partition in range(PARTITIONS) for offset in range(MESSAGES)}
        for results in found.values():
            assert [result["place"] for result in results] == list(range(RESULTS))
            assert len({result["call"] for result in results}) == 1
        return {result["run"] for results in found.values() for result in results}


@pytest.fixture
def query(broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None], tmp_path: Path) -> Query:
    """A query over a topic that is full."""
    source = new_topic(partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        write(source, partition, [(b"%d-%d" % (partition, n % 16), b"x") for n in range(MESSAGES)])
    return Query(broker, source, new_topic(1), tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kill", ["task", "handler"])
def test_a_task_killed_behind_its_commit_has_the_results_at_hand_and_one_killed_before_begins_again(
    query: Query, kill: str
) -> None:
    done = query.run("only", kill)

    assert done.returncode == 0, done.stderr[-3000:]
    assert (query.folder / "killed").exists()
    assert json.loads(done.stdout.splitlines()[-1]) == {"failures": [], "results": PARTITIONS * MESSAGES * RESULTS}
    assert query.judge() == {"only"}
    if kill == "task":
        # A part of it was published before it died.
        assert f"rows for sink {query.target} were applied before and are left out" in done.stderr
        assert query.calls("only") == PARTITIONS * MESSAGES  # no handler was called again
    else:
        assert query.calls("only") > PARTITIONS * MESSAGES  # handlers of that task were called again


@pytest.mark.timeout(900)
def test_a_driver_killed_between_two_transactions_leaves_the_other_results_to_its_successor(query: Query) -> None:
    dying = query.run("first", "driver")

    assert dying.returncode == -signal.SIGKILL, dying.stderr[-3000:]
    for process in (query.folder / "driver").read_text().split():
        wait_until(lambda process=process: not Path(f"/proc/{process}").exists(), 60)
    assert not list((query.folder / "checkpoint" / "commits").glob("[0-9]*"))
    before = query.visible()
    assert len(before) == MESSAGES  # one source partition's, whole
    again = query.run("second", "")

    assert again.returncode == 0, again.stderr[-3000:]
    assert query.judge() == {"first", "second"}
    assert {place: results for place, results in query.visible().items() if place in before} == before
    assert query.calls("first") == query.calls("second") == PARTITIONS * MESSAGES  # handlers were called again


@pytest.mark.timeout(900)
def test_an_executor_killed_with_the_results_it_had_for_others_fails_its_batch_which_comes_again(query: Query) -> None:
    done = query.run("only", "executor")

    assert done.returncode == 0, done.stderr[-3000:]
    assert (query.folder / "killed").exists()
    assert json.loads(done.stdout.splitlines()[-1])["failures"]
    assert query.judge() == {"only"}
    assert query.calls("only") > PARTITIONS * MESSAGES
