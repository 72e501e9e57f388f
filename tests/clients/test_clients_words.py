"""Why a client is not let in: by its own words, with what to change, and at once where waiting helps nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicCollection

from penstock.clients import admin, consumer
from penstock.clients import factory as making
from penstock.clients.answers import first_answer
from penstock.clients.client_log import ClientWords, cause_of
from penstock.clients.topics import ask_topic_ids, partition_counts
from penstock.devbroker import DevBroker, User
from penstock.errors import BrokerConnectionError
from penstock.spark_sink.source.brokers import OffsetReader
from penstock.spark_sink.source.options import SourceOptions
from waiting import wait_until

#: Seconds that a question may wait for an answer: longer than a test may take, so that only an error at once passes.
NEVER_S = 1000.0


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (
            "b:9/bootstrap: SASL authentication error: Authentication failed (after 3ms in state AUTH_REQ)",
            "sasl.password",
        ),
        ("b:9: SASL OAUTHBEARER mechanism handshake failed: Broker: Unsupported SASL mechanism: ..", "sasl.mechanism"),
        ("b:9: SSL handshake failed: error:0A000086:SSL routines::certificate verify failed", "ssl.ca.location"),
        ("b:9: Receive failed: error:0A000412:SSL routines::ssl/tls alert bad certificate", "ssl.certificate.location"),
        ("b:9/bootstrap: Disconnected: connection closed by peer (after 2ms in state APIVERSION_QUERY)", "SASL_SSL"),
        (
            "b:9/bootstrap: Disconnected: connection closed by peer (after 2ms in state UP)",
            "may ask for SASL",
        ),
        ("sasl_ssl://b:9/bootstrap: Disconnected: SSL connection closed by peer (after 2ms in state UP)", ""),
        ("b:9/bootstrap: SSL handshake failed: Disconnected: connecting to a PLAINTEXT broker listener?", "PLAINTEXT"),
        ("b:9: Connect to ipv4#127.0.0.1:9 failed: Connection refused (after 0ms in state CONNECT)", ""),
        ("b:9: Connect failed: Connection refused (after 0ms in state CONNECT, 1 identical error(s) suppressed)", ""),
        (
            (
                "b:9/bootstrap: ApiVersionRequest failed: Local: Timed out: probably due to broker version < 0.10 (see "
                "api.version.request configuration) (after 10002ms in state APIVERSION_QUERY)"
            ),
            "may be no Kafka broker",
        ),
        (
            (
                "b:9/bootstrap: Disconnected: requesting ApiVersion: might be caused by incorrect security.protocol "
                "configuration (connecting to a SSL listener?) or broker version is < 0.10 (see api.version.request) "
                "(after 2ms in state APIVERSION_QUERY)"
            ),
            "SASL_SSL",
        ),
    ],
)
def test_words_of_the_client_name_the_setting_to_change(said: str, remedy: str) -> None:
    cause = cause_of(said)

    assert remedy in cause.remedy
    assert "0.10" not in cause.words
    assert "suppressed" not in cause.words
    assert bool(remedy) == bool(cause.remedy)
    assert "(after" not in cause.words


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("b:9/2: Disconnected: connection closed (after 2ms in state UP)", "Disconnected: connection closed"),
        (
            (
                "b:9/2: Disconnected: verify that security.protocol is correctly configured, broker might require SASL "
                "authentication (after 2ms in state UP)"
            ),
            "Disconnected",
        ),
        (
            (
                "b:9/2: Disconnected: requesting ApiVersion: might be caused by incorrect security.protocol "
                "configuration (connecting to a SSL listener?) or broker version is < 0.10 (see api.version.request) "
                "(after 2ms in state APIVERSION_QUERY, 5 identical error(s) suppressed)"
            ),
            "Disconnected",
        ),
        (
            (
                "b:9/2: ApiVersionRequest failed: Local: Timed out: probably due to broker version < 0.10 (see "
                "api.version.request configuration) (after 10002ms in state APIVERSION_QUERY)"
            ),
            "ApiVersionRequest failed: Local: Timed out",
        ),
        ("b:9/2: Timed out MetadataRequest in flight (after 5003ms, timeout #0)", "it did not answer in time"),
        ("b:9/2: Timed out 0 in-flight, 0 retry-queued, 1 out-queue requests", "it did not answer in time"),
    ],
)
def test_a_broker_that_let_the_client_in_is_not_blamed_on_settings(said: str, words: str) -> None:
    cause = cause_of(said)

    assert (cause.words, cause.remedy) == (f"b:9/2: {words}", "")


class Lines:
    """A log that keeps the library's lines."""

    def __init__(self) -> None:
        self.last = ""

    def log(self, _level: int, _text: str, *arguments: object) -> None:
        self.last = str(arguments[-1])


