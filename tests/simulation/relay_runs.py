"""Runs of a file store's publication in memory: decisions, ends in doubt, and topics that close.

A run is chosen by its seed. The journal lies on a disk in memory, Kafka is a list of what became visible together with
the done log; the engine is the real one, without clients. What must come of it is written a second time, simply (I7).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.publishing import engine, publisher, trials
from penstock.transactions.publishing.group_commit import GroupCommit
from penstock.transactions.publishing.publisher import AbortedError, InDoubtError
from penstock.transactions.publishing.publisher_slot import CommitResult, PublisherSlot
from penstock.transactions.stores import relay
from penstock.transactions.stores.done_log import DoneRead
from penstock.transactions.stores.file.log.entries import Settled, StoredTransaction
from penstock.transactions.stores.file.open_store import Change, OpenStore
from penstock.transactions.stores.file.shard import FileShard
from penstock.transactions.stores.relayed_store import Decide, Prepare
from penstock.transactions.stores.shards import CheckTerms, StoredBatch
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Verdict
from simulation.torn_disk import TornDisk

TOPICS = ("well", "sick")
DISCARDED = "simulated.discarded"


class Kafka:
    """What readers of committed records see, and the done log: both change together, or not at all."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.visible: list[tuple[str, bytes | None]] = []
        self.done: list[str] = []
        self.trimmed = 0
        self.closed: set[str] = set()
        self.happened: Counter[str] = Counter()

    def read(self) -> DoneRead:
        return DoneRead(len(self.done), frozenset(self.done[self.trimmed :]))

    def forget(self, offset: int) -> None:
        self.trimmed = max(self.trimmed, offset)
        self.happened["trimmed"] += 1


class Slot(PublisherSlot):
    """A place for a Kafka transaction, as a `PublisherSlot` is one, without a client."""

    is_ready, is_used, lost_ids, name = True, False, 0, "simulated"
    transactional_id = "simulated"

    def __init__(self, kafka: Kafka, *, is_trial: bool) -> None:  # nothing of the base: it would make clients
        self.is_trial = is_trial
        self._kafka = kafka
        self.commit: GroupCommit | None = None
        self._error: AbortedError | InDoubtError | None = None
        self._is_asked = False

    @property
    def is_in_flight(self) -> bool:
        return self.commit is not None and not self._is_asked

    def poll(self, now: float) -> None:
        """It is always open."""

    def renew(self) -> None:
        """As above."""

    def begin(self, commit: GroupCommit, proof: object) -> None:
        kafka, batch = self._kafka, cast("StoredBatch", commit.batches[0][1])
        self.commit, self._error = commit, None
        assert proof is None
        assert not batch.is_watched, "no reader watches"
        closed = batch.topics() & kafka.closed
        if closed:
            kafka.happened["refused"] += 1
            reasons = dict.fromkeys(closed, "it is closed")
            self._error = AbortedError("refused", targets=reasons)
            return
        end = kafka.chance.choice(("known",) * 6 + ("committed", "lost"))
        if end != "lost":
            kafka.visible += [(topic, value) for _, some in batch.messages() for topic, _, _, value, _ in some]
            kafka.done += batch.names
        if end != "known":
            kafka.happened[f"in doubt, {end}"] += 1
            self._error = InDoubtError("the answer was lost")

    def result(self, _: float = 0.0) -> CommitResult | None:
        if not self.is_in_flight:
            return None
        return self._ended(self._error, 0.01, done_ends={0: len(self._kafka.done)})

    def ask(self, starts: Mapping[int, int], sure_s: float = 3.0) -> None:
        # Without a wait: the shard is taken over.
        assert not sure_s or starts[0] >= self._kafka.trimmed, "what was in doubt was trimmed"
        self._is_asked = True

    def answer(self) -> Mapping[int, DoneRead] | None:
        is_asked, self._is_asked = self._is_asked, False
        return {0: self._kafka.read()} if is_asked else None


