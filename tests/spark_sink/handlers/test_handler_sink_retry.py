"""A task whose process dies in the middle, on real Spark: it begins again, and the order of keys holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from handler_log import judge, read_log


@pytest.mark.chaos
@pytest.mark.timeout(330)
def test_a_task_whose_process_dies_begins_again_and_keeps_the_order_of_its_keys(tmp_path: Path) -> None:
    """Its handlers stand in `__main__`, and their resource too."""
    child = Path(__file__).with_name("retry_child.py")

    done = subprocess.run(
        [sys.executable, str(child), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    log, expected = read_log(tmp_path), answer["expected"]
    # The fault: a process died, its task was tried again, and handled again what it had handled.
    assert sorted(task["attempt"] for task in answer["tasks"]) == [0, 0, 1]
    assert (
        len(log)
        > sum(len(offsets) for offsets in expected.values())
        == sum(task["handled"] for task in answer["tasks"])
    )
    judge(log, expected, restarts=1)
    # The resource of each task that ended was closed, and so its lines are whole.
    assert int((tmp_path / "died").read_text()) in {one.pid for one in log}
    assert list(tmp_path.glob("*.closed"))
