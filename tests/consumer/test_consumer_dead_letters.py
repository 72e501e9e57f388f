"""Dead letters that cannot be written, are too many, or too large: what is held, what goes on, what stops."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from kafka_tools import committed, produce, read_all
from penstock.app import App
from penstock.clients.requests.topics import TopicSpec, ensure_topics
from penstock.consumer import ConsumerSettings, DeadLetterLimit, LitePushConsumer, handler, retry
from penstock.consumer.assignments import Assignment, Fetch
from penstock.consumer.failures import dead_letter_publisher as publisher_module
from penstock.consumer.failures.dead_letter_publisher import DeadLetterPublisher, ExhaustedMessage
from penstock.consumer.failures.limits import DeadLetterLimits
from penstock.consumer.failures.timers import Timers
from penstock.consumer.handlers.options.ordering import Keyless, Order, Ordering
from penstock.consumer.handlers.route import Route
from penstock.consumer.publishing.outlet import ProducerOutlet
from penstock.devbroker import DevBroker
from penstock.errors import PenstockError
from penstock.message import FixedRecord, Message
from penstock.testing import TestApp
from waiting import wait_until

NewTopic = Callable[..., str]

#: Bytes of a large message.
LARGE = 10_000_000


class PoisonError(Exception):
    """What the poison message raises."""


def consumer_of(
    broker: DevBroker, topic: str, function: Callable[[Message], object], **settings: object
) -> LitePushConsumer:
    return LitePushConsumer(
        f"g-{topic}",
        {topic: handler(function, retry_policy=retry(attempts=1), on_failure="dead_letter")},
        bootstrap_servers=broker.bootstrap_servers,
        settings=ConsumerSettings(**{"workers": 4, "commit_interval": 0.1, **settings}),
    )


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (DeadLetterLimit(consecutive=3), (3, "3 messages were given up in a row")),
        (
            DeadLetterLimit(ratio=0.5, at_least=5),
            (4, "4 of 4 messages were given up, and the limit is 0.5"),
        ),
    ],
)
def test_a_limit_stops_the_consumer_in_order_though_more_dead_letters_wait_and_keeps_their_offsets(
    broker: DevBroker, new_topic: NewTopic, admin: AdminClient, limit: DeadLetterLimit, expected: tuple[int, str]
) -> None:
    written, says = expected
    topic = new_topic()
    group = f"g-{topic}"
    produce(broker.bootstrap_servers, topic, [(b"k%d" % i, b"poison") for i in range(40)])

    def function(message: Message) -> None:
        raise PoisonError

    consumer = consumer_of(broker, topic, function, dead_letter_limit=limit).start()
    with pytest.raises(PenstockError, match=says):
        wait_until(consumer.wait)
    with pytest.raises(PenstockError, match=says):
        consumer.stop()

    # It left the group as it should: another member need not wait for its session to end.
    left = admin.describe_consumer_groups([group], request_timeout=30)[group].result(30)
    letters = read_all(broker.bootstrap_servers, f"dlq.{topic}")
    at = committed(broker.bootstrap_servers, group, topic, 1)[0]
    assert left.members == []
    assert len(letters) == written
    assert consumer.statistics().dead_letters <= written
    assert at.offset <= written


def test_a_limit_stops_a_consumer_that_drops_everything_and_keeps_the_offset(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k%d" % i, b"poison") for i in range(200)])

    def function(message: Message) -> None:
        raise PoisonError

    consumer = LitePushConsumer(
        f"g-{topic}",
        {topic: handler(function, retry_policy=retry(attempts=1), on_failure="drop")},
        bootstrap_servers=broker.bootstrap_servers,
        settings=ConsumerSettings(workers=4, dead_letter_limit=DeadLetterLimit(consecutive=3)),
    ).start()
    with pytest.raises(PenstockError, match=r"3 messages were given up in a row .* is not given up") as stopped:
        wait_until(consumer.wait)
    with pytest.raises(PenstockError):
        consumer.stop()

    assert isinstance(stopped.value.__cause__, PoisonError)
    assert consumer.statistics().dropped == 3
    assert committed(broker.bootstrap_servers, f"g-{topic}", topic, 1)[0].offset <= 3


def test_a_message_handled_in_between_begins_the_count_of_dead_letters_anew(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"poison" if i % 3 else b"fine") for i in range(30)])

    def function(message: Message) -> None:
        if message.value == b"poison":
            raise PoisonError

    with consumer_of(broker, topic, function, dead_letter_limit=DeadLetterLimit(consecutive=2)) as consumer:
        wait_until(lambda: consumer.statistics().dead_letters == 20)
        wait_until(lambda: consumer.statistics().handled == 10)


class BrokenProducer:
    """Refuses the first so many messages."""

    def __init__(self, refuses: int) -> None:
        self.refused = 0
        self.written = 0
        self._refuses = refuses

    def produce(self, *_message: object, **options: object) -> None:
        if self.refused < self._refuses:
            self.refused += 1
            raise KafkaException(KafkaError(KafkaError._QUEUE_FULL))
        self.written += 1
        options["on_delivery"](None, None)  # type: ignore[operator] # given by the dead-letter publisher

    def poll(self, *_timeout: float) -> int:
        return 0

    def flush(self, *_timeout: float) -> int:
        return 0


class FixedClock:
    """A clock that is moved by hand."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def exhausted(count: int, on_done: Callable[[], None] = lambda: None) -> Sequence[ExhaustedMessage]:
    def function(message: Message) -> None:
        raise AssertionError

    route = Route(handler(function, on_failure="dead_letter"), Ordering(Order.KEY, Keyless.PARTITION, 1), function)
    assignment = Assignment("t", 0, route, start=0)
    fetch = Fetch(assignment, assignment.tracker.register(range(count)), 0.0)
    records = [FixedRecord("t", 0, offset, b"k%d" % offset, b"v", (), None) for offset in range(count)]
    return [
        ExhaustedMessage((fetch, place, one), PoisonError(), 1, None, lambda: None, on_done, pytest.fail)
        for place, one in enumerate(records)
    ]


