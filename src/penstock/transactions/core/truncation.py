"""From where the done log is still needed. Pure.

A note is needed as long as its halves, or the op that decided, may be read again; a snapshot, as long as its
transaction is pending. Notes do not tell their own offsets, so the log is marked now and then: where it ended, and how
far both other logs were read then. What lies below a mark speaks of nothing above those positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Mark(NamedTuple):
    """An end of the done log, with positions above all that the records below it speak of."""

    done_end: int
    half_position: int
    op_position: int


class DoneMarks:
    """The marks of one done log. Not thread-safe: its coordinator's thread drives it.

    The first is the end of the done log as it was found, with positions above all that it speaks of.
    """

    def __init__(self, first: Mark) -> None:
        self._marks = deque([first])
        self._low = 0

    @property
    def end(self) -> int:
        """The last end that was marked: what is written from now on lies at or above it."""
        return self._marks[-1].done_end

    def add(self, mark: Mark) -> None:
        """Remember where the done log ends now."""
        if mark.done_end > self.end:
            self._marks.append(mark)

    def low(self, half_checkpoint: int, op_checkpoint: int, snapshotted: Iterable[int]) -> int:
        """Return the offset below which nothing is needed.

        The checkpoints are where a restart reads the half and op logs from; `snapshotted` are offsets at or below the
        snapshots that are needed.
        """
        marks = self._marks
        while marks[0].half_position <= half_checkpoint and marks[0].op_position <= op_checkpoint:
            self._low = marks[0].done_end
            if len(marks) == 1:
                break
            marks.popleft()
        return min(self._low, min(snapshotted, default=self._low))
