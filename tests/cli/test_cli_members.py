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

import pytest
import tenacity

from penstock.supervisor.processes import Processes, RestartPolicy
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
    policy = RestartPolicy(max_restarts, reset_after_s, tenacity.wait_fixed(0.01))
    return Processes([sys.executable, "-c", program], count, policy)


def begun() -> list[tuple[str, int]]:
    """Return number and process id of each process that began."""
    path = Path("begun")
    lines = path.read_text().splitlines() if path.exists() else []
    return [(number, int(pid)) for number, pid in (line.split() for line in lines)]


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}


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


def test_members_that_end_by_themselves_end_the_run_with_code_0() -> None:
    code = members(BEGUN, count=3).run()

    assert code == 0
    assert sorted(number for number, _ in begun()) == ["1", "2", "3"]


def test_every_line_of_a_member_has_its_number_before_it(capfd: pytest.CaptureFixture[str]) -> None:
    # The pause is what is tested: half a line waits for its end.
    program = BEGUN + (
        "print('one'); print('two\\nthree'); print(); os.write(2, b'wrong\\n')\n"
        "os.write(1, b'begun, '); time.sleep(0.2); os.write(1, b'ended\\n'); os.write(1, b'\\xff no end of line')\n"
    )

    code = members(program).run()

    out, err = capfd.readouterr()
    assert code == 0
    assert out.splitlines() == [
        "[1] one",
        "[1] two",
        "[1] three",
        "[1] ",
        "[1] begun, ended",
        "[1] \ufffd no end of line",
    ]
    assert err.splitlines() == ["[1] wrong"]


def test_all_of_a_large_output_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    program = "for number in range(20_000): print('line', number)\nprint('x' * 1_000_000, end='')"

    members(program).run()

    lines = capfd.readouterr().out.splitlines()
    assert lines[:20_000] == [f"[1] line {number}" for number in range(20_000)]
    assert "".join(line.removeprefix("[1] ") for line in lines[20_000:]) == "x" * 1_000_000


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


@pytest.mark.parametrize("death", ["sys.exit(1)", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_member_that_dies_is_started_again(death: str) -> None:
    program = BEGUN + f"if len(begun.read_text().splitlines()) < 3: {death}"

    code = members(program).run()

    assert code == 0
    assert [number for number, _ in begun()] == ["1"] * 3


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


def test_deaths_of_a_member_that_had_been_up_do_not_add_up() -> None:
    program = BEGUN + "sys.exit(0 if len(begun.read_text().splitlines()) == 6 else 1)"

    code = members(program, max_restarts=1, reset_after_s=0.0).run()

    assert code == 0
    assert len(begun()) == 6


def test_wrong_use_ends_the_run_with_code_2_and_without_a_restart() -> None:
    code = members(BEGUN + "if number == '2': sys.exit(2)\ntime.sleep(600)", count=2).run()

    assert code == 2
    assert [number for number, _ in begun()].count("2") == 1


def test_members_that_never_reach_a_broker_end_the_run_with_code_3() -> None:
    assert members(BEGUN + "sys.exit(3)", count=2, max_restarts=1).run() == 3
    assert len(begun()) >= 2


def test_a_broker_that_was_there_once_makes_it_a_failure() -> None:
    program = BEGUN + "sys.exit(1 if len(begun.read_text().splitlines()) == 1 else 3)"

    assert members(program, max_restarts=3).run() == 1
    assert len(begun()) == 4


def test_a_process_that_cannot_be_made_is_tried_again_and_given_up(caplog: pytest.LogCaptureFixture) -> None:
    policy = RestartPolicy(1, 60.0, tenacity.wait_fixed(0.01))

    with caplog.at_level(logging.WARNING):
        code = Processes(["/no/such/program"], 1, policy).run()

    assert code == 1
    assert sum("could not be started" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_and_the_second_signal_reach_every_member(number: signal.Signals) -> None:
    with run_of(TWO_SIGNALS) as process:
        wait_until(lambda: len(begun()) == 2)
        process.send_signal(number)
        wait_until(lambda: Path("heard-1-1").exists() and Path("heard-2-1").exists())
        assert process.poll() is None
        time.sleep(LATER_S)
        process.send_signal(number)

        code = process.wait(60)

    assert code == 0
    # Two kinds: a member to which systemd sends the first as well does not take that for a second.
    assert all(Path(f"{name}-{member}").exists() for name in ("SIGTERM", "SIGINT") for member in (1, 2))


def test_the_third_signal_kills_members_that_answer_none() -> None:
    deaf = TWO_SIGNALS.replace("if heard == 2:", "if False:")
    with run_of(deaf) as process:
        wait_until(lambda: len(begun()) == 2)
        for round_ in (1, 2):
            process.send_signal(signal.SIGTERM)
            wait_until(lambda at=round_: Path(f"heard-1-{at}").exists() and Path(f"heard-2-{at}").exists())
            time.sleep(LATER_S)
        assert all(alive(pid) for _, pid in begun())
        process.send_signal(signal.SIGTERM)

        code = process.wait(60)

    assert code == 1
    assert not any(alive(pid) for _, pid in begun())


def test_a_signal_ends_a_run_whose_members_wait_for_their_next_start() -> None:
    with run_of(BEGUN + "sys.exit(1)", count=1) as process:
        wait_until(lambda: len(begun()) >= 2)
        process.send_signal(signal.SIGTERM)

        assert process.wait(60) in {0, 1}  # 1 where it met a member that was about to die by itself
        count = len(begun())

    assert len(begun()) == count


def test_members_end_in_order_when_the_process_that_started_them_is_killed() -> None:
    program = BEGUN + (
        "from penstock.supervisor.lifeline import end_with_parent\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(f'in order {number}').touch(), os._exit(0)))\n"
        "end_with_parent()\n"
        "assert 'PENSTOCK_LIFELINE_FD' not in os.environ\n"
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
