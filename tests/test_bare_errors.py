"""The client library's `KafkaError` can be raised and is no exception: no thread ends of one in silence."""

from __future__ import annotations

import logging

import pytest
from confluent_kafka import KafkaError

from kafka_tools import Recorder
from penstock.consumer import CallNext, handler
from penstock.consumer import settings as settings_module
from penstock.devbroker import DevBroker
from penstock.errors import PenstockError, StoppedError, raised
from penstock.message import Message
from penstock.testing import TestApp
from penstock.transactions import Coordinator
from penstock.transactions.stores.kafka.coordinator.coordinator import KafkaCoordinator
from support.consumers import ONCE, NewTopic, app_of, consumer_of


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


def test_a_handler_that_raises_one_has_failed_its_message() -> None:
    seen: list[str] = []

    def sees(message: Message, call_next: CallNext) -> None:
        seen.append("nothing")
        try:
            call_next(message)
        except Exception as error:
            seen[-1] = type(error).__name__
            raise

    app = app_of(middlewares=[sees])
    app.handler("t", on_failure="dead_letter", retry=ONCE)(lambda m: raise_bare() if m.value == b"bad" else None)

    with TestApp(app) as test:
        for value in ("bad", "good"):
            test.send("t", value, key="k")
        test.settle()
        test.advance(2)
        (letter,) = test.dead_letters("t")

    assert seen == ["PenstockError", "nothing"]
    assert b"for the test" in (letter.header("__dlq.errors.message") or b"")


def test_a_coordinator_that_ends_of_one_says_so(broker: DevBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KafkaCoordinator, "_round", raise_bare)
    coordinator = Coordinator(bootstrap_servers=broker.bootstrap_servers, prefix="bare").start()

    assert coordinator.wait(60)
    with pytest.raises(StoppedError, match="for the test"):
        coordinator.stop()
