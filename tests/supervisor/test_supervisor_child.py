from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.supervisor import child as child_module
from penstock.supervisor.child import Child
from support.processes import alive
from waiting import wait_until

#: A process of many threads, all of them at work.
BUSY = """
import threading
for _ in range(8):
    threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(int, 1)], daemon=True).start()
threading.Event().wait()
"""


def states(pid: int) -> list[str]:
    """Return the state of each thread of a process; T is stopped."""
    stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


def started(*command: str, grace_s: int = 0) -> Child:
    return Child(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, grace_s=grace_s)


@pytest.mark.parametrize(("end", "code"), [("exit 3", 3), ("kill -TERM $$", -15), ("kill -KILL $$", -9)])
def test_a_child_ends_with_the_code_or_the_signal_of_its_command(tmp_path: Path, end: str, code: int) -> None:
    with (tmp_path / "log").open("wb") as log:
        child = Child(["sh", "-c", f"echo hello; {end}"], stdout=log, stderr=log)

    found = child.wait(60)
    child.close()

    assert found == code
    assert (tmp_path / "log").read_text() == "hello\n"


def test_a_suspended_child_stands_still_with_all_its_threads_before_the_call_returns_and_can_be_killed() -> None:
    child = started(sys.executable, "-c", BUSY)
    pid = child.pid
    assert pid is not None
    wait_until(lambda: len(states(pid)) > 8)

    seen = []
    for _ in range(10):
        answers = [child.suspend(), child.suspend()]
        stopped = states(pid)
        answers += [child.resume(), child.resume()]
        seen.append((answers, stopped, states(pid)))
    runs, suspended = child.wait(0), child.suspend()
    child.signal(signal.SIGKILL)
    code = child.wait(60)
    after = child.suspend(), child.resume()
    child.close()

    for answers, stopped, resumed in seen:
        assert answers == [True] * 4
        assert set(stopped) == {"T"}
        assert "T" not in resumed
    assert (runs, suspended, code) == (None, True, -signal.SIGKILL)
    assert after == (False, True)


def waiting_child(folder: Path, at_sigterm: str, grace_s: int) -> tuple[Child, int]:
    """Start a child that does this at SIGTERM; return it, with its process id, once it hears."""
    program = f"trap '{at_sigterm}' TERM; touch {folder}/ready; while :; do sleep 0.01; done"
    child = started("sh", "-c", program, grace_s=grace_s)
    wait_until((folder / "ready").exists)
    assert child.pid is not None
    return child, child.pid


def test_closing_ends_a_child_in_order_where_it_has_a_grace_even_while_it_stands_still(tmp_path: Path) -> None:
    child, _ = waiting_child(tmp_path, f"touch {tmp_path}/ended; exit 0", grace_s=60)
    child.suspend()

    child.close()

    assert child.wait(0) == 0
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize(("grace_s", "guard_dies"), [(0, False), (1, False), (0, True), (60, True)])
def test_a_child_that_does_not_end_is_killed_when_it_is_closed_and_at_once_when_its_guard_is_killed(
    tmp_path: Path, *, grace_s: int, guard_dies: bool
) -> None:
    child, pid = waiting_child(tmp_path, "", grace_s)

    if guard_dies:
        child._guard.kill()
        wait_until(lambda: not alive(pid))
    child.close()

    assert not alive(pid)


def test_a_command_hears_of_its_children_though_this_process_ignores_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    former = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with log.open("wb") as file:
            child = Child(["grep", "SigIgn", "/proc/self/status"], stdout=file, stderr=file)
    finally:
        signal.signal(signal.SIGCHLD, former)

    child.wait(60)
    child.close()

    ignored = int(log.read_text().split()[1], 16)
    assert not ignored & 1 << signal.SIGCHLD - 1


def test_a_killed_parent_takes_the_child_along_even_where_its_fork_holds_the_pipe(tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    program = (
        "import os, time\nfrom pathlib import Path\nfrom penstock.supervisor.child import Child\n"
        f"folder = Path({str(folder)!r})\n"
        "child = Child(['sleep', '600'], stdout=None, stderr=None, remove=folder)\n"
        "pid = child.pid\nfork = os.fork()\n"
        "if fork: print(pid, fork, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, fork = (int(word) for word in parent.stdout.readline().split())
        try:
            os.kill(parent.pid, signal.SIGKILL)
            parent.wait(60)

            wait_until(lambda: not alive(pid))
            wait_until(lambda: not folder.exists())
            fork_lives = alive(fork)
        finally:
            os.kill(fork, signal.SIGKILL)

    assert fork_lives


def test_a_process_that_cannot_be_killed_holds_no_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child = started("sleep", "600")
    guard = child._guard
    assert child.pid
    guard.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(child_module, "_GUARD_TIMEOUT_S", 0.1)

    with monkeypatch.context() as unkillable:
        unkillable.setattr(guard, "kill", lambda: None)
        child.close()

    assert f"process {guard.pid} does not end though it was killed" in caplog.text
    guard.kill()
    guard.wait(60)
