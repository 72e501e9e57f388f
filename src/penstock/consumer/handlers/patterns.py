"""Topic patterns: which handler takes a topic that nobody named.

A topic is matched as a whole. Never matched: Kafka's internal topics, retry topics, the dead letters of these handlers,
and topics that have a handler of their own or are left to somebody else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from penstock import options as check
from penstock.consumer.handlers.handler import Handler
from penstock.consumer.handlers.options.handler_options import OnFailure
from penstock.consumer.retry_topics import is_retry_topic
from penstock.errors import ConfigurationError


def compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern as a user gave it; `ConfigurationError` where it is no regular expression, or is empty."""
    if not isinstance(pattern, str):
        raise ConfigurationError(
            f"pattern must be a regular expression as text, such as r'orders\\..*', but is a {type(pattern).__name__}"
        )
    if not pattern.strip():
        raise ConfigurationError("pattern is empty and matches no topic; give one such as r'orders\\..*', or r'.+'")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(f"pattern {pattern!r} is no regular expression of Python's: {error}") from error


def topics_or_pattern(topics: Collection[str], pattern: str | None) -> tuple[str, ...]:
    """Return the topics that a handler names, none where it has a pattern; `ConfigurationError` unless it has one."""
    if pattern is None:
        return check.names("topic", topics)
    if topics:
        raise ConfigurationError(
            f"a handler has topics, {', '.join(topics)}, or a pattern, {pattern!r}, not both: give one of them, or "
            "register the function once with each"
        )
    compiled(pattern)
    return ()


def register_pattern(patterns: dict[str, Handler], pattern: str, handler: Handler) -> None:
    """Let a handler have a pattern; `ConfigurationError` where another has it, or it would feed itself."""
    if pattern in patterns:
        raise ConfigurationError(
            f"pattern {pattern!r} has the handler {patterns[pattern].name} already; call both from one, or make a "
            "second App with another name"
        )
    require_other_target(pattern, handler)
    patterns[pattern] = handler


def require_other_target(pattern: str, handler: Handler) -> None:
    """Raise `ConfigurationError` where a handler would consume what it publishes."""
    if handler.to is not None and compiled(pattern).fullmatch(handler.to):
        raise ConfigurationError(
            f"handler {handler.name} publishes to {handler.to}, which its pattern {pattern!r} matches: one message "
            "would go round for ever; narrow the pattern, or give `to` another topic"
        )


@dataclass(frozen=True, slots=True)
class Matches:
    """What patterns have found among topics."""

    #: The handler of each topic.
    handlers: Mapping[str, Handler]
    #: Topics that several patterns match, each with the names of their handlers, those registered first in front.
    contested: Mapping[str, tuple[str, ...]]


def refuse_contested(contested: Mapping[str, tuple[str, ...]]) -> None:
    """Raise `ConfigurationError` where there is a topic that several patterns match."""
    for topic, names in contested.items():
        raise ConfigurationError(
            f"topic {topic} is matched by the patterns of several handlers: {', '.join(names)}; narrow the "
            "patterns, or give the topic a handler of its own by its name"
        )


@dataclass(slots=True, eq=False)
class TopicPatterns:
    """The patterns of one consumer, in the order they were registered. Never changed: any thread."""

    #: The handler of each pattern.
    patterns: Mapping[str, Handler]
    #: Those of topics by name.
    named: Mapping[str, Handler]
    #: Topics that no pattern takes.
    left_out: Collection[str] = ()
    _compiled: list[tuple[re.Pattern[str], Handler]] = field(init=False)
    _is_dead_letter: list[Callable[[str], bool]] = field(init=False)

    def __post_init__(self) -> None:
        self._compiled = [(compiled(pattern), handler) for pattern, handler in self.patterns.items()]
        named = [(re.compile(re.escape(topic)), handler) for topic, handler in self.named.items()]
        self._is_dead_letter = [
            _dead_letters_of(pattern, handler)
            for pattern, handler in (*named, *self._compiled)
            if handler.on_failure is OnFailure.DEAD_LETTER
        ]

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def matches(self, topics: Iterable[str]) -> Matches:
        """Return the handlers of those topics that patterns match; the first registered gets what several match."""
        handlers, contested = {}, {}
        for topic in topics:
            found = [handler for pattern, handler in self._compiled if pattern.fullmatch(topic)]
            if not found or self._is_reserved(topic):
                continue
            handlers[topic] = found[0]
            if len(found) > 1:
                contested[topic] = tuple(handler.name for handler in found)
        return Matches(handlers, contested)

    def without_topic(self, topics: Collection[str]) -> dict[str, Handler]:
        """Return the patterns, with their handlers, that match none of these topics."""
        return {
            pattern.pattern: handler for pattern, handler in self._compiled if not any(map(pattern.fullmatch, topics))
        }

    def _is_reserved(self, topic: str) -> bool:
        return (
            topic.startswith("__")
            or topic in self.named
            or topic in self.left_out
            or is_retry_topic(topic)
            or any(is_dead_letter(topic) for is_dead_letter in self._is_dead_letter)
        )


def _dead_letters_of(pattern: re.Pattern[str], handler: Handler) -> Callable[[str], bool]:
    """Return what knows the dead-letter topics of all topics that a pattern matches."""
    first, *rest = map(re.escape, handler.dead_letter_topic.split("{topic}"))
    # Each place holds the same name.
    text = first + "".join(("(?P<topic>.+)" if place == 0 else "(?P=topic)") + part for place, part in enumerate(rest))
    dead_letter_topic = re.compile(text)

    def is_dead_letter_topic(name: str) -> bool:
        found = dead_letter_topic.fullmatch(name)
        return found is not None and (not rest or pattern.fullmatch(found["topic"]) is not None)

    return is_dead_letter_topic