def test_the_broker_that_does_not_answer_now_is_named_and_no_setting_that_worked() -> None:
    now, lines = [0.0], Lines()
    words = ClientWords({}, lines, lambda: now[0])

    def named(at: float, kind: str, said: str) -> str:
        now[0] = at
        words.log(logging.WARNING, "%s %s %s", kind, "rdkafka#consumer-1", f"[thrd:x]: {said}")
        return str(words.cause)

    ended = "Disconnected: connection closed by peer (after 9ms in state UP)"
    assert "may ask for SASL" in named(0.0, "FAIL", f"b:9/bootstrap: {ended}")
    assert "b:3/3: Connect failed: Connection refused" in named(
        1.0, "FAIL", "b:3/3: Connect failed: Connection refused"
    )
    assert "b:2/2" in named(9.0, "REQTMOUT", "b:2/2: Timed out MetadataRequest in flight (after 5003ms, timeout #0)")
    assert "SASL" not in named(10.0, "FAIL", f"b:9/bootstrap: {ended}")
    assert "/bootstrap" not in lines.last  # so that the shared log does not guess either
    now[0] = 46.0
    assert words.cause is None


def test_a_users_own_error_cb_is_called_too() -> None:
    heard: list[KafkaError] = []
    client = admin("127.0.0.1:1", {"error_cb": heard.append})
    wait_until(lambda: client.poll(0.05) is not None and heard)

    with pytest.raises(BrokerConnectionError, match=r"Connection refused; check the address"):
        partition_counts(client, timeout_s=0.5)

    assert any("Connection refused" in error.str() for error in heard)


@pytest.mark.parametrize("name", ["error_cb", "stats_cb"])
def test_a_users_callback_that_raises_ends_no_call_of_the_client(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        raise ValueError("wrong")

    reader = consumer("127.0.0.1:1", {name: fail, "group.id": "g", "statistics.interval.ms": 100})

    wait_until(lambda: reader.poll(0.05) is None and f"{name} of the config failed" in caplog.text)
    reader.close()


def test_a_first_question_whose_call_never_returns_ends_by_its_limit() -> None:
    let_go = threading.Event()

    with pytest.raises(BrokerConnectionError, match=r"within 0\.1 s: "):
        first_answer(admin("127.0.0.1:1", {}), 0.1, lambda: let_go.wait(60))

    let_go.set()


def test_settings_that_worked_are_not_to_be_checked() -> None:
    client = admin("127.0.0.1:1", {})
    client.words.clear()  # as an answer does
    wait_until(lambda: client.poll(0.05) is not None and client.words.cause)

    with pytest.raises(BrokerConnectionError, match=r"Connection refused; check that the broker runs$"):
        partition_counts(client, timeout_s=0.5)


def test_one_address_of_two_that_refuses_is_no_reason_to_give_up() -> None:
    words = ClientWords({}, making.client_log)
    words.hear(KafkaError(KafkaError._AUTHENTICATION, "sasl_ssl://a:9092/bootstrap: SASL authentication error: no"))

    assert not words.refused_by_all("a:9092,b:9092")
    assert words.refused_by_all("a:9092")


class Admin:
    """An admin client whose brokers answer as the test says."""

    def __init__(self, error: KafkaError | None = None) -> None:
        self.words = ClientWords({}, None)
        self.error = error

    def poll(self, _timeout: float) -> int:
        self.words.hear(KafkaError(KafkaError._AUTHENTICATION, "a:9092: SASL authentication error: Invalid password"))
        return 1

    def describe_topics(self, topics: TopicCollection, **_: object) -> dict[str, Future[Any]]:
        answers: dict[str, Future[Any]] = {name: Future() for name in topics.topic_names}
        for answer in answers.values():
            if self.error is None:
                answer.set_result(SimpleNamespace(topic_id="id", authorized_operations=None))
            else:
                answer.set_exception(KafkaException(self.error))
        return answers


def test_who_asks_again_and_again_hears_why_no_broker_answers_until_one_does() -> None:
    gone = Admin(KafkaError(KafkaError._TIMED_OUT))
    unknown, there = Admin(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)), Admin()

    answers = [ask_topic_ids(cast("Any", client), ["orders"], 1.0) for client in (gone, unknown, there)]

    assert "Invalid password; correct sasl.username and sasl.password" in answers[0].failures["orders"]
    assert "password" not in answers[1].failures["orders"]
    assert (answers[2].ids, there.words.cause) == ({"orders": "id"}, None)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sasl.password": "canary-4711"}, "SASL authentication error.*correct sasl.username and sasl.password"),
        pytest.param(
            {"security.protocol": "sasl_plaintext"},
            "closed by peer.*set security.protocol to SSL or SASL_SSL",
            marks=pytest.mark.thorough,
        ),
        ({"ssl.ca.location": None}, "certificate verify failed.*set ssl.ca.location"),
    ],
)
def test_a_client_that_is_not_let_in_says_why_at_once(
    secured: DevBroker, new_user: Callable[..., User], change: Mapping[str, Any], sentence: str
) -> None:
    config = {**new_user().config, **change}
    config = {key: value for key, value in config.items() if value is not None}
    servers = secured.bootstrap_servers
    client = admin(servers, config)
    options = {"subscribe": "orders", **{f"kafka.{key}": value for key, value in config.items()}}
    source = OffsetReader(SourceOptions.parse({"kafka.bootstrap.servers": servers, **options}))
    for question in (lambda: partition_counts(client, timeout_s=NEVER_S), source.first_view):
        with pytest.raises(BrokerConnectionError, match=sentence) as caught:
            question()

        assert "canary" not in str(caught.value)
