"""`oauth_cb`: a function or its name, called before a client exists, so that its exception is reported at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaException

import penstock
from penstock import clients
from penstock.clients import tokens as tokens_module
from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.tokens import with_tokens
from penstock.errors import BrokerConnectionError, ConfigurationError
from waiting import wait_until

CONNECTION = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}


def tokens(**config: Any) -> Any:
    return with_tokens({**CONNECTION, **config})["oauth_cb"]


@pytest.mark.parametrize("named", ["token_source:token", "token_source:Kept.given"])
def test_a_callback_may_be_named_as_text(named: str) -> None:
    assert tokens(oauth_cb=named)(None) == ("abc", 4e9)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("token_source", "must be a function, or its name as 'module:function'"),
        (7, "must be a function, or its name"),
        ("no_such_module:token", "cannot be imported here: No module named 'no_such_module'"),
        ("token_source:absent", "cannot be imported here: .*'absent'"),
        ("token_source:NOTHING", "must be a function, .* but 'token_source:NOTHING' is a "),
    ],
)
def test_a_callback_that_is_none_is_named(given: object, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        tokens(oauth_cb=given)


@pytest.mark.parametrize("config", [{"sasl.mechanism": "PLAIN"}, {"security.protocol": "SSL"}])
def test_a_callback_that_would_never_be_called_is_refused(config: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="gives tokens, but sasl"):
        tokens(oauth_cb="token_source:token", **config)


def test_the_first_token_is_asked_for_once() -> None:
    asked: list[str | None] = []

    def token(config: str | None) -> tuple[str, float]:
        asked.append(config)
        return f"token {len(asked)}", 4e9

    made = tokens(oauth_cb=token, **{"sasl.oauthbearer.config": "a=b"})

    assert [made("a=b"), made("a=b")] == [("token 1", 4e9), ("token 2", 4e9)]
    assert asked == ["a=b"] * 2


def test_a_callback_that_raises_is_reported_at_once_as_no_broker_and_as_the_librarys_error() -> None:
    def token(_: str | None) -> tuple[str, float]:
        raise OSError("the token endpoint is away")

    with pytest.raises(BrokerConnectionError, match=r"OSError: the token endpoint is away; see that") as caught:
        clients.producer("127.0.0.1:1", {**CONNECTION, "oauth_cb": token})

    assert isinstance(caught.value, KafkaException)
    assert not caught.value.args[0].fatal()


@pytest.mark.parametrize(
    "given",
    ["canary-4711", ["canary-4711", 4e9], ("canary-4711",), ("canary-4711", "soon"), ("canary-4711", 4e9, "me", {}, 1)],
)
def test_what_the_client_library_would_not_take_is_refused_and_not_shown(given: object) -> None:
    said = rf"must return \(token, seconds .*, but returned a {type(given).__name__}"
    with pytest.raises(BrokerConnectionError, match=said) as caught:
        tokens(oauth_cb=lambda _: given)

    assert "canary-4711" not in str(caught.value)


def test_a_token_that_has_expired_is_reported() -> None:
    with pytest.raises(BrokerConnectionError, match=r"returned one that expired at 7 seconds .*; correct it"):
        tokens(oauth_cb=lambda _: ("abc", 7))


def test_a_token_that_is_missing_later_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    left = ["first"]

    def token(_: str | None) -> tuple[str, float]:
        return left.pop(), 4e9

    made = tokens(oauth_cb=token)
    made(None)
    with caplog.at_level(logging.ERROR, "penstock.kafka"), pytest.raises(KafkaException):
        made(None)

    assert "raised IndexError: pop from empty list" in caplog.text
    assert "it is tried again" in caplog.text


class Provider:
    """Gives tokens, and none while it is away: a caller then waits until it is back, or for a tenth of a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.is_back = threading.Event()
        self.is_back.set()

    def __call__(self, _: str | None) -> tuple[str, float]:
        assert self.is_back.wait(60)
        return "abc", 4e9

    def leave(self) -> None:
        self._monkeypatch.setattr(tokens_module, "_ANSWER_S", 0.1)
        self.is_back.clear()

    def come_back(self) -> None:
        self._monkeypatch.setattr(tokens_module, "_ANSWER_S", 60.0)
        self.is_back.set()


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    made = Provider(monkeypatch)
    yield made
    made.is_back.set()


def app(config: dict[str, Any]) -> object:
    made = penstock.App("shop", bootstrap_servers="127.0.0.1:1", config=config)
    made.handler("orders")(print)
    return made.start()


def producer(config: dict[str, Any]) -> object:
    return penstock.TransactionalProducer("shop", bootstrap_servers="127.0.0.1:1", config=config).start()


def coordinator(config: dict[str, Any]) -> object:
    return penstock.Coordinator(bootstrap_servers="127.0.0.1:1", config=config).start()


@pytest.mark.parametrize("start", [app, producer, coordinator])
def test_a_callback_that_never_answers_ends_the_start_with_a_sentence_that_names_it(
    start: Callable[[dict[str, Any]], object], provider: Provider
) -> None:
    provider.leave()

    with pytest.raises(BrokerConnectionError, match=r"config\['oauth_cb'\] \(Provider\) has not answered for 0.1 s"):
        start({**CONNECTION, "oauth_cb": provider})


def test_a_callback_is_not_asked_while_too_many_of_its_calls_hang(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "_left", left := LeftBehind("config['oauth_cb']", most=1))
    provider.leave()
    for _ in range(2):
        with pytest.raises(BrokerConnectionError, match="has not answered"):
            tokens(oauth_cb=provider)
    with pytest.raises(BrokerConnectionError, match=r"2 calls of config\['oauth_cb'\] hang"):
        tokens(oauth_cb=provider)
    provider.come_back()
    wait_until(lambda: left.hanging == 0)

    assert tokens(oauth_cb=provider)(None) == ("abc", 4e9)


def test_a_callback_that_hangs_at_a_refresh_holds_up_the_client_no_longer_than_its_time(
    provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    made = tokens(oauth_cb=provider)
    made(None)
    provider.leave()

    # The library asks on its own thread, and closing the client waits for it.
    with caplog.at_level(logging.ERROR, "penstock.kafka"), pytest.raises(KafkaException):
        made(None)

    assert "has not answered" in caplog.text
    assert "it is tried again" in caplog.text
