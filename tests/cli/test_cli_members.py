"""A run of processes: what they print, when one is started again, what signals do, and with which code it ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.supervisor.processes import Processes, RestartPolicy
from support.processes import alive
from waiting import wait_until

#: Seconds before another signal: sooner, it is the same request.
LATER_S = 0.1

CHILD = Path(__file__).with_name("members_child.py")

#: Writes down that it began, as "NUMBER PID"; the current folder is the test's own.
BEGUN = """
import os, pathlib, signal, sys, time
number = os.environ["PENSTOCK_PROCESS"]
begun = pathlib.Path("begun")
with begun.open("a") as file:
    file.write(f"{number} {os.getpid()}\\n")
"""

#: Writes down each signal with its name, and ends at the second; begins only when it hears them.
TWO_SIGNALS = """
import os, pathlib, signal, sys, time
number = os.environ["PENSTOCK_PROCESS"]
heard = 0
def hear(signal_, _):
    global heard
    heard += 1
    pathlib.Path(f"{signal.Signals(signal_).name}-{number}").touch()
    pathlib.Path(f"heard-{number}-{heard}").touch()
    if heard == 2:
        sys.exit(0)
signal.signal(signal.SIGTERM, hear)
signal.signal(signal.SIGINT, hear)
with pathlib.Path("begun").open("a") as file:
    file.write(f"{number} {os.getpid()}\\n")
while True:  # until it is told to end
    time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def members(program: str, count: int = 1, max_restarts: int = 2, reset_after_s: float = 60.0) -> Processes:
    policy = RestartPolicy(max_restarts, reset_after_s, 0.01, 0.01)
    return Processes([sys.executable, "-c", program], count, policy)


def begun() -> list[tuple[str, int]]:
    """Return number and process id of each process that began."""
    path = Path("begun")
    lines = path.read_text().splitlines() if path.exists() else []
    return [(number, int(pid)) for number, pid in (line.split() for line in lines)]


