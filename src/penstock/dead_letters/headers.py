"""The headers of a dead letter, in Kafka's format or Spring's: encoding and decoding.

Encoding never raises: a dead letter must be written even if its error has no text. Decoding trusts nothing: an invalid
field is None. If a record becomes a dead letter again, it gets only the headers of the last time.

Sources: KIP-1191 for Kafka's names; all values are text. `KafkaHeaders` and `DeadLetterPublishingRecoverer` of
spring-kafka for Spring's: text, except the partition (big-endian int of 4 bytes), the offset and the timestamp (of 8).
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from penstock.message import Record, readable_headers
from penstock.outgoing import is_topic_name

HeaderValue = str | bytes | None
HeaderList = list[tuple[str, HeaderValue]]

#: The header with the place of the replayed dead letter: "topic/partition/offset".
REPLAYED_FROM = "penstock-replayed-from"

#: The length limits of a stack trace and of every other text, in characters.
MAX_STACK_CHARS = 8192
MAX_TEXT_CHARS = 1024

#: The prefix of headers of a message in a retry topic.
RETRY_PREFIX = "penstock-retry-"

_KAFKA = "__dlq.errors."
_PENSTOCK = "penstock-exception-"
_SPRING = "kafka_dlt-"
#: Spring wraps a listener's exception in this class; the cause says more.
_SPRING_WRAPPER = "ListenerExecutionFailedException"
#: `TimestampType.name` of Kafka's Java client, by the number of `Record.timestamp()`.
_TIMESTAMP_TYPES = ("NoTimestampType", "CreateTime", "LogAppendTime")

_INT_BYTES = 4
_LONG_BYTES = 8
_MAX_INT = (1 << 31) - 1
_MAX_LONG = (1 << 63) - 1
_DIGITS = re.compile(r"[0-9]{1,19}")


class DeadLetterFormat(Enum):
    """The format of a dead letter's headers."""

    KAFKA = "kafka"
    SPRING = "spring"


