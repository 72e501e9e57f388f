"""Publication from a store outside Kafka: once, whatever happens between Kafka and the store."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from confluent_kafka import Producer

from kafka_proxy import END_TXN, KafkaProxy, What
from kafka_tools import read_all
from penstock.clients.rights import transactional_right
from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.devbroker import DevBroker
from penstock.errors import MessageFormatError
from penstock.transactions.stores.relay.outbound.done_log import (
    DoneLog,
    create_done_log,
    decode_ids,
    decode_numbers,
    encode_ids,
    encode_numbers,
)
from penstock.transactions.stores.relay.outbound.outbound import InDoubtError, Outbound
from penstock.transactions.stores.relay.outbound.writer_pool import WriterPool
from penstock.transactions.stores.relay.publishable import OutboundMessage, Publishable
from penstock.transactions.wire.ids import new_id
from waiting import wait_until


class Bench:
    """A topic, a done log with two partitions, and publishers of its shards."""

    def __init__(self, servers: str, topic: str, stack: ExitStack) -> None:
        self.servers = servers
        self.topic = topic
        self.done = f"done.{topic}"
        self._stack = stack
        create_done_log(servers, {}, self.done, 2)

    def outbound(
        self, shard: int = 0, servers: str | None = None, *, apart: bool = False, **config: object
    ) -> Outbound:
        log = DoneLog(servers or self.servers, config, self.done, shard)
        name = f"{self.topic}.{shard}{'.q' if apart else ''}"
        made = Outbound(servers or self.servers, config, transactional_id=name, done=log, apart=apart)
        self._stack.callback(made.close)
        return made

    def done_log(self, shard: int = 0) -> DoneLog:
        return DoneLog(self.servers, {}, self.done, shard)

    def pool(self) -> WriterPool:
        made = WriterPool(
            self.servers,
            {},
            name=f"{self.topic}.0",
            done=self.done_log(),
            ids_right=transactional_right(self.topic),
            rights=MissingRights({}),
            apart=False,
            step=lambda _: None,
        )
        self._stack.callback(made.close)
        return made

    def entry(self, text: str, *, topic: str | None = None, key: bytes | None = None) -> Publishable:
        message = OutboundMessage(topic or self.topic, None, key, text.encode(), (("h", b"1"),))
        return Publishable(new_id(), [message], None if key is None else ("g", key))

    def visible(self, topic: str | None = None) -> list[str]:
        return [(message.value() or b"").decode() for message in read_all(self.servers, topic or self.topic)]

    def records_in_done(self) -> int:
        return len(read_all(self.servers, self.done))


@pytest.fixture
def bench(broker: DevBroker, new_topic: Callable[..., str]) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(broker.bootstrap_servers, new_topic(), stack)


def ids(entries: list[Publishable]) -> list[str]:
    return [entry.transaction_id for entry in entries]


def test_what_is_published_is_visible_once_and_told_to_the_next_owner_until_it_is_forgotten(bench: Bench) -> None:
    first = bench.outbound()
    assert first.open() == frozenset()
    entries = [bench.entry(f"{n}") for n in range(5)]
    outcome = first.publish(entries)

    assert outcome.published == ids(entries)
    assert (outcome.refused, outcome.held) == ({}, [])
    assert first.groups == 1
    assert bench.visible() == ["0", "1", "2", "3", "4"]
    second, other = bench.outbound(), bench.outbound(shard=1)
    assert second.open() == set(ids(entries))
    assert other.open() == frozenset()

    more = bench.entry("5")
    second.publish([more])
    second.forget()
    wait_until(lambda: bench.outbound().open() == frozenset())
    assert bench.visible() == ["0", "1", "2", "3", "4", "5"]


# A producer that is known to have failed is not asked to abort when it is closed: the library warns where that fails.
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_who_was_thought_dead_publishes_nothing_more(bench: Bench) -> None:
    old, new = bench.outbound(), bench.outbound()
    old.open()
    old.publish([bench.entry("old")])
    new.open()

    with pytest.raises(InDoubtError):
        old.publish([bench.entry("late")])

    assert not old.is_open
    assert new.publish([bench.entry("new")]).published
    assert bench.visible() == ["old", "new"]


def test_a_predecessor_that_died_in_its_transaction_is_ended_by_its_successor(bench: Bench) -> None:
    dying = Producer({"bootstrap.servers": bench.servers, "transactional.id": f"{bench.topic}.0"})
    dying.init_transactions(60)
    dying.begin_transaction()
    dying.produce(bench.topic, b"never")
    dying.produce(bench.done, encode_ids([new_id()]), partition=0)
    assert dying.flush(60) == 0

    successor = bench.outbound()
    assert successor.open() == frozenset()
    successor.publish([bench.entry("next")])

    assert bench.visible() == ["next"]


@pytest.mark.parametrize("what", [What.CUT_AFTER, What.CUT_BEFORE])
def test_what_the_broker_said_is_committed_is_published_and_its_producer_is_of_no_use_any_more(
    bench: Bench, what: What
) -> None:
    with KafkaProxy(bench.servers) as proxy:
        outbound = bench.outbound(servers=proxy.bootstrap_servers)
        outbound.open()
        entry = bench.entry("once")

        with proxy.fault(END_TXN, what):
            outcome = outbound.publish([entry])

        assert (outcome.published, outcome.is_spent) == ([entry.transaction_id], True)
        assert entry.transaction_id in outbound.open()
        assert bench.visible() == ["once"]


@pytest.mark.parametrize("what", [What.DROP_ANSWER, What.DROP_REQUEST])
def test_an_end_in_doubt_is_settled_by_what_done_holds(bench: Bench, what: What) -> None:
    with KafkaProxy(bench.servers) as proxy:
        outbound = bench.outbound(servers=proxy.bootstrap_servers)
        outbound.open()
        entry = bench.entry("once")

        with proxy.fault(END_TXN, what), pytest.raises(InDoubtError):
            outbound.publish([entry])

        if entry.transaction_id not in outbound.open():
            outbound.publish([entry])
        assert bench.visible() == ["once"]


def test_a_message_that_is_too_large_sets_its_topic_apart_and_is_alone_refused_there(
    bench: Bench, new_topic: Callable[..., str]
) -> None:
    small = new_topic(config={"max.message.bytes": "2000"})
    together, apart = bench.outbound(**{"compression.type": "none"}), bench.outbound(apart=True)
    together.open()
    apart.open()
    entries = [bench.entry(f"{n}", topic=small) for n in range(20)]
    entries[13] = bench.entry("x" * 5000, topic=small)
    others = [bench.entry(f"{n}") for n in range(20)]

    first = together.publish([entry for pair in zip(entries, others, strict=True) for entry in pair])
    second = apart.publish([entry for entry in entries if entry.transaction_id in first.refused])

    assert first.published == ids(others)
    assert set(first.refused) == set(ids(entries))
    assert [(topic, fault.whole) for topic, fault in first.faults.items()] == [(small, False)]
    good = [entry for n, entry in enumerate(entries) if n != 13]
    assert list(second.refused) == [entries[13].transaction_id]
    assert "MSG_SIZE_TOO_LARGE" in second.refused[entries[13].transaction_id]
    assert second.faults == {}
    assert second.published == ids(good)
    assert second.held == []
    assert bench.visible(small) == [f"{n}" for n in range(20) if n != 13]
    # Of what was aborted, readers of the done log were never held back: it was not written. One record is that of the
    # transactional id that took the place of the one that failed.
    assert bench.records_in_done() == 3


def test_who_lost_the_claim_to_a_successor_adds_no_transactional_id(bench: Bench) -> None:
    pools = [bench.pool(), bench.pool()]
    pools[0].open()
    pools[0].drop()
    pools[0].refill()
    assert bench.done_log().announced() == (range(2, 5), 0)
    pools[1].open()
    pools[0].drop()

    with pytest.raises(UnknownEndError):
        pools[0].refill()

    # The successor goes on.
    pools[1].drop()
    pools[1].refill()
    numbers, _ = bench.done_log().announced() or (None, 0)
    assert numbers == range(3, 6)


def test_numbers_of_transactional_ids_are_read_as_they_were_written_and_nothing_else_is() -> None:
    assert decode_numbers(encode_numbers(range(4, 7))) == range(4, 7)
    for other in (
        None,
        b"",
        encode_ids([]),
        encode_numbers(range(4, 7)) + b"x",
        b"\x01" + encode_numbers(range(4, 7))[1:],
        encode_numbers(range(3)),
        encode_numbers(range(7, 7)),
        encode_numbers(range(1, 1_000_000)),
    ):
        assert decode_numbers(other) is None


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

    assert bench.outbound().open() == set(some)
