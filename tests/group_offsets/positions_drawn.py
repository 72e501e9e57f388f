"""Positions of a group, as hypothesis draws them and as a model of sets sees them."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from penstock.group_offsets.positions import Position

GROUP, TOPIC = "sms", "orders"


def runs_of(offsets: Iterable[int]) -> tuple[range, ...]:
    """Return the offsets as ranges that rise and lie apart."""
    runs: list[range] = []
    for offset in sorted(set(offsets)):
        if runs and runs[-1].stop == offset:
            runs[-1] = range(runs[-1].start, offset + 1)
        else:
            runs.append(range(offset, offset + 1))
    return tuple(runs)


@st.composite
def positions(draw: st.DrawFn, partition: int = 0) -> Position:
    """Draw a position in a log of up to 60 offsets; the committed offset may lie before its start."""
    start = draw(st.integers(0, 20))
    log = range(start, start + draw(st.integers(0, 40)))
    committed = draw(st.none() | st.integers(0, log.stop))
    if committed is None:
        return Position(TOPIC, partition, None, log)
    above = range(committed + 1, log.stop)
    done = draw(st.sets(st.sampled_from(above))) if above else set()
    return Position(TOPIC, partition, committed, log, runs_of(done))


def done_of(log: range, committed: int | None, runs: Iterable[range]) -> set[int]:
    """Return the offsets of a log that a commit calls done."""
    below = set() if committed is None else set(range(committed))
    return (below | {offset for run in runs for offset in run}) & set(log)
