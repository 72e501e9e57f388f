"""Garbage in a topic costs one refusal each, and never the process (I10): see `fuzz_child`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

CHILD = Path(__file__).parent / "fuzz_child.py"
SOURCES = Path(penstock.__file__).parents[1]
#: Those that refuse garbage by an error; the others return a value, or None.
REFUSING = ("half", "check request", "discarded", "op", "done", "ids of a done log", "Spark ledger")
EXAMPLES = 1_500


@pytest.mark.thorough
def test_garbage_is_refused_by_decoders_and_ends_no_process() -> None:
    command, environment = [sys.executable, CHILD, "1", str(EXAMPLES)], {"PYTHONPATH": str(SOURCES)}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert child.returncode == 0, child.stderr[-3_000:]
    found: dict[str, dict[str, int]] = json.loads(child.stdout)

    assert all(counts["examples"] == EXAMPLES for counts in found.values())
    # Both happened: refused garbage, and changed records that are still readable.
    assert all(0 < found[name]["refused"] < EXAMPLES for name in REFUSING)