@contextmanager
def run_of(program: str, count: int = 2) -> Iterator[subprocess.Popen[bytes]]:
    """Run members below a process of their own; none is left behind."""
    process = subprocess.Popen(
        [sys.executable, CHILD, str(count), program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        for _, pid in begun():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_the_waits_between_restarts_double_from_half_a_second_to_thirty() -> None:
    policy = RestartPolicy(max_restarts=8)

    assert [policy.delay_before(restart) for restart in range(1, 10)] == [0.5, 1, 2, 4, 8, 16, 30, 30, None]


def test_every_line_of_a_member_has_its_number_before_it_and_all_of_it_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    # The pause is what is tested: half a line waits for its end.
    program = BEGUN + (
        "print('two\\nthree'); print(); os.write(2, b'wrong\\n')\n"
        "os.write(1, b'begun, '); time.sleep(0.2); os.write(1, b'ended\\n')\n"
        "for number in range(20_000): print('line', number)\n"
        "print('x' * 1_000_000, end='', flush=True); os.write(1, b'\\xff no end of line')\n"
    )

    code = members(program).run()

    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert code == 0
    assert lines[:4] == ["[1] two", "[1] three", "[1] ", "[1] begun, ended"]
    assert lines[4:20_004] == [f"[1] line {number}" for number in range(20_000)]
    assert "".join(line.removeprefix("[1] ") for line in lines[20_004:]) == "x" * 1_000_000 + "\ufffd no end of line"
    assert err.splitlines() == ["[1] wrong"]


def test_a_process_that_a_member_left_behind_does_not_hold_up_the_run() -> None:
    program = BEGUN + "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, file=open('left', 'w'))"

    try:
        assert members(program).run() == 0
        assert alive(int(Path("left").read_text()))
    finally:
        os.kill(int(Path("left").read_text()), signal.SIGKILL)


def test_output_that_nobody_reads_any_more_does_not_end_the_work() -> None:
    program = (
        "import pathlib, time\nprint('first')\nwhile not pathlib.Path('closed').exists(): time.sleep(0.01)\n"
        "for number in range(1000): print(number)\npathlib.Path('worked').touch()"
    )
    with run_of(program, count=1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"[1] first\n"
        process.stdout.close()
        Path("closed").touch()

        code = process.wait(60)

    assert code == 0
    assert Path("worked").exists()


@pytest.mark.parametrize(
    ("end", "policy", "code", "starts"),
    [
        ("", (2,), 0, 1),
        ("if starts < 3: sys.exit(1)", (2,), 0, 3),
        ("if starts < 3: os.kill(os.getpid(), signal.SIGKILL)", (2,), 0, 3),
        ("if starts < 6: sys.exit(1)", (1, 0.0), 0, 6),  # it had been up long enough each time
        ("sys.exit(2)", (2,), 2, 1),  # wrong use: another start would be the same
        ("if starts < 4: sys.exit(4)", (0,), 0, 4),  # it asks for a new start
        ("sys.exit(3)", (1,), 3, 2),  # no broker
        ("sys.exit(1 if starts == 1 else 3)", (3,), 1, 4),  # it was there once
    ],
)
def test_a_run_ends_with_the_code_of_its_members_after_as_many_starts_as_make_sense(
    end: str, policy: tuple[Any, ...], code: int, starts: int
) -> None:
    program = f"{BEGUN}starts = len(begun.read_text().splitlines())\n{end}"

    assert members(program, 1, *policy).run() == code
    assert [number for number, _ in begun()] == ["1"] * starts


def test_the_code_of_a_member_is_known_where_the_run_was_started_with_its_signal_ignored() -> None:
    former = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        code = members("import sys; sys.exit(2)").run()

        assert (code, signal.getsignal(signal.SIGCHLD)) == (2, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGCHLD, former)


def test_a_member_that_dies_too_often_ends_the_run_with_code_1_and_the_others_in_order() -> None:
    # The first dies only when the second can hear, so that "in order" can be seen.
    program = BEGUN + (
        "if number == '1':\n"
        "    while not pathlib.Path('ready').exists(): time.sleep(0.01)\n"
        "    sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('in order').touch(), sys.exit(0)))\n"
        "pathlib.Path('ready').touch()\n"
        "while True: time.sleep(0.05)"
    )

    code = members(program, count=2, max_restarts=2).run()

    assert code == 1
    assert [number for number, _ in begun()].count("1") == 3
    assert Path("in order").exists()


def test_a_program_that_is_not_there_is_tried_again_and_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    policy = RestartPolicy(1, 60.0, 0.01, 0.01)

    code = Processes(["/no/such/program"], 1, policy).run()

    assert code == 1
    assert capfd.readouterr().err.count("[1] /no/such/program could not be started") == 2


def test_a_process_that_cannot_be_made_is_tried_again_and_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")

    with caplog.at_level(logging.WARNING):
        code = Processes(["true"], 1, RestartPolicy(1, 60.0, 0.01, 0.01)).run()

    assert code == 1
    assert sum("could not be started" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_deaf", [False, True])
def test_two_signals_reach_every_member_and_a_third_kills_those_that_answer_none(
    number: signal.Signals, is_deaf: bool
) -> None:
    with run_of(TWO_SIGNALS.replace("if heard == 2:", "if False:") if is_deaf else TWO_SIGNALS) as process:
        wait_until(lambda: len(begun()) == 2)
        for count in (1, 2):
            assert all(alive(pid) for _, pid in begun())
            process.send_signal(number)
            wait_until(lambda count=count: Path(f"heard-1-{count}").exists() and Path(f"heard-2-{count}").exists())
            time.sleep(LATER_S)
        if is_deaf:
            assert process.poll() is None
            process.send_signal(number)

        code = process.wait(60)

    assert code == int(is_deaf)
    assert not any(alive(pid) for _, pid in begun())
    # Two kinds: a member to which systemd sends the first as well does not take that for a second.
    assert all(Path(f"{name}-{member}").exists() for name in ("SIGTERM", "SIGINT") for member in (1, 2))


def test_a_signal_ends_a_run_whose_members_wait_for_their_next_start() -> None:
    with run_of(BEGUN + "sys.exit(1)", count=1) as process:
        wait_until(lambda: len(begun()) >= 2)
        process.send_signal(signal.SIGTERM)

        assert process.wait(60) in {0, 1}  # 1 where it met a member that was about to die by itself
        count = len(begun())

    assert len(begun()) == count


def test_members_end_in_order_when_the_process_that_started_them_is_killed() -> None:
    program = BEGUN + (
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(f'in order {number}').touch(), os._exit(0)))\n"
        "pathlib.Path(f'ready {number}').touch()\n"
        "while True: time.sleep(0.05)"
    )
    with run_of(program) as process:
        wait_until(lambda: Path("ready 1").exists() and Path("ready 2").exists())
        pids = [pid for _, pid in begun()]
        assert all(alive(pid) for pid in pids)

        process.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids))

    assert Path("in order 1").exists()
    assert Path("in order 2").exists()


def test_members_end_at_the_same_time_after_a_failure_of_the_run_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    program = BEGUN + (
        "def end(*_):\n"
        "    pathlib.Path(f'ending {number}').touch()\n"
        "    while len(list(pathlib.Path().glob('ending *'))) < 2: time.sleep(0.01)\n"
        "    pathlib.Path(f'in order {number}').touch()\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "pathlib.Path(f'ready {number}').touch()\n"
        "while True: time.sleep(0.05)"
    )
    run = members(program, count=2)
    tend = run._tend

    def fail_when_they_run(*arguments: Any) -> None:
        tend(*arguments)
        if len(list(Path().glob("ready *"))) == 2:
            raise MemoryError

    monkeypatch.setattr(run, "_tend", fail_when_they_run)
    with pytest.raises(MemoryError):
        run.run()

    assert len(list(Path().glob("in order *"))) == 2
