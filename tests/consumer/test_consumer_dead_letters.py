"""Dead letters that cannot be written, are too many, or too large: what waits, what goes on, what stops."""

from __future__ import annotations

import os

import pytest
from confluent_kafka import KafkaError, Producer

from kafka_tools import committed
from penstock.consumer import DeadLetterLimit, Handler, handler
from penstock.devbroker import DevBroker
from penstock.errors import PenstockError
from penstock.message import Message
from penstock.testing import TestApp
from support.consumers import ONCE, Handled, NewTopic, PoisonError, app_of, consumer_of, group_of
from waiting import wait_until

#: Bytes of a large message.
LARGE = 10_000_000


def lettering(function: object) -> Handler:
    """Return a handler whose failures become dead letters at once."""
    return handler(function, retry=ONCE, on_failure="dead_letter")  # type: ignore[arg-type] # the tests' own


@pytest.mark.parametrize(
    ("limit", "written", "says"),
    [
        (DeadLetterLimit(consecutive=3), 3, "3 messages were given up in a row"),
        (DeadLetterLimit(ratio=0.5, at_least=5), 4, "4 of 4 messages were given up, and the limit is 0.5"),
    ],
)
@pytest.mark.parametrize("on_failure", ["dead_letter", "drop"])
def test_a_limit_stops_the_app_though_more_dead_letters_wait_and_keeps_their_offsets(
    on_failure: str, limit: DeadLetterLimit, written: int, says: str
) -> None:
    app = app_of(dead_letter_limit=limit)
    app.handler("t", retry=ONCE, on_failure=on_failure)(Handled())

    with TestApp(app) as test:
        for number in range(40):
            test.send("t", "poison", key=str(number))
        with pytest.raises(PenstockError, match=says) as stopped:
            test.settle()
        # It left the group as it should.
        members = test.broker.members("app")

    assert isinstance(stopped.value.__cause__, PoisonError)
    assert members == {}
    if on_failure == "dead_letter":
        assert len(test.dead_letters("t")) == written
    assert test.committed("t").get(0, 0) <= written


def test_a_message_handled_in_between_begins_the_count_of_dead_letters_again_and_a_resend_counts_once() -> None:
    app = app_of(dead_letter_limit=DeadLetterLimit(consecutive=3))
    app.handler("t", retry=ONCE, on_failure="dead_letter")(Handled())

    with TestApp(app) as test:
        test.broker.fail("produce", KafkaError._MSG_TIMED_OUT, times=6)
        for number in range(30):
            test.send("t", "poison" if number % 3 else "fine", key="k")
        test.advance(600)
        now = test.statistics()

    assert (now.dead_letters, now.handled, now.dead_letter_failures) == (20, 10, 6)


def test_a_dead_letter_topic_that_is_gone_holds_its_keys_and_nothing_else_until_it_is_back() -> None:
    app, handled = app_of(), Handled()
    app.handler("t", retry=ONCE, on_failure="dead_letter")(handled)

    with TestApp(app) as test:
        test.settle()
        test.broker.delete_topic("dlq.t")
        for value, key in (("poison", "bad"), ("behind", "bad"), *((f"fine {number}", "good") for number in range(20))):
            test.send("t", value, key=key)
        test.advance(11)
        held, (said,), done = test.statistics(), test.explain(), list(handled.done)
        test.broker.create_topic("dlq.t")
        test.advance(6)
        letters, committed_at = test.dead_letters("t"), test.committed("t")

    assert len(done) == 20
    assert (held.partitions[0].watermark, held.partitions[0].in_flight, held.dead_letter_failures) == (0, 2, 3)
    assert (said.state, said.blocking_offset, said.key, said.attempt) == ("dead letter", 0, b"bad", 1)
    assert "it cannot be written to dlq.t: " in str(said)
    assert ([letter.value for letter in letters], committed_at) == ([b"poison"], {0: 22})


def test_a_message_of_ten_megabytes_is_handled_and_one_is_written_as_a_dead_letter(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    limit = 2 * LARGE
    topic = new_topic(config={"max.message.bytes": str(limit)})
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "message.max.bytes": 2 * limit, "enable.idempotence": True}
    )
    # As large as the topic allows, without the record's frame: with our headers it is larger.
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

    with consumer_of(broker, {topic: lettering(function)}) as consumer:
        wait_until(lambda: sizes == [LARGE] and consumer.statistics().dead_letters == 2, timeout=90)
        failures = consumer.statistics().dead_letter_failures

    assert failures == 0
    assert committed(broker.bootstrap_servers, group_of(topic), topic, 1)[0].offset == 3


def test_a_dead_letter_that_its_topic_does_not_take_with_what_we_add_sheds_it(caplog: pytest.LogCaptureFixture) -> None:
    for refusals, has_stack, text in ((0, True, 1000), (1, False, 64)):
        app = app_of()

        @app.handler("t", retry=ONCE, on_failure="dead_letter")
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
    ("code", "why"), [(KafkaError.MSG_SIZE_TOO_LARGE, ", even without"), (KafkaError.INVALID_RECORD, ": .+ key")]
)
def test_a_dead_letter_that_no_topic_takes_stops_the_consumer_and_keeps_the_offset(code: int, why: str) -> None:
    app = app_of()

    @app.handler("t", retry=ONCE, on_failure="dead_letter")
    def fail(_message: Message) -> None:
        raise PoisonError

    with TestApp(app) as test:
        test.broker.fail("produce", code, times=2)
        test.send("t", "value")
        with pytest.raises(PenstockError, match=rf"dlq\.t does not take it{why}"):
            test.settle()

    assert test.committed("t").get(0, 0) == 0


@pytest.mark.parametrize("on_failure", ["dead_letter", "drop"])
def test_what_no_retry_topic_takes_is_given_up_at_once(on_failure: str) -> None:
    app = app_of()

    @app.handler("t", retry=ONCE, retry_delays=(60,), on_failure=on_failure)
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
