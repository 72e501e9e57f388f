"""The clients: fetches, pauses, positions, deliveries, and time."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, Message, TopicPartition
from conformance_worlds import refusal
from memory_tools import Reader, broker_of, offsets

from penstock.clients.cluster import Cluster
from penstock.consumer import ConsumerSettings, handler
from penstock.testing import Operation, TestBroker, TestClock
from support.stepped_workers import WorkedConsumer

T0 = TopicPartition("t", 0)


@pytest.fixture
def memory() -> TestBroker:
    """A broker with the topic `t` of one partition and ten records."""
    return broker_of(records=10)


def test_the_clock_moves_only_when_it_is_moved(memory: TestBroker) -> None:
    clock = memory.clock
    begun, day = clock.monotonic(), clock.time()

    clock.advance(1.5)
    clock.sleep(2)
    clock.sleep(-1)

    assert clock.monotonic() - begun == 3.5
    assert clock.time() - day == 3.5
    with pytest.raises(ValueError, match="does not go back"):
        TestClock().advance(-1)


def test_a_poll_without_a_message_takes_its_timeout(memory: TestBroker) -> None:
    cluster: Cluster = memory
    consumer = cluster.consumer({"group.id": "g", "auto.offset.reset": "latest"})
    consumer.subscribe(["t"])
    begun = memory.clock.monotonic()

    assert consumer.consume(5, 0) == []
    assert memory.clock.monotonic() == begun
    assert consumer.poll(0.25) is None
    assert memory.clock.monotonic() == begun + 0.25
    with pytest.raises(RuntimeError, match="give a timeout"):
        consumer.poll()


def test_a_pause_throws_away_what_was_fetched_and_resuming_reads_it_again(memory: TestBroker) -> None:
    reader = Reader(memory, "t")
    assert offsets(reader.drain(2)) == [0, 1]

    reader.client.pause([T0])
    assert reader.drain() == []
    assert reader.position() == 2
    # What had been fetched is gone: only what the log has now is read again.
    memory.compact("t")
    reader.client.resume([T0])

    assert offsets(reader.drain()) == [2, 4, 5, 6, 7, 8, 9]


def test_what_was_fetched_before_a_change_of_the_log_is_handed_over_all_the_same() -> None:
    seen = False
    for seed in range(20):
        memory = broker_of(records=10, seed=seed)
        reader = Reader(memory, "t")
        assert offsets(reader.drain(2)) == [0, 1]
        memory.compact("t")
        seen = seen or 3 in offsets(reader.drain())

    assert seen, "no fetch of any seed held the record that was removed"


def test_batches_break_at_places_of_the_seed() -> None:
    def sizes(seed: int) -> list[int]:
        reader = Reader(broker_of(3, 300, seed=seed, max_fetch=50), "t")
        found = [len(reader.client.consume(40, 0)) for _ in range(100)]
        assert sum(found) == 300
        return found

    assert sizes(1) == sizes(1)
    assert len({tuple(sizes(seed)) for seed in range(5)}) == 5


def test_a_delivery_is_reported_in_poll_and_fails_on_demand(memory: TestBroker) -> None:
    reports: list[tuple[int | None, int | None]] = []
    producer = memory.producer({})
    memory.fail("produce", KafkaError.MSG_SIZE_TOO_LARGE)
    memory.lose_answer("produce")
    memory.fail("queue", KafkaError._QUEUE_FULL)

    def report(error: KafkaError | None, message: Message) -> None:
        reports.append((error and error.code(), message.offset() if error is None else None))

    with pytest.raises(BufferError):
        producer.produce("t", b"full")
    for value in (b"refused", b"answer lost", b"fine"):
        producer.produce("t", value, key=b"k", headers=[("h", "1")], on_delivery=report)
    producer.produce("nope", b"v", on_delivery=report)
    before = list(reports)
    assert producer.poll(0) == 4
    assert producer.flush(1) == 0

    assert before == []
    assert reports == [
        (KafkaError.MSG_SIZE_TOO_LARGE, None),
        (KafkaError._TRANSPORT, None),
        (None, 11),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, None),
    ]
    assert [message.value() for message in memory.records("t")][10:] == [b"answer lost", b"fine"]
    assert memory.records("t")[-1].headers() == [("h", b"1")]
    assert memory.faults.happened == {Operation.QUEUE: 1, Operation.PRODUCE: 2}


def test_a_delivery_may_be_late_and_a_message_may_come_twice(memory: TestBroker) -> None:
    reports: list[str] = []
    producer = memory.producer({})
    memory.delay_answer("produce", 5)
    producer.produce("t", b"slow", on_delivery=lambda *_: reports.append("slow"))

    assert producer.flush(1) == 1
    assert reports == []
    assert producer.flush(30) == 0
    assert reports == ["slow"]

    memory.repeat_request("produce", 1)
    producer.produce("t", b"twice")
    assert producer.flush(1) == 0
    memory.advance(1)

    assert [message.value() for message in memory.records("t")][10:] == [b"slow", b"twice", b"twice"]


def test_questions_fail_on_demand(memory: TestBroker) -> None:
    reader = Reader(memory)
    memory.fail("committed", KafkaError._TIMED_OUT)
    memory.fail("watermarks", KafkaError._TRANSPORT)

    assert refusal(lambda: reader.client.committed([T0], timeout=1)) == "_TIMED_OUT"
    assert refusal(lambda: reader.client.get_watermark_offsets(T0, timeout=1)) == "_TRANSPORT"
    assert reader.client.get_watermark_offsets(T0) == (0, 10)


def test_the_broker_in_memory_and_a_stepped_consumer_have_all_that_an_engine_calls_on_a_cluster() -> None:
    called = {name for name in vars(Cluster) if not name.startswith("_")}
    stepped = WorkedConsumer("g", {"t": handler(print)}, ConsumerSettings(), TestBroker(), wait=lambda _seconds: None)

    # A thread is one here, too.
    assert {name for name in called if getattr(TestBroker, name) is getattr(Cluster, name)} == {"disposable"}
    assert not [name for name in called if not hasattr(stepped, name)]
