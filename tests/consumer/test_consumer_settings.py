"""Wrong options, handlers and places are told in a sentence before anything starts (I10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.app import App
from penstock.consumer import ConsumerSettings, LitePushConsumer, handler, retry
from penstock.devbroker import DevBroker
from penstock.errors import BrokerConnectionError, ConfigurationError, StoppedError, TopicNotFoundError
from penstock.message import Message


def nothing(_message: Message) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: handler("send_sms"), "must be a function or another callable, but is a str"),  # type: ignore[arg-type]
        (lambda: handler(nothing, key="tenant"), "'header:name' or a function"),
        (lambda: handler(nothing, decoder="xml"), "decoder must be 'json'"),
        (lambda: handler(nothing, linger=1.0), "but batch is 1"),
        (lambda: handler(nothing, key_rate=0), "key_rate must be above 0"),
        (lambda: handler(nothing, retry_delays=[1e9]), "the longest delay is"),
        (lambda: handler(nothing, dead_letter_format="xml"), "dead_letter_format must be one of 'kafka', 'spring'"),
        (lambda: handler(nothing, order="keys"), "order must be one of 'key', 'partition', 'none'"),
        (lambda: handler(nothing, keyless="lost"), "keyless must be one of"),
        (lambda: handler(nothing, dead_letter="away"), "dead_letter must be True, False"),
        (lambda: handler(nothing, retry_policy=3), "penstock.retry"),  # type: ignore[arg-type]
        (lambda: retry(attempts=0), "attempts must be a whole number of at least 1"),
        (lambda: retry(wait=3), "tenacity's wait_"),  # type: ignore[arg-type]
        (lambda: ConsumerSettings(workers=0), "workers must be a whole number of at least 1, but is 0"),
        (lambda: ConsumerSettings(workers="8"), "workers must be a whole number"),  # type: ignore[arg-type]
        (lambda: ConsumerSettings(commit_interval=0), "commit_interval must be a number above zero"),
        (lambda: ConsumerSettings(stop_timeout=-1), "stop_timeout must be zero or more"),
        (lambda: ConsumerSettings(config={"enable.auto.commit": True}), "belongs to penstock"),
        (lambda: ConsumerSettings(config={"group.id": "x"}), "the name of the App"),
        (lambda: ConsumerSettings(config={"partition.assignment.strategy": "range"}), "cooperatively"),
        (lambda: ConsumerSettings(config="linger.ms=5"), "must be a mapping"),  # type: ignore[arg-type]
        (lambda: App("", bootstrap_servers="127.0.0.1:1"), "name must be a name"),
        (lambda: App("a", bootstrap_servers=""), "bootstrap_servers must be a name"),
        (lambda: App("a", bootstrap_servers="127.0.0.1:1").start(), "has no handler"),
        (lambda: App("a", bootstrap_servers="127.0.0.1:1").handler(), "must name at least one topic"),
        (lambda: App("a", bootstrap_servers="127.0.0.1:1").handler("t")(3), "handler must be a function"),  # type: ignore[type-var]
        (lambda: LitePushConsumer("g", {}, bootstrap_servers="127.0.0.1:1"), "there is no handler"),
    ],
)
def test_a_wrong_option_is_named_with_its_remedy(wrong: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence.replace("(", r"\(")):
        wrong()


def test_a_second_handler_for_a_topic_is_refused() -> None:
    app = App("app", bootstrap_servers="127.0.0.1:1")
    app.handler("topic")(nothing)

    with pytest.raises(ConfigurationError, match="topic topic has the handler nothing already"):
        app.handler("topic")(nothing)


def test_a_key_the_client_does_not_know_is_named(broker: DevBroker, new_topic: Callable[..., str]) -> None:
    app = App("app", bootstrap_servers=broker.bootstrap_servers, config={"no.such.key": 1})
    app.handler(new_topic())(nothing)

    with pytest.raises(ConfigurationError, match=r"no\.such\.key"):
        app.start()


def test_a_topic_that_does_not_exist_is_named(broker: DevBroker) -> None:
    app = App("app", bootstrap_servers=broker.bootstrap_servers)
    app.handler("nobody-made-this")(nothing)

    with pytest.raises(TopicNotFoundError, match="nobody-made-this; create it first"):
        app.start()


def test_a_broker_that_does_not_answer_is_an_error_within_seconds(hasty: list[float]) -> None:
    app = App("app", bootstrap_servers="127.0.0.1:1")
    app.handler("topic")(nothing)

    with pytest.raises(BrokerConnectionError, match=r"no Kafka broker answered at 127\.0\.0\.1:1 within 15 s"):
        app.start()

    assert hasty == [15]


def test_a_consumer_starts_once(broker: DevBroker, new_topic: Callable[..., str]) -> None:
    topic = new_topic()
    consumer = LitePushConsumer("g", {topic: handler(nothing)}, bootstrap_servers=broker.bootstrap_servers)
    with consumer, pytest.raises(StoppedError, match="was started before"):
        consumer.start()


def test_run_needs_the_main_thread() -> None:
    import threading

    app = App("app", bootstrap_servers="127.0.0.1:1")
    app.handler("topic")(nothing)
    caught: list[BaseException] = []

    def run() -> None:
        try:
            app.run()
        except ConfigurationError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert "main thread" in str(caught[0])
