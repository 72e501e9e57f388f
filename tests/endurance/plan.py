"""The parts of a campaign, and the faults that a seed selects. Pure.

Different targets are harmed at once, the same one never twice. One node of Kafka is away at a time, as three replicas
with two in sync promise to bear.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Topics that workers read, topics that they write, and targets of the stores.
INPUTS = ("singles", "keyed", "batched")
OUTPUTS = ("results", "dlq.singles")
STORES = ("kafka", "sql", "file")
TARGETS = tuple(f"{store}-{place}" for store in STORES for place in ("target", "second"))
PARTITIONS = 6
#: Processes of penstock.
PROCESSES = (
    *("worker-a", "worker-b", "coordinator-a", "coordinator-b"),
    *(f"sender-{store}" for store in STORES),
    "spark",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: its targets, and its shortest and longest seconds. `weight`: its cards in the deck."""

    name: str
    targets: tuple[str, ...]
    shortest_s: float
    longest_s: float
    weight: int = 1


KINDS = (
    Kind("process killed", PROCESSES, 0.0, 8.0, 4),
    Kind("process frozen", PROCESSES, 3.0, 20.0, 3),
    Kind("broker killed", ("kafka",), 0.0, 10.0),
    Kind("broker frozen", ("kafka",), 3.0, 15.0),
    Kind("partitions moved", ("kafka",), 0.0, 0.0),
    Kind("PostgreSQL restarted", ("postgresql",), 0.0, 8.0),
    Kind("network cut", ("network",), 3.0, 15.0),
    Kind("network slow", ("network",), 5.0, 15.0),
    Kind("topic refuses", TARGETS, 3.0, 12.0),
    Kind("disk full", ("sender-file",), 8.0, 15.0),
    Kind("clock jumped", PROCESSES, 3.0, 15.0),
    Kind("rolling deploy", ("deploy",), 0.0, 0.0),
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault that a seed selected: begin, kind, target and duration."""

    at_s: float
    kind: Kind
    target: str
    seconds: float


def plan(seed: int, seconds: float) -> list[Planned]:
    """Select the faults of a campaign: all kinds in turn, in an order that the seed shuffles, several at once."""
    chance = random.Random(f"faults {seed}")  # noqa: S311 - no secret
    drawn: list[Planned] = []
    deck: list[Kind] = []
    at_s = chance.uniform(2.0, 6.0)
    while at_s < seconds:
        if not deck:
            deck = [kind for kind in KINDS for _ in range(kind.weight)]
            chance.shuffle(deck)
        kind = deck.pop()
        lasting = chance.uniform(kind.shortest_s, kind.longest_s)
        drawn.append(Planned(at_s, kind, chance.choice(kind.targets), lasting))
        at_s += chance.uniform(2.0, 8.0)
    return drawn
