"""The README's program prints what the README says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_program_ships_what_was_paid_in_order() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "hello.py"], capture_output=True, text=True, timeout=600, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["shipping b'order 1' for b'alice'", "shipping b'order 3' for b'alice'"]


def test_the_readme_shows_the_program_as_it_is() -> None:
    program = (ROOT / "examples" / "hello.py").read_text().split('"""\n', 1)[1].strip()

    assert program in (ROOT / "README.md").read_text()
