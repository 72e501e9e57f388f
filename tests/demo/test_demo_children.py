"""Child processes: heard while they run, missed when they die, never left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from demo.children import DemoError, Part

from waiting import wait_until

WAITING = "from demo.children import Reporter\nr = Reporter()\nr.report('ready', number=7)\nr.ending.wait(300)\n"
PATHS = os.pathsep.join([str(Path(__file__).parents[2] / "examples"), os.environ.get("PYTHONPATH", "")])


def test_a_child_reports_and_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    child = Part("the child", ["-c", WAITING], tmp_path / "log", {"PYTHONPATH": PATHS})
    with child:
        wait_until(lambda: child.report("ready").get("number") == 7)

    assert child.process.wait(0) == 0


def test_a_child_that_fails_is_named_with_its_last_lines(tmp_path: Path) -> None:
    with Part("the child", ["-c", "raise SystemExit('no fuel')"], tmp_path / "log") as child:
        wait_until(lambda: child.process.wait(0) is not None)

        with pytest.raises(DemoError, match=r"the child ended with code 1 before its work was done(.|\n)*no fuel"):
            child.require_running()


def test_a_child_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    parent_program = (
        "import time\nfrom pathlib import Path\nfrom demo.children import Part\n"
        f"child = Part('c', ['-c', {WAITING!r}], Path({str(tmp_path / 'log')!r}))\n"
        "while not child.report('ready'): time.sleep(0.01)\n"
        "print(child.process.pid, flush=True)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": PATHS}
    with subprocess.Popen(
        [sys.executable, "-c", parent_program], stdout=subprocess.PIPE, env=environment, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())

        parent.kill()
        parent.wait()

    wait_until(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
