"""Which logs the committed positions belong to, and whether those logs are still the ones that were read. Pure.

A topic that was deleted and made again begins at offset 0, and may have grown past an old position by the time somebody
looks: so the ids of the three topics are written beside each position. The broker forgets the positions of a topic that
is deleted, which is why each of the three positions has the ids of all. Positions of older versions have none; for
those the ends of the logs tell, and a position that is missing beside one that is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

#: Names of the logs of a half partition, as they stand beside positions.
HALF, OP, DONE = "half", "op", "done"
LOGS = (HALF, OP, DONE)


class Fate(Enum):
    """What became of a log since it was read."""

    INTACT = "as it was"
    CUT = "records were deleted that were needed"
    ANEW = "it was deleted and made again, or its end was cut off"


class Committed(NamedTuple):
    """How far a log was read, and its bounds.

    Attributes:
        position: the next offset to be read, or None where none is written down; of the done log, the lowest needed.
        low: where it begins now.
        end: where it ends now.
        ids: the topic ids that stand beside the position.
    """

    position: int | None
    low: int
    end: int
    ids: Mapping[str, str]


class Start(NamedTuple):
    """Where to read a log from.

    Attributes:
        offset: the first to be read.
        fate: what became of the log.
        lost: how many records are gone, at least.
    """

    offset: int
    fate: Fate
    lost: int


def encode_ids(ids: Mapping[str, str]) -> str:
    """Return what is written beside a position.

    Args:
        ids: topic ids by log; those that are not known are left out.
    """
    return " ".join(f"{log}={ids[log]}" for log in LOGS if log in ids)


def decode_ids(metadata: str | None) -> dict[str, str]:
    """Return the topic ids that stand beside a position, by log. What is none of them is left out."""
    pairs = (word.partition("=") for word in (metadata or "").split(" "))
    return {name: topic_id for name, _, topic_id in pairs if name in LOGS and topic_id}


def starts_of(committed: Mapping[str, Committed], ids: Mapping[str, str]) -> dict[str, Start]:
    """Tell where to read on in the three logs of a half partition.

    Args:
        committed: how far each was read.
        ids: topic ids of the logs as they are now.
    """
    # All positions are written together, with the ids of all logs; those of a topic that is deleted are forgotten.
    were = {log: topic_id for one in committed.values() for log, topic_id in one.ids.items()}
    is_read = any(committed[log].position is not None for log in (HALF, OP))
    starts = {}
    for log, (position, low, end, _) in committed.items():
        is_other = log in were and ids.get(log, were[log]) != were[log]
        is_forgotten = is_read and position is None and (log != DONE or DONE in were)
        if log == DONE and not committed[HALF].ids and not committed[OP].ids:
            # An older version went on since, which does not write this position.
            position = None  # noqa: PLW2901 - it is none
        starts[log] = start_of(position, low, end, is_other=is_other or is_forgotten)
    return starts


def start_of(position: int | None, low: int, end: int, *, is_other: bool) -> Start:
    """Tell where to read on in a log that was read before.

    Args:
        position: the next offset to be read; None where none was written down.
        low: where the log begins.
        end: where it ends.
        is_other: whether it is known to be another log than that which was read.
    """
    if is_other or (position is not None and position > end):
        return Start(low, Fate.ANEW, 1)
    if position is None:
        return Start(low, Fate.INTACT, 0)
    if position < low:
        return Start(low, Fate.CUT, low - position)
    return Start(position, Fate.INTACT, 0)


def explained(log: str, place: str, found: Committed, fate: Fate) -> str:
    """Say what became of a log, what that means, and what to do.

    Args:
        log: which of `LOGS`.
        place: its topic and partition.
        found: to where it had been read, or from where it was needed, and where it begins and ends now.
        fate: what became of it.
    """
    position, low, end, _ = found
    if fate is Fate.CUT:
        what = f"{place}: offsets {position} to {low - 1} were deleted by somebody else before they were done with"
    else:
        was = "an unknown offset" if position is None else f"offset {position}"
        what = (
            f"{place} was deleted and made again, or its end was cut off: it was known to {was}, and now goes from "
            f"{low} to {end}"
        )
    return f"{what}. {_MEANS[log]} Check the retention of the store's topics, and who may delete them or from them."


_MEANS = {
    HALF: (
        "Transactions whose halves lay there, and that were neither settled nor written down in the done log, are "
        "gone, acknowledged ones among them: send them again. All that lies there now is read."
    ),
    OP: (
        "Decisions that lay there and had not taken effect are gone: their transactions are asked of their producers "
        "again. All that lies there now is read."
    ),
    DONE: (
        "What it said of settled transactions is gone: those whose halves or decisions lie above the committed "
        "positions may be published a second time by whoever starts from there, and delayed or undecided ones that "
        "only it held are gone. Compare what consumers got, by key or transaction."
    ),
}

__all__ = [
    "DONE",
    "HALF",
    "LOGS",
    "OP",
    "Committed",
    "Fate",
    "Start",
    "decode_ids",
    "encode_ids",
    "explained",
    "start_of",
    "starts_of",
]
