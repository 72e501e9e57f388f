"""Which logs the committed positions belong to, and whether those logs are still the ones that were read. Pure.

A topic that was deleted and made again begins at offset 0, and may have grown past an old position by the time somebody
looks: so the ids of the three topics are committed with each position. The broker forgets the positions of a topic that
is deleted, which is why each of the three positions has the ids of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

#: Names of the logs of a half partition, as they are committed with positions.
HALF, OP, DONE = "half", "op", "done"
LOGS = (HALF, OP, DONE)


class Fate(Enum):
    """What became of a log since it was read."""

    INTACT = "as it was"
    CUT = "records were deleted that were needed"
    REPLACED = "it was deleted and made again, or its end was cut off"


class Committed(NamedTuple):
    """How far a log was read, where it begins and ends now, and the topic ids that were committed with the position.

    The position is the next offset to be read, or None where none is written down; of the done log, the lowest needed.
    """

    position: int | None
    low: int
    end: int
    ids: Mapping[str, str]


def encode_ids(ids: Mapping[str, str]) -> str:
    """Return what is committed with a position: topic ids by log, without those that are not known."""
    return " ".join(f"{log}={ids[log]}" for log in LOGS if log in ids)


def decode_ids(metadata: str | None) -> dict[str, str]:
    """Return the topic ids that were committed with a position, by log. What is none of them is left out."""
    pairs = (word.partition("=") for word in (metadata or "").split(" "))
    return {name: topic_id for name, _, topic_id in pairs if name in LOGS and topic_id}


def known_ids(committed: Mapping[str, Committed]) -> dict[str, str]:
    """Return the topic ids of the logs that were read. All positions are written together, with the ids of all logs."""
    return {log: topic_id for found in committed.values() for log, topic_id in found.ids.items()}


def fates_of(committed: Mapping[str, Committed], ids: Mapping[str, str]) -> dict[str, Fate]:
    """Tell what became of the three logs of a half partition, by the topic ids of the logs as they are now."""
    were = known_ids(committed)
    return {
        log: fate_of(position, low, end, is_other=log in were and log in ids and ids[log] != were[log])
        for log, (position, low, end, _) in committed.items()
    }


def fate_of(position: int | None, low: int, end: int, *, is_other: bool) -> Fate:
    """Tell what became of a log that was read up to a position; `is_other`: it is known to be another one."""
    if is_other or (position is not None and position > end):
        return Fate.REPLACED
    return Fate.CUT if position is not None and position < low else Fate.INTACT


def explained(log: str, place: str, found: Committed, fate: Fate) -> str:
    """Say what became of a log, what that means, and what to do.

    `place` is its topic and partition; `found` has the position to where it had been read, or from where it was needed.
    """
    position, low, end, _ = found
    known = "" if position is None else f" (it was known to offset {position})"
    if fate is Fate.CUT:
        what = f"{place}: records below offset {low} were deleted by somebody else, and were needed{known}."
    else:
        what = f"{place} was deleted and made again, or its end was cut off{known}; it goes from {low} to {end} now."
    return f"{what} {_MEANS[log]} Check the retention of the topic, and who may delete it or from it."


_MEANS = {
    HALF: (
        "Transactions whose halves lay there and were not read, or not written down in the done log, are gone, "
        "acknowledged ones among them: send them again. All that lies there now is read."
    ),
    OP: (
        "Decisions that lay there and were not read, or had not taken effect, are gone: the producers of their "
        "transactions are asked. All that lies there now is read."
    ),
    DONE: (
        "What it said of settled transactions is gone: those whose halves or decisions lie above the committed "
        "positions may be published a second time by whoever starts from there, and delayed or undecided ones that "
        "only it held are gone. Compare what consumers got, by key or transaction."
    ),
}
