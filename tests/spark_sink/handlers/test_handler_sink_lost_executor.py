"""An executor that is killed with what it had written for others, on a real cluster of processes (I1)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.chaos
@pytest.mark.timeout(450)
@pytest.mark.parametrize("attempts", [4, 1])
def test_a_lost_executor_makes_two_handlers_of_a_key_run_at_once_unless_stages_have_one_attempt(
    tmp_path: Path, attempts: int
) -> None:
    """With Spark's default the fault is there; with the setting that the sink insists on it is not."""
    child = Path(__file__).with_name("lost_executor_child.py")

    done = subprocess.run(
        [sys.executable, str(child), str(tmp_path), str(attempts)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    failures = json.loads(done.stdout.splitlines()[-1])
    # Keys that were handled a second time, and whether the one before was still at it.
    beside = dict(json.loads(line) for line in (tmp_path / "second").read_text().splitlines())
    assert beside
    assert any(beside.values()) is (attempts > 1)
    assert any("FetchFailed" in one or "fetch" in one.lower() for one in failures) is (attempts == 1)
