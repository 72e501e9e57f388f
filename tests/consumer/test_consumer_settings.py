"""Wrong options, handlers and places are refused with a sentence before anything starts (I10)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from confluent_kafka import KafkaError
from stepped import Stepped

from penstock.app import App
from penstock.clients import groups as group_protocol
from penstock.consumer import ConsumerSettings, DeadLetterLimit, Handler, LitePushConsumer, handler, retry
from penstock.devbroker import DevBroker
from penstock.errors import BrokerConnectionError, ConfigurationError, RetryLater, StoppedError
from penstock.message import Message
from penstock.options import MEMBERS_VARIABLE, PROCESS_VARIABLE
from penstock.testing import TestBroker
from support.consumers import consumer_of, nothing
from waiting import wait_until


async def waits(_message: Message) -> None:
    """Do nothing, on the loop."""


def takes_nothing() -> None:
    """Take no message."""


def consumer(handlers: dict[str, Handler]) -> LitePushConsumer:
    return LitePushConsumer("g", handlers, bootstrap_servers="127.0.0.1:1")


def app() -> App:
    return App("a", bootstrap_servers="127.0.0.1:1")


def second_handler() -> None:
    given = app()
    for _ in range(2):
        given.handler("t")(nothing)


def exactly_once(config: dict[str, Any]) -> App:
    app = App("a", bootstrap_servers="127.0.0.1:1", exactly_once=True, config=config)
    app.handler("t")(nothing)
    return app


def letters(to: str, **options: Any) -> Handler:
    return handler(nothing, on_failure="dead_letter", dead_letter_topic=to, **options)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: handler("send_sms"), "must be a function or another callable, but is a str"),  # type: ignore[arg-type] # on purpose
        (lambda: handler(nothing, key="tenant"), "'header:name' or a function"),
        (lambda: handler(nothing, key="header:"), "key"),
        (lambda: handler(nothing, key=7), "key"),  # type: ignore[arg-type] # on purpose
        (lambda: handler(nothing, key_space=""), "key_space"),
        (lambda: handler(nothing, key_space=b"customer"), "key_space"),  # type: ignore[arg-type] # on purpose
        (lambda: handler(nothing, encoder="yaml"), "encoder must be"),
        (lambda: handler(nothing, encoder=5), "encoder must be"),  # type: ignore[arg-type] # on purpose
        (lambda: handler(nothing, encoder=bytes), "encoder=bytes turns a number into zero bytes"),
        (lambda: consumer({"in": handler(nothing, to="in")}), "consumes in and publishes to it"),
        (lambda: handler(nothing, decoder="xml"), "decoder must be 'json'"),
        (lambda: handler(nothing, linger=1.0), "but batch is 1"),
        (lambda: handler(nothing, key_rate=0), "key_rate must be above 0"),
        (lambda: handler(nothing, key_rate=1, order="none"), "key_rate lets the messages of a key wait"),
        (lambda: handler(nothing, retry_delays=[1e9]), "the longest delay is"),
        (lambda: handler(nothing, dead_letter_format="xml"), "dead_letter_format must be one of 'kafka', 'spring'"),
        (lambda: handler(nothing, order="keys"), "order must be one of 'key', 'partition', 'none'"),
        (lambda: handler(nothing, keyless="lost"), "keyless must be one of"),
        (
            lambda: handler(nothing, on_failure="away"),
            "on_failure must be one of 'dead_letter', 'drop', 'hold', 'stop'",
        ),
        (lambda: handler(nothing, retry=3), "penstock.retry"),  # type: ignore[arg-type] # on purpose
        (lambda: handler(nothing, retry_delays=60), "retry_delays must be a list of seconds, such as"),  # type: ignore[arg-type] # on purpose
        (lambda: handler(nothing, retry_delays="60"), "retry_delays must be a number above zero"),  # type: ignore[arg-type] # on purpose
        (lambda: handler(nothing, dead_letter_topic="mine"), "dead_letter_topic has no use with on_failure='stop'"),
        (
            lambda: handler(nothing, on_failure="drop", dead_letter_format="spring"),
            "dead_letter_format has no use with on_failure='drop'",
        ),
        (lambda: handler(takes_nothing), r"handler takes_nothing.* cannot be called with a message; give it one"),
        (lambda: consumer({"o": letters("o")}), "dead letters of o go to o, whose handler gets them again"),
        (lambda: consumer({"o": letters("p"), "p": letters("o")}), "dead letters of o go to p go to o"),
        (lambda: consumer({"o": letters("retry.g.o.1s", retry_delays=(1,))}), "dead letters of o go to retry.g.o.1s"),
        (
            lambda: consumer({"o": handler(nothing, retry_delays=(1,)), "retry.g.o.1s": handler(nothing)}),
            "topic retry.g.o.1s has a handler, but it is where messages of o wait for their retry",
        ),
        (lambda: RetryLater(float("inf")), "RetryLater takes a number of seconds, but was given inf"),
        (lambda: RetryLater(float("nan")), "was given nan"),
        (lambda: RetryLater("5"), "was given '5'"),  # type: ignore[arg-type] # on purpose
        (lambda: DeadLetterLimit(ratio="0.1"), "ratio must be a number above zero"),  # type: ignore[arg-type] # on purpose
        (lambda: DeadLetterLimit(ratio=1.5), "ratio must lie above 0 and at most at 1"),
        (lambda: ConsumerSettings(dead_letter_limit=20), "dead_letter_limit must be a DeadLetterLimit, but is 20"),  # type: ignore[arg-type] # on purpose
        (lambda: ConsumerSettings(telemetry=True), "telemetry must be a Telemetry, but is True"),  # type: ignore[arg-type] # on purpose
        (lambda: consumer({"o": handler(nothing)}).change(max_concurrency=5), "no handler of g is an `async def`"),
        (lambda: consumer({"o": handler(waits)}).change(workers=5), "no handler of g is a plain function"),
        (lambda: retry(attempts=0), "attempts must be a whole number of at least 1"),
        (lambda: retry(wait=3), "tenacity's wait_"),  # type: ignore[arg-type] # on purpose
        (lambda: retry(retry=ValueError), r"give tenacity.retry_if_exception_type\(ValueError\)"),  # type: ignore[arg-type] # on purpose
        (DeadLetterLimit, r"DeadLetterLimit\(\) sets no limit"),
        (lambda: ConsumerSettings(workers=0), "workers must be a whole number of at least 1, but is 0"),
        (lambda: ConsumerSettings(workers=10**22), "workers must be at most 10,000, but is 1"),
        (lambda: ConsumerSettings(max_in_flight=10**22), "max_in_flight must be at most 9,223,372,036,854,775,807"),
        (lambda: ConsumerSettings(transaction_interval=float("inf")), "transaction_interval must be at most 2,000,000"),
        (lambda: ConsumerSettings(stop_timeout=1e10), "stop_timeout must be at most 2,000,000 seconds"),
        (lambda: ConsumerSettings(workers="8"), "workers must be a whole number"),  # type: ignore[arg-type] # on purpose
        (lambda: ConsumerSettings(commit_interval=0), "commit_interval must be a number above zero"),
        (lambda: ConsumerSettings(stop_timeout=-1), "stop_timeout must be zero or more"),
        (
            lambda: ConsumerSettings(config={"enable.auto.commit": True}),
            "penstock: offsets are committed when",
        ),
        (lambda: ConsumerSettings(config={"group.id": "x"}), "the name of the App"),
        (lambda: ConsumerSettings(config={"partition.assignment.strategy": "range"}), "cooperatively"),
        (lambda: ConsumerSettings(config={"acks": 1}), "acks'] is 1, and a message counts as done only once all"),
        (lambda: ConsumerSettings(config={"request.required.acks": "0"}), "acks'] is '0'"),
        (lambda: ConsumerSettings(config={"auto.offset.reset": "none"}), "give 'earliest', 'latest' or 'error'"),
        (lambda: ConsumerSettings(config="linger.ms=5"), "must be a mapping"),  # type: ignore[arg-type] # on purpose
        (lambda: exactly_once({"enable.auto.offset.store": True}), "offsets are committed when their messages are"),
        (lambda: exactly_once({"transactional.id": "mine"}), "App with exactly_once=True has transactional ids"),
        (lambda: exactly_once({"isolation.level": "read_uncommitted"}), "a message that was rolled back would be"),
        (lambda: exactly_once({"isolation.level": "READ_UNCOMMITTED"}), "a message that was rolled back would be"),
        (lambda: exactly_once({"client.id": "ä"}).consumer(), "must be printable ASCII with exactly_once, but is 'ä'"),
        (lambda: App("", bootstrap_servers="127.0.0.1:1"), "name must be a name"),
        (lambda: App("a", bootstrap_servers=""), "bootstrap_servers must be a name"),
        (lambda: App("a\0b", bootstrap_servers="127.0.0.1:1"), "name must be a name in UTF-8, without a NUL"),
        (lambda: App("a\ud800", bootstrap_servers="127.0.0.1:1"), "name must be a name in UTF-8, without a NUL"),
        (lambda: app().start(), "has no handler"),
        (lambda: app().handler(), "must name at least one topic"),
        (lambda: app().handler("t")(3), "handler must be a function"),  # type: ignore[type-var] # on purpose
        (second_handler, "topic t has the handler nothing already"),
        (lambda: app().lifespan(lambda: iter(())), "lifespan takes a function with one `yield`"),  # type: ignore[arg-type] # on purpose
        (lambda: app().worker_resource(lambda: iter(())), "worker_resource takes a function with one `yield`"),  # type: ignore[arg-type,return-value] # on purpose
        (lambda: LitePushConsumer("g", {}, bootstrap_servers="127.0.0.1:1"), "there is no handler"),
    ],
)
def test_a_wrong_option_is_named_with_its_remedy(wrong: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        wrong()


def test_what_the_user_says_of_the_producer_counts() -> None:
    given = ConsumerSettings(config={"linger.ms": 50, "message.timeout.ms": 9_000, "acks": "all"}).producer_config()

    assert (given["linger.ms"], given["message.timeout.ms"]) == (50, 9_000)
    assert ConsumerSettings().producer_config()["message.timeout.ms"] == 0


def test_dead_letters_may_go_to_a_topic_with_a_handler_that_ends_them() -> None:
    consumer({"o": letters("p"), "p": letters("q"), "q": handler(nothing)})


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_stop_from_within_a_handler_is_refused_at_once_and_the_app_goes_on(kind: str) -> None:
    broker, refused, handled = TestBroker(), list[BaseException](), list[bytes | None]()
    broker.create_topic("t", 1)
    for value in (b"stop", b"next"):
        broker.produce("t", value, key=b"k")

    def plain(message: Message) -> None:
        if message.value == b"stop":
            with pytest.raises(ConfigurationError) as caught:
                running.stop()
            refused.append(caught.value)
        handled.append(message.value)

    async def on_the_loop(message: Message) -> None:
        plain(message)

    running = consumer_of(broker, {"t": handler(plain if kind == "plain" else on_the_loop)})
    with running:
        wait_until(lambda: len(handled) == 2)

    assert "stop() was called on penstock-" in str(refused[0])
    assert "for example on an event" in str(refused[0])


def test_a_process_of_a_run_has_a_name_of_its_own_in_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROCESS_VARIABLE, "2")
    monkeypatch.setenv(MEMBERS_VARIABLE, "host-1f")

    given = ({}, {"group.instance.id": "mine"}, {"group.protocol": "consumer"})
    own, appended, newer = (ConsumerSettings(config=config).client_config("g") for config in given)

    assert own["group.instance.id"] == "host-1f-2"
    assert appended["group.instance.id"] == "mine-2"
    # There it could not leave. The session is the brokers' business: the client refuses to hear of it.
    assert newer.keys().isdisjoint({"group.instance.id", "session.timeout.ms"})


def test_brokers_that_are_too_old_for_the_newer_group_protocol_are_named_at_the_start(
    broker: DevBroker, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_protocol, "_LEAST", 9)  # more than any broker takes
    topic, config = new_topic(), {"group.protocol": "consumer"}
    app = App(topic, bootstrap_servers=broker.bootstrap_servers, config=config)
    app.handler(topic)(nothing)

    with pytest.raises(ConfigurationError, match=r"take ConsumerGroupHeartbeat up to version \d, while"):
        app.start()


def test_brokers_that_do_not_say_which_group_protocols_they_accept_end_no_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_protocol, "_ANSWER_S", 0.2)

    assert not group_protocol.require_consumer_protocol("127.0.0.1:1", {"group.protocol": "consumer"})


def test_brokers_that_have_the_newer_group_protocol_switched_off_are_named(caplog: pytest.LogCaptureFixture) -> None:
    world = Stepped({"t": handler(nothing)})
    # As librdkafka 2.16 says it.
    world.broker.fail("fetch", KafkaError(KafkaError._FATAL, "Fatal error: Broker: API version not supported: ..."))

    world.feed("t", [(b"k", b"v")])

    assert "leave group.protocol=consumer out, or have the brokers allow it" in caplog.text


def test_a_key_the_client_does_not_know_is_named(broker: DevBroker, new_topic: Callable[..., str]) -> None:
    app = App(new_topic(), bootstrap_servers=broker.bootstrap_servers, config={"no.such.key": 1})
    app.handler(new_topic())(nothing)

    with pytest.raises(ConfigurationError, match=r"no\.such\.key"):
        app.start()


def test_a_broker_that_does_not_answer_is_an_error_within_seconds(hasty: list[float]) -> None:
    app = App("app", bootstrap_servers="127.0.0.1:1")
    app.handler("topic")(nothing)

    with pytest.raises(BrokerConnectionError, match=r"no Kafka broker answered at 127\.0\.0\.1:1 within 15 s"):
        app.start()

    assert hasty == [15]


def test_a_consumer_starts_once() -> None:
    consumer = consumer_of(TestBroker(), {"t": handler(nothing)})
    with consumer, pytest.raises(StoppedError, match="was started before"):
        consumer.start()


def test_run_needs_the_main_thread() -> None:
    app = App("app", bootstrap_servers="127.0.0.1:1")
    app.handler("topic")(nothing)

    with ThreadPoolExecutor() as pool, pytest.raises(ConfigurationError, match="main thread"):
        pool.submit(app.run).result(60)
