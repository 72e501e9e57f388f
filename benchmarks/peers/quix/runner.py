"""The command that runs Quix Streams: `consume.py` of this folder, in its own environment."""

from __future__ import annotations

from pathlib import Path

from peers.environment import python_with

VERSION = "3.28.1"


def runner_command() -> list[str]:
    """Return the command without its arguments; raises as `python_with`."""
    python = python_with("quix", f"quixstreams=={VERSION}")
    return [str(python), str(Path(__file__).with_name("consume.py"))]
