"""The smallest program with transactions prints what was committed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_program_ships_what_was_paid_in_order() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "hello.py"], capture_output=True, text=True, timeout=600, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["shipping b'order 1' for b'alice'", "shipping b'order 3' for b'alice'"]
