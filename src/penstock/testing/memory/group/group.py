"""A consumer group at its coordinator: members, generations, and who has which partition.

Rebalances are cooperative: a generation is completed once every member has served the callbacks of the one before, and
what a member must give back goes to somebody else in a further one. Clients' background threads, which join and send
heartbeats, are always in time; a member whose process is gone or cut off is `unheard` and evicted with its session.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.testing.memory.log import Place


class Gone(Enum):
    """Why a member is not in the group any more."""

    LEFT = auto()
    SESSION = auto()
    POLL_INTERVAL = auto()


@dataclass(frozen=True, slots=True)
class Change:
    """What a generation means for one member: what it gives back, then what it gets."""

    revoked: tuple[Place, ...]
    added: tuple[Place, ...]


@dataclass(slots=True, eq=False)
class Member:
    """One member. The client writes `polled_at` and `owned`, the group all else, both under the broker's lock."""

    name: str
    topics: tuple[str, ...]
    #: Seconds without a heartbeat, and between two polls, until it is evicted.
    session_s: float
    poll_s: float
    polled_at: float
    #: Since when no heartbeat comes, or None while they do.
    unheard_since: float | None = None
    #: What the client has, what the last generation gave, and which one that was.
    owned: dict[Place, None] = field(default_factory=dict)
    assigned: tuple[Place, ...] = ()
    generation: int = -1
    #: What the client has not served yet.
    change: Change | None = None
    gone: Gone | None = None

    @property
    def needs_client(self) -> bool:
        """Whether the client has anything to serve."""
        return self.change is not None or self.gone is not None

    def deadline(self) -> float:
        """When it is evicted if nothing is heard of it until then."""
        if self.unheard_since is not None:
            return self.unheard_since + self.session_s
        return self.polled_at + self.poll_s


class Group:
    """The members of one group. The broker's lock guards it."""

    def __init__(self, name: str, places: Callable[[Iterable[str]], list[Place]], chance: random.Random) -> None:
        self.name = name
        self._places = places
        self._chance = chance
        self.members: dict[str, Member] = {}
        self.generation = 0
        self._preparing = False
        self._shuffle = False

    def join(self, member: Member) -> None:
        """Take a member in."""
        self.members[member.name] = member
        self.rebalance()

    def change_topics(self, member: Member, topics: Iterable[str]) -> None:
        """Let a member have other topics; what it keeps stays with it."""
        wanted = tuple(topics)
        if wanted != member.topics:
            member.topics = wanted
            self.rebalance()

    def leave(self, member: Member) -> None:
        """Let a member go at its own wish."""
        if self.members.pop(member.name, None) is not None:
            self._dismiss(member, Gone.LEFT)
            self.rebalance()

    def heard(self, member: Member, now: float) -> None:
        """Hear heartbeats of this member again."""
        member.unheard_since = None
        member.polled_at = now
        self._complete_when_ready()

    def expire(self, now: float) -> None:
        """Evict who has not been heard of for too long."""
        late = [member for member in self.members.values() if member.deadline() <= now]
        for member in late:
            del self.members[member.name]
            self._dismiss(member, Gone.POLL_INTERVAL if member.unheard_since is None else Gone.SESSION)
        if late:
            self.rebalance()

    @staticmethod
    def _dismiss(member: Member, why: Gone) -> None:
        member.gone, member.change = why, None

    def rebalance(self, *, shuffle: bool = False) -> None:
        """Prepare a generation; shuffled, partitions go to members by chance, whoever has them."""
        self._preparing = True
        self._shuffle = self._shuffle or shuffle
        self._complete_when_ready()

    def served(self, member: Member) -> None:
        """The client has served its change: it can take part in the next generation."""
        if member.gone is not None or member.change is None:
            return
        gave_back = bool(member.change.revoked)
        member.change = None
        if gave_back:
            self.rebalance()
        else:
            self._complete_when_ready()

    def _complete_when_ready(self) -> None:
        if not self._preparing:
            return
        if any(member.change is not None or member.unheard_since is not None for member in self.members.values()):
            return
        self._preparing = False
        self.generation += 1
        self._assign()

    def _assign(self) -> None:
        names = list(self.members)
        held = {name: list(member.owned) for name, member in self.members.items()}
        claims = held
        if self._shuffle:
            self._chance.shuffle(names)
            claims = {}
        self._shuffle = False
        topics = {name: self.members[name].topics for name in names}
        places = self._places({topic for wanted in topics.values() for topic in wanted})
        shares = _assign(topics, claims, places)
        owner = {place: name for name, mine in held.items() for place in mine}
        for name, member in self.members.items():
            given = tuple(place for place in shares[name] if owner.get(place, name) == name)
            member.generation, member.assigned = self.generation, given
            kept = set(given)
            revoked = tuple(place for place in member.owned if place not in kept)
            added = tuple(place for place in given if place not in member.owned)
            member.change = Change(revoked, added)


def _assign(
    members: Mapping[str, Iterable[str]], held: Mapping[str, Iterable[Place]], places: Iterable[Place]
) -> dict[str, list[Place]]:
    """Return each member's partitions, by its topics and what it holds; among equals the first member gets one.

    The rule is that of Kafka's cooperative-sticky assignor, whose choice among equals is free.
    """
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
