"""A run of processes: their output, restarts, signals and exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.options import PROCESS_VARIABLE
from penstock.supervisor.processes import Processes, RestartPolicy
from penstock.supervisor.stopping import StopRequests
from support.processes import alive
from waiting import wait_until

TERM, INT = signal.SIGTERM, signal.SIGINT

#: A run of processes, in a process of its own: `python -c RUN COUNT PROGRAM`.
RUN = """
import sys
from penstock.supervisor.processes import Processes
sys.exit(Processes([sys.executable, "-c", sys.argv[2]], int(sys.argv[1])).run())
"""

#: Writes down that it began, as "NUMBER PID"; the current folder is the test's own.
BEGUN = """
import os, pathlib, signal, sys, time
number = os.environ["PENSTOCK_PROCESS"]
begun = pathlib.Path("begun")
with begun.open("a") as file:
    file.write(f"{number} {os.getpid()}\\n")
"""

#: Ends at SIGTERM, and notes that it ended in order; it is ready when it hears that.
IN_ORDER = """
def end(*_):
    pathlib.Path(f"in order {number}").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path(f"ready {number}").touch()
while True:  # until a signal ends it
    time.sleep(0.05)
"""

#: Writes down each signal with its name, and ends at the second; begins only when it hears them.
TWO_SIGNALS = f"""
import pathlib, signal, sys
heard = 0
def hear(signal_, _):
    global heard
    heard += 1
    pathlib.Path(f"{{signal.Signals(signal_).name}}-{{number}}").touch()
    pathlib.Path(f"heard-{{number}}-{{heard}}").touch()
    if heard == 2:
        sys.exit(0)
signal.signal(signal.SIGTERM, hear)
signal.signal(signal.SIGINT, hear)
{BEGUN}
while True:  # until a signal ends it
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
    command = [sys.executable, "-c", RUN, str(count), program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        for _, pid in begun():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_the_waits_between_restarts_double_from_half_a_second_to_thirty() -> None:
    policy, restarts = RestartPolicy(max_restarts=9_999), (1, 2, 3, 4, 5, 6, 7, 9_999, 10_000)

    assert [policy.delay_before(restart) for restart in restarts] == [0.5, 1, 2, 4, 8, 16, 30, 30, None]


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


def test_a_process_that_a_member_left_behind_does_not_hold_up_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.supervisor.processes._LAST_LINES_S", 0.2)
    program = BEGUN + "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, file=open('left', 'w'))"

    try:
        assert members(program).run() == 0
        assert alive(int(Path("left").read_text()))
    finally:
        os.kill(int(Path("left").read_text()), signal.SIGKILL)


def test_output_without_a_reader_does_not_end_the_work() -> None:
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
        "    while not pathlib.Path('ready 2').exists(): time.sleep(0.01)\n"
        f"    sys.exit(5)\n{IN_ORDER}"
    )

    code = members(program, count=2, max_restarts=2).run()

    assert code == 1
    assert [number for number, _ in begun()].count("1") == 3
    assert Path("in order 2").exists()


def test_what_cannot_be_started_is_tried_again_and_given_up(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = RestartPolicy(1, 60.0, 0.01, 0.01)

    code = Processes(["/no/such/program"], 1, policy).run()
    monkeypatch.setattr("sys.executable", "/no/such/python")  # so that no process can be made
    code_without_process = Processes(["true"], 1, policy).run()

    assert (code, code_without_process) == (1, 1)
    assert capfd.readouterr().err.count("[1] /no/such/program could not be started") == 2
    assert sum("could not be started" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize("is_deaf", [False, True])
def test_two_signals_reach_every_member_and_a_third_kills_those_that_answer_none(*, is_deaf: bool) -> None:
    with run_of(TWO_SIGNALS.replace("if heard == 2:", "if False:") if is_deaf else TWO_SIGNALS) as process:
        wait_until(lambda: len(begun()) == 2)
        # In turns: the same signal soon after would be the same request.
        for count, number in ((1, signal.SIGINT), (2, signal.SIGTERM)):
            assert all(alive(pid) for _, pid in begun())
            process.send_signal(number)
            wait_until(lambda count=count: Path(f"heard-1-{count}").exists() and Path(f"heard-2-{count}").exists())
        if is_deaf:
            assert process.poll() is None
            process.send_signal(signal.SIGINT)

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


def test_members_end_at_the_same_time_after_a_failure_of_the_run_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_for_the_other = (
        "    pathlib.Path(f'ending {number}').touch()\n"
        "    while len(list(pathlib.Path().glob('ending *'))) < 2: time.sleep(0.01)\n"
    )
    run = members(BEGUN + IN_ORDER.replace("def end(*_):\n", f"def end(*_):\n{waits_for_the_other}"), count=2)
    tend = run._tend

    def fail_when_they_run(*arguments: Any) -> None:
        tend(*arguments)
        if len(list(Path().glob("ready *"))) == 2:
            raise MemoryError

    monkeypatch.setattr(run, "_tend", fail_when_they_run)
    with pytest.raises(MemoryError):
        run.run()

    assert len(list(Path().glob("in order *"))) == 2


@pytest.mark.parametrize(
    ("heard", "count", "is_member"),
    [
        ([(TERM, 100.0)], 1, False),
        ([(TERM, 100.0), (TERM, 100.01)], 1, False),  # `timeout` signals its child and then the child's group
        ([(TERM, 100.0), (TERM, 100.1)], 2, False),
        ([(INT, 100.0), (INT, 100.1)], 2, False),
        ([(TERM, 100.0), (INT, 100.0)], 2, False),
        ([(TERM, 100.0), (TERM, 100.1), (TERM, 100.2)], 3, False),
        ([(TERM, 100.0), (TERM, 100.2), (INT, 100.21)], 2, True),  # a busy supervisor may pass one on late
    ],
)
def test_the_same_signal_twice_at_once_is_one_request(
    heard: list[tuple[int, float]], count: int, *, is_member: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_member:
        monkeypatch.setenv(PROCESS_VARIABLE, "1")
    requests = StopRequests()

    added = [requests.add(number, now) for number, now in heard]

    assert requests.count == count
    assert added.count(True) == count
