"""The command that runs Quix Streams: `consume.py` beside this file, in an environment of its own."""

from __future__ import annotations

from pathlib import Path

from peers.environment import python_with

VERSION = "3.28.1"


def runner_command() -> list[str]:
    """Return the command without its arguments; for what it raises see `python_with`."""
    python = python_with("quix", f"quixstreams=={VERSION}")
    return [str(python), str(Path(__file__).with_name("consume.py"))]
