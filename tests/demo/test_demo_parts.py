"""The demo's processes: ended in order, missed when they die, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demo.parts import Part, PartError

from waiting import wait_until

# A part that prints its process id, and says goodbye at SIGTERM.
WAITING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("goodbye"))
print(os.getpid(), flush=True)
while True:
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _waiting_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waiting_part.py").write_text(WAITING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))


def test_a_part_gets_sigterm_at_the_end_of_its_block(tmp_path: Path) -> None:
    log = tmp_path / "part.log"

    with Part("part", tmp_path, "waiting_part") as part:
        wait_until(lambda: log.read_text().endswith("\n"))
        assert part.exit_code() is None
        part.require_no_failure()

    assert part.exit_code() == 1
    assert log.read_text().endswith("goodbye\n")


def test_a_part_that_fails_is_named_with_its_last_lines(tmp_path: Path) -> None:
    with Part("the part", tmp_path, "no_such_module") as part:
        wait_until(lambda: part.exit_code() is not None)

        with pytest.raises(PartError, match=r"the part ended with code 1; (.|\n)*No module named no_such_module"):
            part.require_no_failure()


def test_a_part_that_ends_as_it_should_has_not_failed(tmp_path: Path) -> None:
    with Part("part", tmp_path, "waiting_part", ends_with=-signal.SIGKILL) as part:
        os.kill(int(wait_until((tmp_path / "part.log").read_text)), signal.SIGKILL)
        wait_until(lambda: part.exit_code() is not None)

        part.require_no_failure()


def test_a_part_does_not_outlive_a_killed_demo(tmp_path: Path) -> None:
    program = (
        "import time; from pathlib import Path; from demo.parts import Part\n"
        f"part = Part('part', Path({str(tmp_path)!r}), 'waiting_part')\ntime.sleep(300)"
    )
    log = tmp_path / "part.log"
    with subprocess.Popen([sys.executable, "-c", program]) as demo:
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"))

        demo.kill()

    wait_until(lambda: log.read_text().endswith("goodbye\n"))
