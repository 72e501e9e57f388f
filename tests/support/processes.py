"""Processes that tests start and end."""

from __future__ import annotations

from pathlib import Path


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}
