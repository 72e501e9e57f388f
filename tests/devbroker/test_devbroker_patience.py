"""A starting process is waited for as long as it gets on, and no longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.devbroker.patience import Patience, ThreadTimes, thread_times

#: The share of a CPU that a process has, and that it waits for one.
STARVED, IDLE, WORKING = (0.01, 0.9), (0.02, 0.01), (0.9, 0.0)


class World:
    """A process on a machine where time passes by hand."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.now = self.cpu_s = self.waited_s = 0.0
        self.patience = Patience("the broker", 60, self.log, clock=lambda: self.now, times=self.times)

    def times(self, _pid: int) -> ThreadTimes:
        return {"1": (self.cpu_s, self.waited_s)}

    def given_up_after(self, shares: tuple[float, float], seconds: int, line: str = "") -> int | None:
        """Let so many seconds pass; return after how many it is given up, or None."""
        with self.log.open("a") as log:
            for second in range(1, seconds + 1):
                self.now += 1
                self.cpu_s += shares[0]
                self.waited_s += shares[1]
                log.write(line)
                log.flush()
                if self.patience.is_over(1):
                    return second
        return None


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_process_that_waits_for_a_cpu_is_waited_for_and_the_log_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    assert world.given_up_after(STARVED, 600) is None
    assert caplog.messages[0] == (
        "the broker is still starting after 20 s, in which it had 0.2 s of CPU time: it is waited for as it gets on"
    )


def test_a_process_that_writes_is_waited_for(world: World) -> None:
    assert world.given_up_after(IDLE, 600, "a line\n") is None


def test_a_process_that_stands_still_is_given_up_that_long_after_it_last_moved(world: World) -> None:
    assert world.given_up_after(STARVED, 100) is None
    assert world.given_up_after(IDLE, 600) == 61


def test_a_process_that_works_in_vain_is_given_up(world: World) -> None:
    assert world.given_up_after(WORKING, 600) == 67


def test_the_system_tells_the_times_of_a_process() -> None:
    assert sum(cpu_s for cpu_s, _ in thread_times(os.getpid()).values()) > 0
    assert thread_times(0) == {}
