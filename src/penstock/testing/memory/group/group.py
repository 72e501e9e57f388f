"""A consumer group at its coordinator: members, generations and assignments.

Rebalances are cooperative. A generation is complete after every member has served the callbacks of the generation
before. A revoked partition goes to another member in the generation after. The background threads of clients, which
join and send heartbeats, are never late. If a member's process is killed or cut off, the member is `unheard` and is
evicted at the end of its session.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.testing.memory.log import Place


class Gone(Enum):
    """Reasons why a member is no longer in the group."""

    LEFT = auto()
    SESSION = auto()
    POLL_INTERVAL = auto()


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one member's assignment in a generation: revoked partitions first, then added ones."""

    revoked: tuple[Place, ...]
    added: tuple[Place, ...]


@dataclass(slots=True, eq=False)
class Member:
    """A member. The client writes `polled_at` and `owned`, the group all else, both under the broker's lock."""

    name: str
    topics: tuple[str, ...]
    #: Maximum seconds without a heartbeat, and between two polls. After that it is evicted.
    session_s: float
    poll_s: float
    polled_at: float
    #: Time of the first missing heartbeat, or None while heartbeats arrive.
    unheard_since: float | None = None
    #: The partitions of the client, those of the last generation, and the number of that generation.
    owned: dict[Place, None] = field(default_factory=dict)
    assigned: tuple[Place, ...] = ()
    generation: int = -1
    #: The change that the client has not served yet.
    change: Change | None = None
    gone: Gone | None = None

    @property
    def needs_client(self) -> bool:
        """Whether the client has a change or an eviction to serve."""
        return self.change is not None or self.gone is not None

    def deadline(self) -> float:
        """Return the time of its eviction, unless it polls or is heard of before."""
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
        """Add a member."""
        self.members[member.name] = member
        self.rebalance()

    def change_topics(self, member: Member, topics: Iterable[str]) -> None:
        """Change the topics of a member. It keeps its partitions of topics that stay."""
        wanted = tuple(topics)
        if wanted != member.topics:
            member.topics = wanted
            self.rebalance()

    def leave(self, member: Member) -> None:
        """Remove a member that leaves."""
        if self.members.pop(member.name, None) is not None:
            self._dismiss(member, Gone.LEFT)
            self.rebalance()

    def heard(self, member: Member, now: float) -> None:
        """Record that heartbeats of this member arrive again."""
        member.unheard_since = None
        member.polled_at = now
        self._complete_when_ready()

    def expire(self, now: float) -> None:
        """Evict members whose session or poll interval is over."""
        late = [member for member in self.members.values() if member.deadline() <= now]
        for member in late:
            del self.members[member.name]
            self._dismiss(member, Gone.POLL_INTERVAL if member.unheard_since is None else Gone.SESSION)
        if late:
            self.rebalance()

    @staticmethod
    def _dismiss(member: Member, reason: Gone) -> None:
        member.gone, member.change = reason, None

    def rebalance(self, *, shuffle: bool = False) -> None:
        """Prepare a generation. With `shuffle`, partitions go to random members, regardless of their owners now."""
        self._preparing = True
        self._shuffle = self._shuffle or shuffle
        self._complete_when_ready()

    def served(self, member: Member) -> None:
        """Record that the client has served its change. It can take part in the next generation."""
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
        owner = {place: name for name, owned in held.items() for place in owned}
        for name, member in self.members.items():
            assigned = tuple(place for place in shares[name] if owner.get(place, name) == name)
            member.generation, member.assigned = self.generation, assigned
            kept = set(assigned)
            revoked = tuple(place for place in member.owned if place not in kept)
            added = tuple(place for place in assigned if place not in member.owned)
            member.change = Change(revoked, added)


def _assign(
    members: Mapping[str, Iterable[str]], held: Mapping[str, Iterable[Place]], places: Iterable[Place]
) -> dict[str, list[Place]]:
    """Return each member's partitions, from its topics and its present partitions. Among equals the first member wins.

    The rule is that of Kafka's cooperative-sticky assignor, which leaves the choice among equals open.
    """
    topics = {name: frozenset(wanted) for name, wanted in members.items()}
    existing = sorted(places)
    owners: dict[Place, str] = {}
    for name, owned in held.items():
        for place in owned:
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
