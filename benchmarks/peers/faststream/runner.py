"""The command that runs FastStream: `consume.py` of this folder, in its own environment."""

from __future__ import annotations

from pathlib import Path

from peers.environment import python_with

VERSION = "0.7.8"


def runner_command(client: str) -> list[str]:
    """Return the command without its further arguments; raises as `python_with`.

    Args:
        client: `confluent` or `aiokafka`.
    """
    python = python_with("faststream", f"faststream[kafka,confluent]=={VERSION}")
    return [str(python), str(Path(__file__).with_name("consume.py")), client]
