"""Runs of a file store's relay in memory: decisions, Kafka transactions whose ends are in doubt, topics that close.

A run is chosen by its seed. The journal lies on a disk in memory, Kafka is a list of what became visible together with
the done log, and the client's thread is the relay's own. What must come of it is written a second time, simply (I7).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.transactional.faults import Fault
from penstock.transactions.stores.file.log.journal import Change, Decide, Journal, Prepare, Settle
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.file.shard import FileBacklog
from penstock.transactions.stores.relay import relay
from penstock.transactions.stores.relay.outbound.outbound import InDoubtError
from penstock.transactions.stores.relay.publishable import Outcome, Publishable, divide
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Verdict
from simulation.torn_disk import TornDisk

TOPICS = ("well", "sick")
DISCARDED = "discarded"


class Kafka:
    """What readers of committed records see, and the done log: both change together, or not at all."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.visible: list[tuple[str, bytes | None]] = []
        self.done: list[str] = []
        self.trimmed = 0
        self.closed: set[str] = set()
        self.happened: Counter[str] = Counter()


class Outbound:
    """A publisher without a client, as `penstock.transactions.stores.relay.outbound.outbound` has it."""

    doing, active_at = "", 0.0

    def __init__(self, kafka: Kafka) -> None:
        self._kafka = kafka
        self.known_to = self.groups = 0

    def open(self, shut_out: Sequence[str]) -> frozenset[str]:
        assert isinstance(shut_out, tuple)
        self.known_to = len(self._kafka.done)
        return frozenset(self._kafka.done[self._kafka.trimmed :])

    def publish(self, entries: Iterable[Publishable], *, until_visible: bool) -> Outcome:
        assert not until_visible, "nobody watches"
        kafka, outcome = self._kafka, Outcome()
        left = divide(entries, {}, {topic: Fault(f"{topic} is closed", whole=True) for topic in kafka.closed}, outcome)
        end = kafka.chance.choice(("known",) * 6 + ("committed", "lost"))
        if left and end != "lost":
            kafka.visible += [(one.topic, one.value) for entry in left for one in entry.messages]
            kafka.done += [entry.transaction_id for entry in left]
        if left and end != "known":
            kafka.happened[f"in doubt, {end}"] += 1
            raise InDoubtError("the answer was lost")
        kafka.happened["refused"] += bool(outcome.refused)
        outcome.published = [entry.transaction_id for entry in left]
        self.groups += 1
        self.known_to = len(kafka.done)
        return outcome

    def forget(self, offset: int) -> None:
        self._kafka.trimmed = max(self._kafka.trimmed, offset)
        self._kafka.happened["trimmed"] += 1

    def close(self) -> None:
        """There is nothing to close."""


class Direct:
    """Calls an outbound at once, in place of a thread that can be left behind."""

    def __init__(self, make: Callable[[], Outbound], *_: object) -> None:
        self._make = make
        self._outbound: Outbound | None = None
        self._ended: Any = None

    @property
    def is_busy(self) -> bool:
        return self._ended is not None

    def start(self, _label: str, work: Callable[[Outbound], Any]) -> None:
        self._outbound = self._outbound or self._make()
        try:
            result = work(self._outbound)
        except InDoubtError as error:
            self._ended = SimpleNamespace(result=lambda error=error: _raise(error))
        else:
            self._ended = SimpleNamespace(result=lambda: result)

    def ended(self) -> Any:
        ended, self._ended = self._ended, None
        return ended

    def leave(self) -> None:
        self._outbound = self._ended = None


def _raise(error: Exception) -> None:
    raise error