def test_a_dead_letter_that_is_sent_again_and_again_counts_once_against_the_limit() -> None:
    clock, timers, durable = FixedClock(), Timers(), []
    producer = BrokenProducer(refuses=6)
    publisher = DeadLetterPublisher(
        "g", clock, timers, DeadLetterLimits(DeadLetterLimit(consecutive=2), lambda: 0), fail=pytest.fail
    )
    publisher.connect(ProducerOutlet(lambda: producer))
    for one in exhausted(2, lambda: durable.append(clock.now)):
        publisher.publish(one)

    for _ in range(4):
        publisher.serve()
        clock.now += publisher_module.RESEND_AFTER_S
        timers.serve(clock.now)
    publisher.serve()

    assert producer.refused == 6
    assert len(durable) == 2
    assert publisher.unwritten == 0


def test_nothing_more_is_sent_once_the_loop_has_ended() -> None:
    producer = BrokenProducer(refuses=0)
    publisher = DeadLetterPublisher(
        "g", FixedClock(), Timers(), DeadLetterLimits(DeadLetterLimit(consecutive=1), lambda: 0), fail=pytest.fail
    )
    publisher.connect(ProducerOutlet(lambda: producer))
    for one in exhausted(3):
        publisher.publish(one)
    with pytest.raises(PenstockError, match="in a row"):
        publisher.serve()

    publisher.flush(1.0)

    assert producer.written == 1


def test_a_dead_letter_topic_that_is_gone_holds_its_keys_and_nothing_else_until_it_is_back(
    broker: DevBroker, new_topic: NewTopic, admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "RESEND_AFTER_S", 0.3)
    topic = new_topic()
    letters = f"dlq.{topic}"
    handled: list[bytes | None] = []

    def function(message: Message) -> None:
        if message.value == b"poison":
            raise PoisonError
        handled.append(message.value)

    config = {"message.timeout.ms": 1000, "topic.metadata.refresh.interval.ms": 300}
    with consumer_of(broker, topic, function, config=config) as consumer:
        wait_until(lambda: consumer.statistics().partitions)
        for future in admin.delete_topics([letters]).values():
            future.result()
        wait_until(lambda: letters not in admin.list_topics(timeout=30).topics)
        produce(broker.bootstrap_servers, topic, [(b"bad", b"poison"), (b"bad", b"behind")])
        produce(broker.bootstrap_servers, topic, [(b"good%d" % i, b"fine") for i in range(20)])
        wait_until(lambda: consumer.statistics().dead_letter_failures >= 2, timeout=60)
        wait_until(lambda: len(handled) == 20)
        held = consumer.statistics()
        (said,) = consumer.explain()
        ensure_topics(admin, broker.bootstrap_servers, [TopicSpec(letters, 1)])
        wait_until(lambda: consumer.statistics().dead_letters == 1, timeout=60)
        wait_until(lambda: b"behind" in handled)

    assert (held.partitions[0].watermark, held.partitions[0].in_flight, held.dead_letters) == (0, 2, 0)
    assert (said.state, said.blocking_offset, said.key, said.attempt) == ("dead letter", 0, b"bad", 1)
    assert f"it cannot be written to {letters}: " in str(said)
    assert len(read_all(broker.bootstrap_servers, letters)) == 1
    assert committed(broker.bootstrap_servers, f"g-{topic}", topic, 1)[0].offset == 22


