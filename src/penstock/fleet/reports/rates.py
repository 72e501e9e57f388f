"""Rates between two looks at counts that only grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Of the counts, those whose rates are told.
_RATED = ("received", "handled", "failed", "retried", "dead_letters", "published", "committed", "checks")


class Rates:
    """Remembers the last look. For one thread."""

    def __init__(self) -> None:
        self._before: tuple[float, Mapping[str, Any]] | None = None

    def of(self, description: Mapping[str, Any], now: float) -> dict[str, float]:
        """Return how many a second there were of each since the last look; nothing at the first."""
        coordinator = description.get("coordinator") or {"counts": {}}
        counts = {**coordinator["counts"], **(description.get("counts") or {})}
        then, self._before = self._before, (now, counts)
        if then is None or now <= then[0]:
            return {}
        return {
            name: max(0.0, (counts[name] - then[1].get(name, 0)) / (now - then[0])) for name in _RATED if name in counts
        }