class Clock:
    """The relay's time, which a run moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Run:
    """One seed's run."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.chance = random.Random(f"relay {seed}")  # noqa: S311 - a seed must give the same run again
        self.kafka = Kafka(self.chance)
        self.disk = TornDisk(self.chance)
        self.clock = clock
        self.halves: dict[str, Half] = {}
        #: What was decided first, by id.
        self.first: dict[str, Verdict] = {}
        self.refused = self.wrong = 0
        self.open()

    def open(self) -> None:
        """Begin anew, as after a crash: what is not in the journal is forgotten."""
        self.unsettled: list[str] = []
        journal = Journal(self.disk, 1 << 12)
        journal.open()
        self.store = OpenStore(journal, "simulated", 1 << 20)
        self.store.writer = SimpleNamespace(submit=self.submit)  # type: ignore[assignment] # what is used of it
        backlog = FileBacklog(self.store, DISCARDED, self.unsettled.extend)
        self.relay = relay.Relay(
            backlog,
            "simulated",
            lambda *_, **__: Outbound(self.kafka),  # type: ignore[arg-type] # what is used of it
            LeftBehind("a simulation"),
            lambda: None,
        )

    def submit(self, change: Change, callback: Callable[[Any], None] = lambda _: None) -> None:
        """Write a change, as the store's own thread does."""
        (outcome,) = self.store.journal.commit([change])
        self.store._changed([change], [outcome])
        callback(outcome)

    def begin(self) -> None:
        chance = self.chance
        half = Half(new_id(), "orders", chance.choice(TOPICS), None, None, b"%d" % len(self.halves), (), None)
        self.halves[half.transaction_id] = half = half._replace(order_key=chance.choice((None, b"a", b"b")))
        self.submit(Prepare((half,), 1))

    def decide(self) -> None:
        chance = self.chance
        name, group = chance.choice([*self.halves, new_id()]), chance.choice(("orders",) * 9 + ("others",))
        verdict = chance.choice((Verdict.COMMIT, Verdict.COMMIT, Verdict.ROLLBACK, Verdict.DISCARD))
        before = self.store.counts.refused
        self.submit(Decide(name, group, verdict, Author.CHECK, 1, 2))
        if name in self.halves and group == "orders" and name not in self.first:
            self.first[name] = verdict
        else:
            self.wrong += 1
        self.refused += self.store.counts.refused - before

    def close_or_open(self) -> None:
        self.kafka.closed ^= {"sick"}

    def settle(self) -> None:
        """What was published becomes durably so, and the done log may be trimmed."""
        if self.unsettled:
            self.submit(Settle(tuple(self.unsettled)))
            self.unsettled.clear()
        self.relay.trim()

    def step(self) -> None:
        self.clock.now += self.chance.choice((0.01, 0.3, 1.0))
        self.relay.step()

    def run(self) -> None:
        """Let anything happen, and then all that is to be published."""
        for _ in range(120):
            self.chance.choices(*MOVES)[0](self)
        self.kafka.closed.clear()
        self.drain()
        # What was published and not settled comes again from the journal, and is in the done log.
        self.open()
        self.drain()

    def drain(self) -> None:
        for _ in range(40):
            self.clock.now += 10
            self.relay.step()
        self.verify()

    def verify(self) -> None:
        wanted = Counter(
            (self.halves[name].topic if verdict is Verdict.COMMIT else DISCARDED, self.halves[name].value)
            for name, verdict in self.first.items()
            if verdict is not Verdict.ROLLBACK and not self.stands_behind(name)
        )
        assert Counter(self.kafka.visible) == wanted, "I7: published once iff committed"
        undecided = set(self.halves) - set(self.first)
        left = {one.transaction_id for one in self.store.pending.values() if not one.settled}
        assert left == undecided | {name for name in self.first if self.stands_behind(name)}, (
            "what is left is undecided"
        )
        assert self.refused == self.wrong, "each decision that does not count is refused"
        for key in (b"a", b"b"):
            ours = [half.value for half in self.halves.values() if half.order_key == key]
            seen = [value for topic, value in self.kafka.visible if topic != DISCARDED and value in ours]
            assert seen == sorted(seen, key=ours.index), "a later half of a key passed an earlier one"

    def stands_behind(self, name: str) -> bool:
        """Tell whether a commit waits for an earlier half of its key that nobody decided."""
        half = self.halves[name]
        if half.order_key is None or self.first[name] is not Verdict.COMMIT:
            return False
        earlier = [one for one in self.halves.values() if one.order_key == half.order_key]
        return any(one.transaction_id not in self.first for one in earlier[: earlier.index(half)])


#: What may happen next, and how often.
MOVES = ((Run.begin, Run.decide, Run.step, Run.settle, Run.close_or_open, Run.open), (5, 6, 8, 2, 1, 1))


def run(seed: int) -> Run:
    """Make the run of a seed."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "BoundedOutbound", Direct)
        patch.setattr(relay, "time", clock)
        made = Run(seed, clock)
        made.run()
    return made
