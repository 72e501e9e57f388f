"""Child processes: heard while they run, missed when they die, never left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.demo.children import Child, DemoError
from waiting import wait_until

BODY = "from penstock.demo.children import Reporter\nreporter = Reporter()\nreporter.watch_parent()\n"
WAITING = BODY + "reporter.report('ready', number=7)\nreporter.ending.wait()\n"


@pytest.fixture
def child_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Child]:
    def make(program: str) -> Child:
        (tmp_path / "child_program.py").write_text(program)
        return Child("the child", ["child_program"], tmp_path / "log", {"PYTHONPATH": str(tmp_path)})

    return make


def test_a_child_that_fails_is_named_with_its_last_lines(child_of: Callable[[str], Child]) -> None:
    with child_of("raise SystemExit('no fuel')") as child:
        wait_until(lambda: child.exit_code() is not None)

        with pytest.raises(DemoError, match=r"the child ended with code 1 before its work was done(.|\n)*no fuel"):
            child.require_running()


def test_a_child_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "child_program.py").write_text(WAITING)
    parent_program = (
        "import sys, time\nfrom pathlib import Path\nfrom penstock.demo.children import Child\n"
        f"child = Child('c', ['child_program'], Path({str(tmp_path / 'log')!r}))\nchild.start()\n"
        "while not child.report('ready'): time.sleep(0.01)\n"
        "print(child._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
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
