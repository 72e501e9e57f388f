"""Tokens for OAUTHBEARER: imports the user's `oauth_cb` if it is a name, and asks it for the first token.

The client library calls it on a thread of its own, and making a client waits for the first token: 10 s if none comes,
without a word of what the callback raised. So the first token is asked for here. A callback that does not answer is
abandoned: the library would wait for it for ever, even when the client is closed.
"""

from __future__ import annotations

import logging
import pkgutil
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.bounded_calls import BackgroundCall, LeftBehind, NotAnsweredError
from penstock.errors import BrokerConnectionError, ConfigurationError
from penstock.options import ClientConfig

KEY = "oauth_cb"

_log = logging.getLogger("penstock.kafka")

#: The client library accepts two more items after the token and its expiry: a principal and extensions. No list.
_MOST_MORE = 2
#: Seconds that a callback may take.
_ANSWER_S = 10.0
#: One for the process: clients are made again and again, and hanging callbacks must cost few threads.
_left = LeftBehind(f"config[{KEY!r}]")


class NoTokenError(BrokerConnectionError, KafkaException):
    """The callback gave no token. It is a `KafkaException`, so that loops that make clients again handle it."""

    def __init__(self, text: str) -> None:
        super().__init__(KafkaError(KafkaError._AUTHENTICATION, text))  # noqa: SLF001 - the client library's public constants look so
        self._text = text

    def __str__(self) -> str:
        return self._text


class Tokens:
    """A user's callback for the client library. It is asked for its first token here: `NoTokenError` if it gives none.

    Called by one thread at a time: the maker of the client, then the library's. `config` is `sasl.oauthbearer.config`.
    """

    def __init__(self, callback: Callable[[str | None], Any], config: str | None) -> None:
        self._callback = callback
        self._first: Any = self._asked(config)

    def __call__(self, config: str | None) -> Any:
        """Return a token in the form of the client library."""
        first, self._first = self._first, None
        if first is not None:
            return first
        try:
            return self._asked(config)
        except NoTokenError as error:
            # The library drops the exception and asks again in 10 seconds.
            _log.error("%s; it is tried again", error)
            raise

    def _asked(self, config: str | None) -> Any:
        name = getattr(self._callback, "__qualname__", type(self._callback).__name__)
        what = f"no token for Kafka: config[{KEY!r}] ({name})"
        try:
            given = BackgroundCall(KEY, lambda: self._callback(config), _ANSWER_S, _left).wait()
        except Exception as error:
            hangs = isinstance(error, NotAnsweredError)
            said = f"has not answered for {_ANSWER_S:g} s" if hangs else f"raised {type(error).__name__}: {error}"
            raise NoTokenError(
                f"{what} {said}; see that its token endpoint answers, soon, and knows this client"
            ) from error
        # The value itself is not named: it may be the token.
        match given:
            case (str(), float() | int() as expires, *more) if isinstance(given, tuple) and len(more) <= _MOST_MORE:
                said = f"one that expired at {expires:.0f} seconds since the epoch"
            case _:
                said, expires = f"a {type(given).__name__}", 0
        if expires <= time.time():
            # The library would ignore it, and wait.
            raise NoTokenError(
                f"{what} must return (token, seconds since the epoch at which it expires), but returned {said}; "
                "correct it, and see to both clocks"
            )
        return given


def with_tokens(config: ClientConfig) -> dict[str, Any]:
    """Return a configuration whose `oauth_cb`, if any, is ready for the client library.

    Raises `ConfigurationError` if it names no function or the mechanism is not OAUTHBEARER, `NoTokenError` without a
    token.
    """
    ready = dict(config)
    if ready.get(KEY) is not None:
        callback = _found(ready[KEY])
        mechanism = str(ready.get("sasl.mechanism", ready.get("sasl.mechanisms", ""))).upper()
        protocol = str(ready.get("security.protocol", "plaintext")).upper()
        if mechanism != "OAUTHBEARER" or not protocol.startswith("SASL_"):
            # The library would wait 10 s for a token that it never asks for.
            raise ConfigurationError(
                f"config[{KEY!r}] gives tokens, but sasl.mechanism is {mechanism or 'not set'} and security.protocol "
                f"is {protocol}; set them to OAUTHBEARER and SASL_SSL (or SASL_PLAINTEXT), or leave {KEY} out"
            )
        ready[KEY] = Tokens(callback, ready.get("sasl.oauthbearer.config"))
    return ready


def _found(named: object) -> Callable[[str | None], Any]:
    """Return the callback, imported if it is a name: Spark can send names to executors, but no functions."""
    found = named
    if isinstance(named, str) and ":" in named:
        try:
            found = pkgutil.resolve_name(named)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigurationError(
                f"config[{KEY!r}] is {named!r}, which cannot be imported here: {error}; install its module wherever "
                "clients run, Spark's executors included, or correct the name"
            ) from error
    if not callable(found):
        raise ConfigurationError(
            f"config[{KEY!r}] must be a function, or its name as 'module:function', but {named!r} is a "
            f"{type(found).__name__}"
        )
    return found


def require_travelling(key: str, value: object) -> None:
    """Raise `ConfigurationError` for a setting that is neither text nor number: Spark cannot send it to executors."""
    if not isinstance(value, str | int | float | bool):
        remedy = (
            "name the function as text, 'module:function', and install its module there"
            if key == KEY
            else "use settings that are texts or numbers"
        )
        raise ConfigurationError(
            f"config[{key!r}] is a {type(value).__name__}, which cannot travel to Spark's executors; {remedy}"
        )


def portable(config: ClientConfig) -> dict[str, Any]:
    """Return the client settings for Spark's executors.

    Callbacks and the log stay in this process. A callback that gives credentials raises `ConfigurationError`: executors
    would have none.
    """
    require_travelling(KEY, config.get(KEY, ""))
    return {key: value for key, value in config.items() if not callable(value) and key != "logger"}