def test_a_message_of_ten_megabytes_is_handled_and_one_is_written_as_a_dead_letter(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    limit = 2 * LARGE
    topic = new_topic(config={"max.message.bytes": str(limit)})
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "message.max.bytes": 2 * limit, "enable.idempotence": True}
    )
    # As large as the topic allows, save for what surrounds a record: with our headers it is larger.
    nearly = b"p" + os.urandom(limit - 500)
    compressed = Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "message.max.bytes": 4 * limit, "compression.type": "zstd"}
    )
    producer.produce(topic, b"f" * LARGE, key=b"fine")
    producer.produce(topic, nearly, key=b"bad")
    compressed.produce(topic, b"p" * (2 * limit), key=b"compressed")
    assert producer.flush(60) == compressed.flush(60) == 0
    sizes: list[int] = []

    def function(message: Message) -> None:
        value = message.value or b""
        if value.startswith(b"p"):
            raise PoisonError
        sizes.append(len(value))

    with consumer_of(broker, topic, function) as consumer:
        wait_until(lambda: sizes == [LARGE] and consumer.statistics().dead_letters == 2, timeout=90)
        failures = consumer.statistics().dead_letter_failures

    assert failures == 0
    assert committed(broker.bootstrap_servers, f"g-{topic}", topic, 1)[0].offset == 3


def test_a_dead_letter_that_its_topic_does_not_take_with_what_we_add_sheds_it(caplog: pytest.LogCaptureFixture) -> None:
    for refusals, has_stack, text in ((0, True, 1000), (1, False, 1000), (2, False, 64)):
        app = App("app", bootstrap_servers="memory:0")

        @app.handler("t", retry=retry(attempts=1), on_failure="dead_letter")
        def fail(_message: Message) -> None:
            raise PoisonError("x" * 1000)

        with TestApp(app) as test:
            test.broker.fail("produce", KafkaError.MSG_SIZE_TOO_LARGE, times=refusals)
            test.send("t", "value", key="k", headers=[("own", "kept")])
            test.settle()
            (letter,) = test.dead_letters("t")

        assert (letter.value, letter.key, letter.header("own")) == (b"value", b"k", b"kept")
        assert letter.header("__dlq.errors.offset") == b"0"
        assert (letter.header("penstock-exception-stack") is not None) == has_stack
        assert len(letter.header("__dlq.errors.message") or b"") == text
    assert "is written without the stack and most of the texts" in caplog.text


@pytest.mark.parametrize(
    ("code", "refusals"), [(KafkaError.MSG_SIZE_TOO_LARGE, 3), (KafkaError.INVALID_RECORD, 1)], ids=["large", "invalid"]
)
def test_a_dead_letter_that_no_topic_takes_stops_the_consumer_and_keeps_the_offset(code: int, refusals: int) -> None:
    app = App("app", bootstrap_servers="memory:0")

    @app.handler("t", retry=retry(attempts=1), on_failure="dead_letter")
    def fail(_message: Message) -> None:
        raise PoisonError

    with TestApp(app) as test:
        test.broker.fail("produce", code, times=refusals)
        test.send("t", "value")
        with pytest.raises(PenstockError, match=r"dlq\.t does not take it, without what we add either"):
            test.settle()

    assert test.committed("t").get(0, 0) == 0


@pytest.mark.parametrize("on_failure", ["dead_letter", "drop"])
def test_what_no_retry_topic_takes_is_given_up_at_once(on_failure: str) -> None:
    app = App("app", bootstrap_servers="memory:0")

    @app.handler("t", retry=retry(attempts=1), retry_delays=(60,), on_failure=on_failure)
    def fail(_message: Message) -> None:
        raise PoisonError

    with TestApp(app) as test:
        test.broker.fail("produce", KafkaError.MSG_SIZE_TOO_LARGE)
        test.send("t", "value")
        test.settle()
        now = test.statistics()
        test.advance(2)

        assert (now.retry_topic, now.dead_letters, now.dropped) == (
            (0, 1, 0) if on_failure == "dead_letter" else (0, 0, 1)
        )
        assert test.committed("t") == {0: 1}
