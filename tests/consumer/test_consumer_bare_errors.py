"""The client library's `KafkaError` can be raised and is no exception: no thread ends of one in silence."""

from __future__ import annotations

import asyncio
import logging

import pytest
from confluent_kafka import KafkaError

from kafka_tools import Recorder, produce, read_all
from penstock.consumer import CallNext, Middleware, handler, retry
from penstock.consumer import settings as settings_module
from penstock.devbroker import DevBroker
from penstock.errors import PenstockError, StoppedError, raised
from penstock.message import Message
from penstock.transactions import Coordinator
from penstock.transactions.stores.kafka.coordinator.coordinator import KafkaCoordinator
from support.consumers import NewTopic, consumer_of
from waiting import wait_until


def raise_bare(*_: object) -> None:
    raise KafkaError(KafkaError._STATE, "for the test")  # type: ignore[misc] # it can be, for all that Python says of it


def test_what_was_caught_is_an_exception_that_can_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise_bare()
    except:  # noqa: E722 - nothing else catches it
        error = raised()
        logging.getLogger("penstock").exception("caught", exc_info=error)

    assert isinstance(error, PenstockError)
    assert "for the test" in str(error)
    assert "raise KafkaException(error)" in caplog.text


def test_what_the_client_raises_out_of_a_callback_ends_the_consumer_with_its_reason(
    broker: DevBroker, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a group that rebalances eagerly the client refuses what the callbacks ask for.
    monkeypatch.setattr(settings_module, "_COOPERATIVE", "range")
    consumer = consumer_of(broker, {new_topic(): handler(Recorder())}).start()

    with pytest.raises(PenstockError, match="rebalance protocol type is EAGER"):
        consumer.wait(60)

    with pytest.raises(PenstockError, match="rebalance protocol type is EAGER"):
        consumer.stop()


@pytest.mark.parametrize("kind", ["plain", pytest.param("async", marks=pytest.mark.thorough)])
def test_a_handler_that_raises_one_has_failed_its_message(broker: DevBroker, new_topic: NewTopic, kind: str) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"bad"), (b"k", b"good")])
    raised: list[str] = []
    done: list[bytes | None] = []

    def sees(message: Message, call_next: CallNext) -> None:
        raised.append("nothing")
        try:
            call_next(message)
        except Exception as error:
            raised[-1] = type(error).__name__
            raise

    async def sees_async(message: Message, call_next: CallNext) -> None:
        raised.append("nothing")
        try:
            await call_next(message)
        except Exception as error:
            raised[-1] = type(error).__name__
            raise

    def plain(message: Message) -> None:
        if message.value == b"bad":
            raise_bare()
        done.append(message.value)

    async def waits(message: Message) -> None:
        await asyncio.sleep(0)
        plain(message)

    one = handler(plain if kind == "plain" else waits, on_failure="dead_letter", retry=retry(attempts=1))
    with consumer_of(broker, {topic: one}, middlewares=[Middleware(plain=sees, async_=sees_async)]) as consumer:
        wait_until(lambda: done)
        assert consumer.statistics().dead_letters == 1

    assert raised == ["PenstockError", "nothing"]
    (letter,) = read_all(broker.bootstrap_servers, f"dlq.{topic}")
    assert b"for the test" in dict(letter.headers() or ())["__dlq.errors.message"]


def test_a_coordinator_that_ends_of_one_says_so(broker: DevBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KafkaCoordinator, "_round", raise_bare)
    coordinator = Coordinator(bootstrap_servers=broker.bootstrap_servers, prefix="bare").start()

    assert coordinator.wait(60)
    with pytest.raises(StoppedError, match="for the test"):
        coordinator.stop()
