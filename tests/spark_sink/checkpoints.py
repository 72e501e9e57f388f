"""What the tests of sinks do to a query's checkpoint."""

from __future__ import annotations

from pathlib import Path


def lose_commit(checkpoint: Path, batch_id: int) -> None:
    """Remove Spark's own note that a batch was done: it hands that batch over again."""
    newest = checkpoint / "commits" / str(batch_id)
    newest.unlink()
    newest.with_name(f".{batch_id}.crc").unlink()
