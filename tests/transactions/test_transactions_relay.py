"""Publication from a store outside Kafka: once, with any event between Kafka and the store."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest
from confluent_kafka import Producer

from kafka_tools import read_all
from penstock import clients
from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.settings import Pace
from penstock.devbroker import DevBroker
from penstock.errors import MessageFormatError
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.queue import Blocking, Delays, ReadyQueue
from penstock.transactions.publishing.publisher import PublishingClients
from penstock.transactions.publishing.targets import cluster_targets
from penstock.transactions.stores.done_log import DoneLog, DoneRead, decode_ids, encode_ids
from penstock.transactions.stores.relay import Relay
from penstock.transactions.stores.shards import ShardBacklog, StoredBatch
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until


class Shard(ShardBacklog):
    """A shard with the transactions of a test."""

    def __init__(self, claim: Sequence[str] = ()) -> None:
        self.queue = ReadyQueue(Delays(), lambda _: None)
        self.ready: list[Pending] = []
        self.published: list[str] = []
        self.claim = list(claim)

    def may_open(self, claim: Sequence[str]) -> bool:
        self.claim = list(claim)
        return True

    def claimed(self) -> Sequence[str]:
        return self.claim

    def next_batch(self, limit: int, blocking: Blocking, room_bytes: int) -> StoredBatch | None:  # noqa: ARG002 - all goes at once
        taken, self.ready = self.ready, []
        return StoredBatch(taken, is_watched=True) if taken else None

    def trial(self, waiting: Sequence[Pending], fits: object) -> None:  # noqa: ARG002 - as it is called
        raise AssertionError(f"nothing is refused: {waiting}")

    def _taken_over(self, names: Sequence[str]) -> None:
        self.published += names

    def _published(self, some: Sequence[Pending]) -> None:
        self.published += ids(some)

    def _given_back(self, some: Sequence[Pending]) -> None:
        self.ready += some


class Bench:
    """A topic, a done log with two partitions, and relays of its shards."""

    def __init__(self, broker: DevBroker, topic: str, stack: ExitStack) -> None:
        self.servers = broker.bootstrap_servers
        self.topic = topic
        self.done = f"done.{topic}"
        self._stack = stack
        broker.create_topic(self.done, 2)

    def relay(self, shard: Shard, number: int = 0) -> Relay:
        """Return a relay that has taken its shard over."""
        rights = MissingRights({})
        targets = cluster_targets(clients.admin(self.servers, {}), self.topic, rights)
        targets.look(0.0)
        parts = PublishingClients(
            self.servers,
            {},
            self.done,
            "d",
            ids_begin=self.topic,
            rights=rights,
            pace=Pace(),
            targets=targets,
            left=LeftBehind("a test"),
        )
        made = Relay(shard, number, f"{self.topic}.{number}", parts)
        self._stack.callback(made.close)
        wait_until(lambda: made.step() | made.is_ready and made.is_ready)
        return made

    def publish(self, relay: Relay, shard: Shard, *entries: Pending) -> None:
        """Put transactions into a shard, and wait until they are settled."""
        shard.ready += entries
        wait_until(lambda: relay.step() and set(ids(entries)) <= set(shard.published))

    def entry(self, text: str) -> Pending:
        pending = Pending(Half(new_id(), "orders", self.topic, None, None, text.encode(), (("h", b"1"),), None), 0)
        pending.verdict = Verdict.COMMIT
        return pending

    def visible(self) -> list[str]:
        return [(message.value() or b"").decode() for message in read_all(self.servers, self.topic)]


@pytest.fixture
def bench(broker: DevBroker, new_topic: Callable[..., str]) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(broker, new_topic(), stack)


def ids(entries: Sequence[Pending]) -> list[str]:
    return [entry.transaction_id for entry in entries]


def test_what_is_published_is_visible_once_and_known_to_the_next_owner_until_it_is_trimmed(bench: Bench) -> None:
    first, entries = Shard(), [bench.entry(f"{number}") for number in range(5)]
    relay = bench.relay(first)
    bench.publish(relay, first, *entries)

    assert relay.engine.groups == 1
    assert bench.visible() == ["0", "1", "2", "3", "4"]
    second, other = Shard(), Shard()
    successor = bench.relay(second)
    bench.relay(other, 1)
    assert sorted(second.published) == sorted(ids(entries))
    assert other.published == []

    bench.publish(successor, second, bench.entry("5"))
    successor.trim()
    wait_until(lambda: DoneLog(bench.servers, {}, bench.done, 0, MissingRights({})).read().ids == frozenset())
    assert bench.visible() == ["0", "1", "2", "3", "4", "5"]


def test_who_was_thought_dead_publishes_nothing_more(bench: Bench) -> None:
    first, second = Shard(), Shard()
    old = bench.relay(first)
    new = bench.relay(second)

    first.ready.append(bench.entry("late"))
    wait_until(lambda: old.step() and not old.engine.is_busy)
    bench.publish(new, second, bench.entry("new"))

    assert first.published == []
    assert bench.visible() == ["new"]


@pytest.mark.parametrize("claim", [(), ("another",)])
def test_a_predecessor_that_died_in_its_transaction_is_ended_by_its_successor(
    bench: Bench, claim: Sequence[str]
) -> None:
    """The same for a predecessor with an id that only the store knows."""
    name = claim[0] if claim else f"{bench.topic}.0.a"
    dying = Producer({"bootstrap.servers": bench.servers, "transactional.id": name, "transaction.timeout.ms": 600_000})
    dying.init_transactions(60)
    dying.begin_transaction()
    dying.produce(bench.topic, b"never")
    dying.produce(bench.done, encode_ids([new_id()]), partition=0)
    assert dying.flush(60) == 0

    shard = Shard(claim)
    bench.publish(bench.relay(shard), shard, bench.entry("next"))

    assert bench.visible() == ["next"]


def test_a_done_log_that_is_not_read_in_time_is_read_again_before_anything_is_published(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, late = DoneLog.read, [TimeoutError("not read in time")]

    def slow(self: DoneLog) -> DoneRead:
        if late:
            raise late.pop()
        return read(self)

    monkeypatch.setattr(DoneLog, "read", slow)
    shard = Shard()
    bench.publish(bench.relay(shard), shard, bench.entry("once"))

    assert not late
    assert bench.visible() == ["once"]


def test_a_done_log_reads_what_it_wrote_and_ignores_what_others_did(bench: Bench) -> None:
    some = [new_id() for _ in range(3)]
    assert decode_ids(encode_ids(some)) == some
    for forged in (
        None,
        b"",
        b"\x01",
        b"\x02" + encode_ids(some)[1:],
        encode_ids(some) + b"x",
        struct.pack(">BI", 1, 9),
    ):
        with pytest.raises(MessageFormatError):
            decode_ids(forged)
    producer = Producer({"bootstrap.servers": bench.servers})
    producer.produce(bench.done, b"forged", partition=0)
    producer.produce(bench.done, encode_ids(some), partition=0)
    assert producer.flush(60) == 0

    assert DoneLog(bench.servers, {}, bench.done, 0, MissingRights({})).read().ids == set(some)
