"""The README's program while busy loops run: it always prints the paid orders, and always ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(12_000)]

HELLO = Path(__file__).parents[2] / "examples" / "hello.py"

RUNS = 20
#: Number of busy processes, and seconds for a run meanwhile: many times those of a run without them.
BUSY = 8
LIMIT_S = 600


@pytest.fixture
def busy_loops() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep all cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(BUSY)]
    try:
        yield loops
    finally:
        for one in loops:
            one.kill()
        for one in loops:
            one.wait()


def test_hello_ends_each_time_while_busy_loops_run(busy_loops: list[subprocess.Popen[bytes]]) -> None:
    for number in range(RUNS):
        ended = subprocess.run([sys.executable, HELLO], capture_output=True, text=True, timeout=LIMIT_S, check=False)

        assert (ended.returncode, ended.stdout.splitlines()) == (
            0,
            ["shipping b'order 1' for b'alice'", "shipping b'order 3' for b'alice'"],
        ), f"run {number}: {ended.stderr}"
    assert [busy_loop.poll() for busy_loop in busy_loops] == [None] * BUSY