class Clock:
    """The engine's time, which a run moves on."""

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
        """Begin again, as after a crash: state outside of the journal is forgotten."""
        self.unsettled: list[str] = []
        self.store = OpenStore(self.disk, 1 << 12)
        self.store.open()
        terms = CheckTerms(CheckPolicy(600.0, 600.0, 1), session_s=600.0)
        shard = FileShard(self.store, "simulated", "simulated", terms, self.settle_later, lambda: None)
        everywhere = SimpleNamespace(get=lambda *_: 1 << 31)
        targets = SimpleNamespace(counts=everywhere, were_heard=True, has=lambda *_: True, missing=lambda *_: None)
        pace, left = SimpleNamespace(limit=lambda well_s: well_s), SimpleNamespace(require_few=lambda: None)
        clients = SimpleNamespace(bootstrap_servers=self.kafka, done_topic="done", config={}, rights=None, spans=None)
        clients.targets, clients.pace, clients.left, clients.wake = targets, pace, left, lambda: None
        clients.discarded = DISCARDED
        self.relay = relay.Relay(shard, 0, "simulated", cast("publisher.PublishingClients", clients))

    def submit(self, change: Change, callback: Callable[[Any], None] = lambda _: None) -> None:
        """Write a change, as the store's own thread does."""
        (outcome,) = self.store.write([change])
        callback(outcome)

    def settle_later(self, transaction_ids: Collection[str]) -> None:
        """Settle the published transactions some time later."""
        self.unsettled += transaction_ids

    def begin(self) -> None:
        chance = self.chance
        half = Half(new_id(), "orders", chance.choice(TOPICS), None, None, b"%d" % len(self.halves), (), None)
        order_key = chance.choice((None, b"a", b"b"))
        key = chance.choice((None, b"k")) if order_key is None else None
        self.halves[half.transaction_id] = half = half._replace(order_key=order_key, key=key)
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
        """Make the settlement of published transactions durable."""
        if self.unsettled:
            self.submit(Settled(tuple(self.unsettled)))
            self.unsettled.clear()

    def trim(self) -> None:
        """Sometimes the coordinator trims the done log, settled or not."""
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
        self.settle()
        assert not self.store.published_ids, "what was published is settled in the end"

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
        left = {transaction.transaction_id for transaction in self.pending()} - self.store.published_ids
        assert left == undecided | {name for name in self.first if self.stands_behind(name)}, (
            "what is left is undecided"
        )
        assert self.refused == self.wrong, "each decision that does not count is refused"
        for key in (b"a", b"b"):
            ours = [half.value for half in self.halves.values() if half.order_key == key]
            seen = [value for topic, value in self.kafka.visible if topic != DISCARDED and value in ours]
            assert seen == sorted(seen, key=ours.index), "a later half of a key passed an earlier one"

        for topic in TOPICS:
            committed = [self.halves[name] for name, verdict in self.first.items() if verdict is Verdict.COMMIT]
            ours = [half.value for half in committed if half.key and half.topic == topic]
            assert [value for to, value in self.kafka.visible if to == topic and value in ours] == ours, (
                "one of a key passed another that was decided before"
            )

    def pending(self) -> list[StoredTransaction]:
        """Return the transactions in the store."""
        store = self.store
        return [one for number, _ in store.table if (one := store.peek(number)) is not None]

    def stands_behind(self, name: str) -> bool:
        """Return whether a commit waits for an earlier undecided half of its key."""
        half = self.halves[name]
        if half.order_key is None or self.first[name] is not Verdict.COMMIT:
            return False
        earlier = [value for value in self.halves.values() if value.order_key == half.order_key]
        return any(one.transaction_id not in self.first for one in earlier[: earlier.index(half)])


#: What may happen next, and how often.
MOVES = ((Run.begin, Run.decide, Run.step, Run.settle, Run.trim, Run.close_or_open, Run.open), (5, 6, 8, 2, 2, 1, 1))


def without_clients(patch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Let a relay work on a `Kafka` in memory, which its clients have."""
    patch.setattr(
        relay.Relay, "_slot", lambda self, _, *, is_trial: Slot(self._clients.bootstrap_servers, is_trial=is_trial)
    )
    gate = SimpleNamespace(is_open=True, shut=lambda: None, poll=lambda _: False)
    patch.setattr(engine, "BrokerGate", lambda *_: gate)
    # It takes the servers first, which are Kafka here.
    patch.setattr(relay, "DoneLog", lambda kafka, *_: kafka)
    for module in (relay, engine, trials):
        patch.setattr(module, "time", clock)


def run(seed: int) -> Run:
    """Make the run of a seed."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        without_clients(patch, clock)
        made = Run(seed, clock)
        made.run()
    return made
