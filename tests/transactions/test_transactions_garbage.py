"""Garbage of every kind in all topics of a store, among transactions that are real: a short chaos (I7, I10)."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer
from fuzz_child import changed, done_records, halves, headers_changed, op_records
from transaction_tools import Bench, child, line_of

from penstock.transactions import HalfMessage, TransactionState
from penstock.transactions.stores.kafka.administration import KafkaAdministration
from penstock.transactions.wire.half import (
    RESERVED_PREFIX,
    TX,
    CheckRequest,
    encode_check_request,
    encode_discarded,
    encode_half,
)
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict, encode_ops
from raw_produce import produce_raw
from waiting import wait_until

#: Real transactions, and records of garbage for each log.
REAL = 150
GARBAGE = 200


def unreadable_op(chance: random.Random) -> bytes:
    """Return a batch of decisions, one with an invalid verdict. It crashed CPython 3.11."""
    record = bytearray(encode_ops([Op(new_id(), Verdict.COMMIT, Author.PRODUCER, "orders", 0, (7,), 0)] * 20))
    record[-12 - 28 * chance.randrange(20)] = 77
    return bytes(record)


def garbage(bench: Bench, seed: int) -> Iterator[None]:
    """Write garbage into half, op, done, check and discarded logs, a record of each kind at a time."""
    chance = random.Random(seed)  # noqa: S311 - the same garbage for the same seed
    producer = Producer({"bootstrap.servers": bench.servers, "linger.ms": 5})
    topics = bench.topics
    kinds = [
        # No half may reach the target, so its transaction is never the last thing that a header changes.
        (topics.half, [encode_half(half._replace(headers=())) for half in halves()]),
        (topics.check, [encode_check_request(CheckRequest(half, 1, 7, 3)) for half in halves()]),
        (topics.discarded, [encode_discarded(half, "checks exhausted", 15) for half in halves()]),
    ]
    for _ in range(GARBAGE):
        number = chance.randrange(topics.partitions)
        for topic, corpus in kinds:
            headers = headers_changed(chance, chance.choice(corpus), [RESERVED_PREFIX + "x", TX])
            if topic == topics.half:
                # It does not read for certain: what did would be a half of its own, and be pending.
                headers.append((RESERVED_PREFIX + "x", b""))
            size = sum(len(name) + len(content or b"") for name, content in headers)
            partition = number if topic == topics.half else 0
            if size < 200_000:
                producer.produce(topic, chance.randbytes(9), b"k", partition, headers=headers)
        ops = chance.choice((unreadable_op(chance), changed(chance, op_records())))
        producer.produce(topics.op, ops, None, number)
        producer.produce(topics.done, changed(chance, done_records()), None, number)
        producer.poll(0)
        yield
    assert producer.flush(60) == 0
    for topic in (topics.half, topics.op, topics.done, topics.check, topics.discarded):
        produce_raw(bench.servers, topic, [(b"k", [(b"\xff\xfe", b"v"), (TX.encode(), b"x")])])


def commit(_: HalfMessage) -> TransactionState:
    return TransactionState.COMMIT


def test_garbage_in_every_log_among_real_transactions_costs_none_of_them_and_no_coordinator(bench: Bench) -> None:
    real = [b"%d" % number for number in range(REAL)]
    with child("coordinator_child.py", bench.servers, bench.topics.prefix, "never") as coordinator:
        assert line_of(coordinator) == "started"
        producer = bench.producer(check=commit)
        noise = threading.Thread(target=lambda: list(garbage(bench, 1)), name="garbage")
        noise.start()
        for value in real:
            producer.send(bench.topic, key=value[-1:], value=value)
        noise.join()
        wait_until(lambda: len(bench.visible()) >= REAL, timeout=90)
        # One more gets through behind all of it, and the process lives.
        producer.send(bench.topic, value=b"last", wait="published")
        assert coordinator.poll() is None

    assert Counter(value for _, value in bench.visible()) == Counter([*real, b"last"])


@pytest.mark.thorough
def test_a_coordinator_starts_on_logs_full_of_garbage_and_counts_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    producer = bench.producer(check=commit)
    noise = garbage(bench, 2)
    for number in range(50):
        next(noise)
        producer.send(bench.topic, value=b"%d" % number)
    for _ in noise:
        pass
    with KafkaAdministration(bench.servers, bench.topics.prefix) as store:
        listed = [transaction.transaction_id for transaction in store.pending()]
        assert len(store.discarded()) < GARBAGE

    for restart in range(2):
        coordinator = bench.coordinator()
        if not restart:
            # Half and op records that do not read; of the done ones, too, and what they claim that is not true.
            bench.counted(coordinator, timeout=90, committed=50, forged=2 * GARBAGE)
        producer.send(bench.topic, value=b"again %d" % restart, wait="published")
        coordinator.stop()

    assert len(listed) >= 50
    expected = [*(b"%d" % number for number in range(50)), b"again 0", b"again 1"]
    found = Counter(value for _, value in bench.visible())
    assert {value: found[value] for value in expected} == dict.fromkeys(expected, 1)
    assert any("refused" in line for line in caplog.messages)
