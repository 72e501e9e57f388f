"""Halves near the size limits: each accepted half can be checked, or a warning names it."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from transaction_tools import Bench, unknown

from penstock.errors import HalfNotStoredError
from penstock.transactions import HalfMessage, TransactionalProducer, TransactionState
from waiting import wait_until

#: The client library's default limit, and the broker's.
CLIENT_BYTES, BROKER_BYTES = 1_000_000, 1_048_588


def largest_accepted(producer: TransactionalProducer, topic: str, accepted: int, refused: int) -> list[int]:
    """Send undecided halves of sizes between the two, to the largest that is taken; return the sizes that were."""
    taken = []
    while refused - accepted > 1:
        size = (accepted + refused) // 2
        try:
            producer.send(topic, key=b"k", value=bytes(size), execute=unknown)
        except HalfNotStoredError:
            refused = size
        else:
            accepted = size
            taken.append(size)
    return taken


@pytest.mark.parametrize(
    ("config", "limit"), [({}, CLIENT_BYTES), ({"message.max.bytes": 4 * BROKER_BYTES}, BROKER_BYTES)]
)
def test_the_largest_half_that_is_accepted_is_asked_about(bench: Bench, config: dict[str, object], limit: int) -> None:
    asked: set[int] = set()

    def check(half: HalfMessage) -> TransactionState:
        asked.add(len(half.value or b""))
        return TransactionState.COMMIT

    producer = bench.producer(check=check, config=config)
    sizes = largest_accepted(producer, bench.topic, limit - 1_000, limit)
    bench.await_checkers(1)
    coordinator = bench.coordinator()

    statistics = bench.settled(coordinator, committed=len(sizes))

    assert limit - 500 < max(sizes) < limit
    assert asked == set(sizes)
    assert statistics.no_producer == 0


def test_a_question_that_the_client_library_refuses_is_reported_counted_and_delays_no_other(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    producer = bench.producer(check=lambda _: TransactionState.ROLLBACK)
    large = [producer.send(bench.topic, value=bytes(5_000), execute=unknown).transaction_id for _ in range(2)]
    for number in range(5):
        producer.send(bench.topic, key=b"k", value=b"%d" % number, execute=unknown)

    coordinator = bench.coordinator(config={"message.max.bytes": 2_000}, check_interval=0.2)
    statistics = bench.counted(coordinator, rolled_back=5, no_producer=4)

    assert statistics.pending == 2

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if "cannot be asked about" in record.getMessage()]

    # Each by its name, for that is what it is settled by.
    wait_until(lambda: all(any(name in text for text in warnings()) for name in large))
    assert "message.max.bytes" in warnings()[0]


@pytest.mark.thorough
def test_a_question_that_the_broker_refuses_is_reported(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    entry = ConfigEntry("max.message.bytes", "2000", incremental_operation=AlterConfigOpType.SET)
    checks = ConfigResource(ResourceType.TOPIC, bench.topics.check, incremental_configs=[entry])
    bench.admin.incremental_alter_configs([checks])[checks].result(30)
    producer = bench.producer(check=lambda _: TransactionState.ROLLBACK)
    producer.send(bench.topic, key=b"k", value=bytes(5_000), execute=unknown)
    producer.send(bench.topic, key=b"k", value=b"small", execute=unknown)

    statistics = bench.counted(bench.coordinator(), rolled_back=1, checks=3)

    assert statistics.pending == 1
    assert f"not stored in {bench.topics.check}" in caplog.text
