"""Who gets which partition: by the rule of Kafka's cooperative-sticky assignor, whose choice among equals is free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: Topic and partition.
Place = tuple[str, int]


def assign(
    members: Mapping[str, Iterable[str]], held: Mapping[str, Iterable[Place]], places: Iterable[Place]
) -> dict[str, list[Place]]:
    """Return each member's partitions, by its topics and what it holds; among equals the first member gets one."""
    topics = {name: frozenset(wanted) for name, wanted in members.items()}
    order = {name: rank for rank, name in enumerate(topics)}
    existing = sorted(places)
    owners = _kept(topics, held, set(existing))
    load = dict.fromkeys(topics, 0)
    for name in owners.values():
        load[name] += 1

    def lightest(place: Place) -> str | None:
        able = [name for name, wanted in topics.items() if place[0] in wanted]
        return min(able, key=lambda name: (load[name], order[name])) if able else None

    moved = True
    while moved:
        moved = False
        for place in existing:
            owner, other = owners.get(place), lightest(place)
            if other is None or (owner is not None and load[owner] <= load[other] + 1):
                continue
            if owner is not None:
                load[owner] -= 1
            owners[place] = other
            load[other] += 1
            moved = True
    shares: dict[str, list[Place]] = {name: [] for name in topics}
    for place in existing:
        if place in owners:
            shares[owners[place]].append(place)
    return shares


def _kept(
    topics: Mapping[str, frozenset[str]], held: Mapping[str, Iterable[Place]], existing: set[Place]
) -> dict[Place, str]:
    owners: dict[Place, str] = {}
    for name, mine in held.items():
        for place in mine:
            if place in existing and place[0] in topics[name]:
                owners.setdefault(place, name)
    return owners
