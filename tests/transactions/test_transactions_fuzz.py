"""Garbage in a topic costs one refusal each, on every Python, and never the process (I10): see `fuzz_child`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

CHILD = Path(__file__).parent / "fuzz_child.py"
SOURCES = Path(penstock.__file__).parents[1]
#: Pythons that may be installed beside the one that runs.
OTHERS = [name for minor in range(11, 16) if minor != sys.version_info.minor for name in [f"python3.{minor}"]]
#: Those that refuse garbage by an error; the others return a value, or None.
REFUSING = ("half", "check request", "discarded", "op", "done", "ids of a done log", "Spark ledger")
EXAMPLES = 1_500


def fuzzed(python: str, seed: int) -> dict[str, dict[str, int]]:
    """Run all decoders on garbage in a child process, and return what they were given and refused."""
    child = subprocess.run(
        [python, str(CHILD), str(seed), str(EXAMPLES)],
        env={"PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert child.returncode == 0, f"{python} ended with {child.returncode}: {child.stderr[-3_000:]}"
    found: dict[str, dict[str, int]] = json.loads(child.stdout)
    return found


def test_garbage_is_refused_by_every_decoder_and_ends_no_process() -> None:
    found = fuzzed(sys.executable, seed=1)

    assert all(counts["examples"] == EXAMPLES for counts in found.values())
    # Both happened: garbage that was told apart, and changed records that still read.
    assert all(0 < found[name]["refused"] < EXAMPLES for name in REFUSING)


@pytest.mark.parametrize("python", OTHERS)
def test_garbage_is_refused_on_other_pythons_as_well(python: str) -> None:
    path = shutil.which(python)
    if path is None:
        pytest.skip(f"there is no {python}")
    probe = subprocess.run(
        [path, "-c", "import confluent_kafka, opentelemetry, sortedcontainers, tenacity, xxhash"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if probe.returncode:
        pytest.skip(f"{path} has not what penstock needs: {probe.stderr.strip()[-200:]}")

    assert fuzzed(path, seed=2)
