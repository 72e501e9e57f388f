"""Latency histograms: counts in buckets. Counts of members add up, and two reports differ by the counts in between."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

#: Upper ends of the buckets in seconds. One more bucket counts longer times.
BOUNDARIES_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
BUCKETS = len(BOUNDARIES_S) + 1


def quantile(counts: Sequence[float], part: float) -> float | None:
    """Return a quantile in seconds, interpolated; None without counts. `part` is from 0 to 1."""
    total = sum(counts)
    if total <= 0 or len(counts) != BUCKETS:
        return None
    wanted = part * total
    for number, below in enumerate(accumulate(counts)):
        if below >= wanted and counts[number] > 0:
            if number == len(BOUNDARIES_S):
                return BOUNDARIES_S[-1]
            low = 0.0 if number == 0 else BOUNDARIES_S[number - 1]
            within = 1.0 - (below - wanted) / counts[number]
            return low + (BOUNDARIES_S[number] - low) * within
    return BOUNDARIES_S[-1]
