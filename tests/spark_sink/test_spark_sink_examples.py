"""The example of a cluster of two workers runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

TOTALS = ["total N14228 3 13", "total N24211 1 20", "total N619AA 1 33"]


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_two_workers_read_with_the_package_that_was_shipped_to_them(tmp_path: Path) -> None:
    """A broker, a master, two workers, two executors and a driver: half a minute on a quiet machine."""
    # Temporary files of the example are below the test's folder, and it starts from a place without the sources.
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / "spark_cluster.py")],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as example:
        try:
            printed, complaints = example.communicate(timeout=500)
        finally:
            example.send_signal(signal.SIGINT)  # where it is not at its end, it ends the cluster that it started

    assert example.returncode == 0, complaints[-3_000:]
    read = re.findall(r"^read (\d+) rows in executor (\S+) with (\S+)$", printed, re.MULTILINE)
    assert sum(int(rows) for rows, _, _ in read) == 5
    # Both workers took part, and what they imported came with the job.
    assert {re.sub(r".*/(worker-[12])/.*", r"\1", place) for _, place, _ in read} == {"worker-1", "worker-2"}
    assert all("penstock.zip" in package for _, _, package in read)
    assert [line for line in printed.splitlines() if line.startswith("total")] == TOTALS
