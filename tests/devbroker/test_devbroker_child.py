from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.devbroker import child as child_module
from penstock.devbroker.child import SupervisedChild
from penstock.errors import DevBrokerError
from waiting import wait_until

#: A process of many threads, all of them at work.
BUSY = """
import threading
for _ in range(8):
    threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(int, 1)], daemon=True).start()
threading.Event().wait()
"""


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def states(pid: int) -> list[str]:
    """Return the state of each thread of a process; T is stopped."""
    stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


def test_a_child_can_be_run_again_after_it_ended(tmp_path: Path) -> None:
    child = SupervisedChild(["sh", "-c", "echo hello; exit 3"], log_path=tmp_path / "log")

    child.run()
    first = child.wait(20)
    child.run()
    second = child.wait(20)
    child.close()

    assert (first, second) == (3, 3)
    assert (tmp_path / "log").read_text() == "hello\nhello\n"


def test_a_signal_reaches_the_child(tmp_path: Path) -> None:
    child = SupervisedChild(["sleep", "600"], log_path=tmp_path / "log")
    child.run()

    early = child.wait(0)
    child.signal(signal.SIGTERM)
    code = child.wait(20)
    child.close()

    assert early is None
    assert code == -signal.SIGTERM


def test_a_suspended_child_stands_still_with_all_its_threads_before_the_call_returns(tmp_path: Path) -> None:
    child = SupervisedChild([sys.executable, "-c", BUSY], log_path=tmp_path / "log")
    pid = child.run()
    wait_until(lambda: len(states(pid)) > 8)

    seen = []
    for _ in range(10):
        told = [child.suspend(), child.suspend()]
        stopped = states(pid)
        told += [child.resume(), child.resume()]
        seen.append((told, stopped, states(pid)))
    child.close()

    for told, stopped, resumed in seen:
        assert told == [True] * 4
        assert set(stopped) == {"T"}
        assert "T" not in resumed


def test_a_child_that_has_ended_cannot_be_suspended_and_a_suspended_one_can_be_killed(tmp_path: Path) -> None:
    child = SupervisedChild(["sleep", "600"], log_path=tmp_path / "log")
    child.run()

    suspended = child.suspend()
    child.signal(signal.SIGKILL)
    code = child.wait(20)
    suspended_again, resumed = child.suspend(), child.resume()
    child.run()
    suspended_anew = child.suspend()
    child.close()

    assert suspended
    assert code == -signal.SIGKILL
    assert (suspended_again, resumed) == (False, True)
    assert suspended_anew


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
            parent.wait(20)

            wait_until(lambda: gone(pid))
            fork_lives = not gone(fork)
        finally:
            os.kill(fork, signal.SIGKILL)

    assert fork_lives


def test_a_process_that_cannot_be_killed_holds_no_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child = SupervisedChild(["sleep", "600"], log_path=tmp_path / "log")
    supervisor = child._supervisor
    supervisor.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(child_module, "_SUPERVISOR_TIMEOUT_S", 0.1)

    with monkeypatch.context() as unkillable:
        unkillable.setattr(supervisor, "kill", lambda: None)
        child.close()

    assert f"process {supervisor.pid} does not end though it was killed" in caplog.text
    supervisor.kill()
    supervisor.wait(60)
