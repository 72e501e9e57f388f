from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.devbroker.child import SupervisedChild
from penstock.errors import DevBrokerError
from waiting import wait_until


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_child_can_be_run_again_after_it_ended(tmp_path: Path) -> None:
    child = SupervisedChild(["sh", "-c", "echo hello; exit 3"], log_path=tmp_path / "log")

    child.run()
    first = child.wait(10)
    child.run()
    second = child.wait(10)
    child.close()

    assert (first, second) == (3, 3)
    assert (tmp_path / "log").read_text() == "hello\nhello\n"


def test_a_signal_reaches_the_child(tmp_path: Path) -> None:
    child = SupervisedChild(["sleep", "600"], log_path=tmp_path / "log")
    child.run()

    early = child.wait(0)
    child.signal(signal.SIGTERM)
    code = child.wait(10)
    child.close()

    assert early is None
    assert code == -signal.SIGTERM


def test_closing_kills_the_child_and_removes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    child = SupervisedChild(["sleep", "600"], log_path=folder / "log", remove=folder)
    pid = child.run()

    child.close()

    assert gone(pid)
    assert not folder.exists()


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    child = SupervisedChild([str(tmp_path / "nothing")], log_path=tmp_path / "log")

    with pytest.raises(DevBrokerError, match="could not be started"):
        child.run()
    child.close()


def test_a_killed_parent_takes_the_child_along_even_where_its_fork_holds_the_pipe(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\nfrom pathlib import Path\nfrom penstock.devbroker.child import SupervisedChild\n"
        f"child = SupervisedChild(['sleep', '600'], log_path=Path({str(tmp_path / 'log')!r}))\n"
        "pid = child.run()\nfork = os.fork()\n"
        "if fork: print(pid, fork, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, fork = (int(word) for word in parent.stdout.readline().split())
        try:
            os.kill(parent.pid, signal.SIGKILL)
            parent.wait(10)

            wait_until(lambda: gone(pid))
            fork_lives = not gone(fork)
        finally:
            os.kill(fork, signal.SIGKILL)

    assert fork_lives