@dataclass(frozen=True, slots=True)
class _Codec:
    """The codec of a field: `decode` returns None for an invalid value."""

    encode: Callable[[Any], bytes | None] = field(repr=False)
    decode: Callable[[HeaderValue], Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class DeadLetterOrigin:
    """The origin of a dead letter and its error. Unknown fields are None."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    #: The consumer group that gave it up.
    group: str | None = None
    #: The number of attempts; Spring's format lacks it.
    attempts: int | None = None
    #: The class of the last error, with its module.
    exception: str | None = None
    message: str | None = field(default=None, repr=False)
    stack: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, record: Record, error: BaseException, *, group: str, attempts: int) -> Self:
        """Return the origin of a record that is given up. Never raises, even if printing the error raises."""
        kind = type(error)
        try:
            message = str(error)
        except Exception as unprintable:  # noqa: BLE001 - the user's __str__ may raise anything
            message = f"(its text raised {type(unprintable).__name__})"
        try:
            stack = "".join(traceback.format_exception(error))
        except Exception as unprintable:  # noqa: BLE001 - the same
            stack = f"(its stack raised {type(unprintable).__name__})"
        return cls(
            topic=record.topic(),
            partition=record.partition(),
            offset=record.offset(),
            group=group,
            attempts=attempts,
            exception=f"{kind.__module__}.{kind.__qualname__}",
            message=message,
            stack=stack,
        )


def default_topic(header_format: DeadLetterFormat) -> str:
    """Return the default name of the dead-letter topic; `{topic}` is the message's topic."""
    return "dlq.{topic}" if header_format is DeadLetterFormat.KAFKA else "{topic}-dlt"


def write(header_format: DeadLetterFormat, record: Record, origin: DeadLetterOrigin) -> HeaderList:
    """Return the headers of a dead letter: the record's own, then those of its origin and error. Never raises.

    Headers of an earlier dead letter are left out, and so are fields of `origin` that are None.
    """
    values = ((name, getattr(origin, field), codec) for name, field, codec in _FIELDS[header_format])
    fields = [(name, codec.encode(value)) for name, value, codec in values if value is not None]
    if header_format is DeadLetterFormat.SPRING:
        kind, milliseconds = record.timestamp()
        known = kind if 0 <= kind < len(_TIMESTAMP_TYPES) else 0
        fields.append((f"{_SPRING}original-timestamp", _binary(_LONG_BYTES).encode(milliseconds)))
        fields.append((f"{_SPRING}original-timestamp-type", _encoded(_TIMESTAMP_TYPES[known])))
    return [*own_headers(record), *((name, value) for name, value in fields if value is not None)]


def own_headers(record: Record) -> HeaderList:
    """Return a record's headers without penstock's own (see `strip`). Never raises."""
    return strip(readable_headers(record))


def read(headers: Iterable[tuple[str, HeaderValue]]) -> DeadLetterOrigin | None:
    """Return the origin of a dead letter by its headers, in either format; None without such headers. Never raises.

    If a name occurs more than once, the last one counts; if both formats occur, the last one counts.
    """
    last: dict[str, HeaderValue] = {}
    header_format = None
    for name, value in headers:
        last[name] = value
        if name.startswith(_KAFKA):
            header_format = DeadLetterFormat.KAFKA
        elif name.startswith(_SPRING):
            header_format = DeadLetterFormat.SPRING
    if header_format is None:
        return None
    found = {field: codec.decode(last.get(name)) for name, field, codec in _FIELDS[header_format]}
    if header_format is DeadLetterFormat.SPRING and (found["exception"] or _SPRING_WRAPPER).endswith(_SPRING_WRAPPER):
        found["exception"] = _decoded(last.get(f"{_SPRING}exception-cause-fqcn")) or found["exception"]
    return DeadLetterOrigin(**found)


def strip(headers: Iterable[tuple[str, HeaderValue]]) -> HeaderList:
    """Return the headers without those of dead letters, in either format, and of retry topics.

    The mark that the own headers were lost stays, because the message is incomplete.
    """
    return [(name, value) for name, value in headers if not name.startswith((_KAFKA, _PENSTOCK, _SPRING, RETRY_PREFIX))]


def replayed(headers: Iterable[tuple[str, HeaderValue]], topic: str, partition: int, offset: int) -> HeaderList:
    """Return the headers of a replayed message; the last one is the place of its dead letter."""
    kept = [(name, value) for name, value in strip(headers) if name != REPLAYED_FROM]
    return [*kept, (REPLAYED_FROM, f"{topic}/{partition}/{offset}")]


def _encoded(text: str) -> bytes:
    """Return UTF-8, also if the text has lone surrogates."""
    return text[:MAX_TEXT_CHARS].encode("utf-8", "backslashreplace")


def _encoded_stack(text: str) -> bytes:
    """Return the end of a stack, which has the innermost calls."""
    return text[-MAX_STACK_CHARS:].encode("utf-8", "backslashreplace")


def _decoded(value: HeaderValue, limit: int = MAX_TEXT_CHARS) -> str | None:
    if value is None:
        return None
    # A character has at most four bytes, so the first cut removes nothing that the second would keep.
    text = value if isinstance(value, str) else value[: 4 * limit].decode("utf-8", "replace")
    return text[:limit] or None


def _topic(value: HeaderValue) -> str | None:
    text = _decoded(value)
    return text if text is not None and is_topic_name(text) else None


def _digits(highest: int) -> _Codec:
    def decoded(value: HeaderValue) -> int | None:
        text = _decoded(value)
        return int(text) if text is not None and _DIGITS.fullmatch(text) and int(text) <= highest else None

    return _Codec(lambda number: str(number).encode(), decoded)


def _binary(size: int) -> _Codec:
    """Return the codec of a big-endian signed integer; a number that does not fit is left out."""
    limit = 1 << (8 * size - 1)

    def encoded(number: int) -> bytes | None:
        return number.to_bytes(size, "big", signed=True) if -limit <= number < limit else None

    def decoded(value: HeaderValue) -> int | None:
        if not isinstance(value, bytes) or len(value) != size:
            return None
        number = int.from_bytes(value, "big", signed=True)
        return number if number >= 0 else None

    return _Codec(encoded, decoded)


_TEXT = _Codec(_encoded, _decoded)
_TOPIC = _Codec(_encoded, _topic)
_STACK = _Codec(_encoded_stack, lambda value: _decoded(value, MAX_STACK_CHARS))

#: For each format, in the order of writing: the header, the field of `DeadLetterOrigin` and the codec.
_FIELDS: Mapping[DeadLetterFormat, tuple[tuple[str, str, _Codec], ...]] = {
    DeadLetterFormat.KAFKA: (
        (f"{_KAFKA}topic", "topic", _TOPIC),
        (f"{_KAFKA}partition", "partition", _digits(_MAX_INT)),
        (f"{_KAFKA}offset", "offset", _digits(_MAX_LONG)),
        (f"{_KAFKA}group", "group", _TEXT),
        (f"{_KAFKA}delivery.count", "attempts", _digits(_MAX_INT)),
        (f"{_KAFKA}message", "message", _TEXT),
        (f"{_PENSTOCK}class", "exception", _TEXT),
        (f"{_PENSTOCK}stack", "stack", _STACK),
    ),
    DeadLetterFormat.SPRING: (
        (f"{_SPRING}exception-fqcn", "exception", _TEXT),
        (f"{_SPRING}exception-message", "message", _TEXT),
        (f"{_SPRING}exception-stacktrace", "stack", _STACK),
        (f"{_SPRING}original-topic", "topic", _TOPIC),
        (f"{_SPRING}original-partition", "partition", _binary(_INT_BYTES)),
        (f"{_SPRING}original-offset", "offset", _binary(_LONG_BYTES)),
        (f"{_SPRING}original-consumer-group", "group", _TEXT),
    ),
}
