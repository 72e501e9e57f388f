"""Garbage in a topic costs one refusal each, on every Python, and never the process (I10): see `fuzz_child`."""

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


def output_of(*command: str) -> str | None:
    """Return what a command prints, or None where it fails: a name may be a shim for a Python that is not there."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()


def other_pythons() -> list[str]:
    """Return the interpreters that are installed beside the one that runs, of the versions that penstock takes."""
    minors = [minor for minor in range(11, 16) if minor != sys.version_info.minor]
    found = [output_of(f"python3.{minor}", "-c", "import sys; print(sys.executable)") for minor in minors]
    return [path for path in found if path]


OTHERS = other_pythons()


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


@pytest.mark.thorough
def test_garbage_is_refused_by_every_decoder_and_ends_no_process() -> None:
    found = fuzzed(sys.executable, seed=1)

    assert all(counts["examples"] == EXAMPLES for counts in found.values())
    # Both happened: garbage that was told apart, and changed records that still read.
    assert all(0 < found[name]["refused"] < EXAMPLES for name in REFUSING)


@pytest.mark.thorough
@pytest.mark.skipif(not OTHERS, reason="no other Python of penstock's versions is installed here")
@pytest.mark.parametrize("python", OTHERS)
def test_garbage_is_refused_on_other_pythons_as_well(python: str) -> None:
    if output_of(python, "-c", "import confluent_kafka, opentelemetry, sortedcontainers, tenacity, xxhash") is None:
        pytest.skip(f"{python} is not installed with the packages that penstock needs")

    assert fuzzed(python, seed=2)
