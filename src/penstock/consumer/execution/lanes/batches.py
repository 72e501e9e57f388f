"""Batches: whether a lane holds a full one, and what of one failed."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.consumer.assignments import Assignment, ConsumerRun
from penstock.consumer.handlers.route import Failed
from penstock.errors import BatchError


def available(runs: Sequence[ConsumerRun], assignment: Assignment, enough: int) -> int:
    """Return how many messages of an assignment stand in a row at the front of a lane's runs, `enough` at most.

    It is `enough` too where another's messages stand behind them: those in front will not become more.
    """
    count = 0
    # By place: the router may append meanwhile, which an iterator would not bear.
    for place in range(len(runs)):
        run = runs[place]
        if run.owner.assignment is not assignment:
            return enough
        count += len(run.records) - run.next
        if count >= enough:
            return enough
    return count


def failures(failed: Failed, count: int) -> dict[int, Failed]:
    """Return which of a batch failed, and with what."""
    if not isinstance(failed.error, BatchError):
        return dict.fromkeys(range(count), failed)
    named = {
        place: Failed(error) if isinstance(error, BaseException) else failed
        for place, error in failed.error.failed.items()
        if isinstance(place, int) and 0 <= place < count
    }
    # Names one that is not there: it is not known what it meant, nor what is done, so nothing is.
    return named if len(named) == len(failed.error.failed) > 0 else dict.fromkeys(range(count), failed)
