"""`Outgoing`: a message to publish, returned by a handler or sent in a transaction; and the one check of its parts.

Parts that fail the check must not reach the client library: a header name with a lone surrogate ends the process, one
with a NUL is published cut, and others raise various errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from penstock.errors import ConfigurationError

#: Names and values in their order, or a mapping of them.
UserHeaders = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]


@dataclass(slots=True)
class Outgoing:
    """A message to publish.

    Attributes:
        topic: the target topic, which must exist.
        value: bytes, or text, which is written as UTF-8; None is a tombstone. A handler with an `encoder` may return
            any value that its encoder accepts.
        key: bytes, text or None. Encoders do not apply to it.
        headers: its headers; in a transaction, names must not begin with `penstock-`.
        partition: the target partition; None: Kafka's partitioner chooses.
    """

    topic: str
    value: Any = field(repr=False)
    key: bytes | str | None = field(default=None, repr=False)
    headers: UserHeaders = field(default=(), repr=False)
    partition: int | None = None


#: A Kafka topic name (`Topic.LEGAL_CHARS`), bar `.` and `..`.
_TOPIC_NAME = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9._-]{1,249}")
_MOST_PARTITIONS = 1 << 31


@lru_cache(maxsize=1024)
def is_topic_name(name: str) -> bool:
    """Tell whether Kafka accepts a topic name."""
    return _TOPIC_NAME.fullmatch(name) is not None


def require_topic_name(option: str, name: object) -> None:
    """Raise `ConfigurationError` unless Kafka accepts this topic name."""
    if not isinstance(name, str) or not is_topic_name(name):
        raise ConfigurationError(
            f"{option} must be a topic's name, but is {name!r}; give 1 to 249 letters, digits, dots, underscores or "
            "hyphens"
        )


def require_place(topic: object, partition: object) -> None:
    """Raise `ConfigurationError` unless topic and partition are valid; None stands for any partition."""
    if not isinstance(topic, str) or not is_topic_name(topic):
        require_topic_name("topic", topic)
    if partition is None:
        return
    if not isinstance(partition, int) or isinstance(partition, bool) or not 0 <= partition < _MOST_PARTITIONS:
        raise ConfigurationError(f"partition must be a number from 0, or None, but is {partition!r}")


def encoded(option: str, content: object) -> bytes | None:
    """Return bytes unchanged and text as UTF-8; other values raise `ConfigurationError`."""
    if content is None or isinstance(content, bytes):
        return content
    if isinstance(content, str):
        try:
            return content.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"{option} is text that cannot be encoded as UTF-8; encode it first") from error
    raise ConfigurationError(
        f"{option} must be bytes, text or None, but is a {type(content).__name__}; encode it first"
    )


def as_headers(headers: UserHeaders) -> list[tuple[str, bytes | None]]:
    """Return headers as they are sent; invalid ones raise `ConfigurationError`."""
    pairs: Iterable[object] = headers.items() if isinstance(headers, Mapping) else headers
    try:
        listed = list(pairs)
    except TypeError:
        listed = [headers]
    checked = []
    for pair in listed:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:  # noqa: PLR2004 - a name and a value
            raise ConfigurationError(
                "headers must be a mapping, or pairs of a name and a value, but among them is a "
                f"{type(pair).__name__} that is no pair"
            )
        name, content = pair
        if not isinstance(name, str) or "\0" in name:
            raise ConfigurationError(f"header names must be text without NUL characters, but one is {name!r}")
        encoded("a header's name", name)
        checked.append((name, encoded(f"header {name}", content)))
    return checked
