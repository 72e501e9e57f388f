"""The example of a user's own tests passes as it stands, by pytest and as a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "testing_handlers.py"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "says"),
    [(["-m", "pytest", "-q", "-p", "no:cacheprovider"], "2 passed"), ([], "both hold")],
    ids=["pytest", "program"],
)
def test_the_example_of_testing_handlers_passes(command: list[str], says: str) -> None:
    done = subprocess.run([sys.executable, *command, EXAMPLE], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout
