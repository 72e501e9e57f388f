"""Who gets which partition: by the rule of Kafka's cooperative-sticky assignor, whose choice among equals is free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from penstock.testing.memory.log.log import Place


def assign(
    members: Mapping[str, Iterable[str]], held: Mapping[str, Iterable[Place]], places: Iterable[Place]
) -> dict[str, list[Place]]:
    """Return each member's partitions, by its topics and what it holds; among equals the first member gets one."""
    topics = {name: frozenset(wanted) for name, wanted in members.items()}
    existing = sorted(places)
    owners: dict[Place, str] = {}
    for name, mine in held.items():
        for place in mine:
            if place in existing and place[0] in topics[name]:
                owners.setdefault(place, name)
    load = Counter(owners.values())
    moved = True
    while moved:
        moved = False
        for place in existing:
            able = [name for name, wanted in topics.items() if place[0] in wanted]
            owner, other = owners.get(place), min(able, key=load.__getitem__, default=None)
            if other is None or (owner is not None and load[owner] <= load[other] + 1):
                continue
            if owner is not None:
                load[owner] -= 1
            owners[place] = other
            load[other] += 1
            moved = True
    return {name: [place for place in existing if owners.get(place) == name] for name in topics}
