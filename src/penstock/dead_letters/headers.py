"""Which headers a dead letter carries, in Kafka's format or Spring's, and how they are read back.

Writing never raises: a dead letter that cannot be described must still be written. Reading trusts nothing: a field that
cannot be what it claims to be is None. A record that dies again gets the headers of its last death alone.

Sources: KIP-1191 for Kafka's names, all values text. For Spring's, `KafkaHeaders` and `DeadLetterPublishingRecoverer`
of spring-kafka: text, save that the partition is a big-endian int of 4 bytes, and offset and timestamp one of 8.
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

#: Names the place a message was replayed from: "topic/partition/offset".
REPLAYED_FROM = "penstock-replayed-from"

#: Characters kept of a stack trace and of every other text.
MAX_STACK_CHARS = 8192
MAX_TEXT_CHARS = 1024

#: Begins the headers of a message in a retry topic.
RETRY_PREFIX = "penstock-retry-"

_KAFKA = "__dlq.errors."
_PENSTOCK = "penstock-exception-"
_SPRING = "kafka_dlt-"
#: Spring wraps what a listener raised in this class; the cause says more.
_SPRING_WRAPPER = "ListenerExecutionFailedException"
#: `TimestampType.name` of Kafka's Java client, by the number of `Record.timestamp()`.
_TIMESTAMP_TYPES = ("NoTimestampType", "CreateTime", "LogAppendTime")

_INT_BYTES = 4
_LONG_BYTES = 8
_MAX_INT = (1 << 31) - 1
_MAX_LONG = (1 << 63) - 1
_DIGITS = re.compile(r"[0-9]{1,19}")


class DeadLetterFormat(Enum):
    """How a dead letter says where it comes from."""

    KAFKA = "kafka"
    SPRING = "spring"


@dataclass(frozen=True, slots=True)
class _Codec:
    """How a field stands in a header, and is read back: None where it cannot be what it claims to be."""

    encode: Callable[[Any], bytes | None] = field(repr=False)
    decode: Callable[[HeaderValue], Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class DeadLetterOrigin:
    """Where a dead letter comes from and why it died. A field is None where it is not known."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    #: The consumer group that gave it up.
    group: str | None = None
    #: How often it was tried; Spring's format does not tell.
    attempts: int | None = None
    #: Class of the last error, with its module.
    exception: str | None = None
    message: str | None = field(default=None, repr=False)
    stack: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, record: Record, error: BaseException, *, group: str, attempts: int) -> Self:
        """Describe a record that is given up; whatever the error does when it is printed, nothing is raised."""
        kind = type(error)
        try:
            message = str(error)
        except Exception as unprintable:  # noqa: BLE001 - the user's __str__ may raise anything
            message = f"(its text cannot be had: {type(unprintable).__name__})"
        try:
            stack = "".join(traceback.format_exception(error))
        except Exception as unprintable:  # noqa: BLE001 - the same
            stack = f"(its stack cannot be had: {type(unprintable).__name__})"
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


def default_topic(letter_format: DeadLetterFormat) -> str:
    """Return the name of the dead-letter topic where the user gives none; `{topic}` stands for the message's."""
    return "dlq.{topic}" if letter_format is DeadLetterFormat.KAFKA else "{topic}-dlt"


def write(letter_format: DeadLetterFormat, record: Record, origin: DeadLetterOrigin) -> HeaderList:
    """Return the headers of a dead letter: the record's own, then those that tell of its death. Never raises.

    Headers of an earlier death are left out, and so are fields of `origin` that are None.
    """
    values = ((name, getattr(origin, field), codec) for name, field, codec in _FIELDS[letter_format])
    fields = [(name, codec.encode(value)) for name, value, codec in values if value is not None]
    if letter_format is DeadLetterFormat.SPRING:
        kind, milliseconds = record.timestamp()
        known = kind if 0 <= kind < len(_TIMESTAMP_TYPES) else 0
        fields.append((f"{_SPRING}original-timestamp", _binary(_LONG_BYTES).encode(milliseconds)))
        fields.append((f"{_SPRING}original-timestamp-type", _encoded(_TIMESTAMP_TYPES[known])))
    return [*own_headers(record), *((name, value) for name, value in fields if value is not None)]


def own_headers(record: Record) -> HeaderList:
    """Return a record's headers without those that penstock gave it (`strip`). Never raises."""
    return strip(readable_headers(record))


def read(headers: Iterable[tuple[str, HeaderValue]]) -> DeadLetterOrigin | None:
    """Return what the headers of a dead letter tell, in whichever format; None where they tell nothing. Never raises.

    Of a name that stands more than once the last counts, and so does the format that was written last.
    """
    last: dict[str, HeaderValue] = {}
    letter_format = None
    for name, value in headers:
        last[name] = value
        if name.startswith(_KAFKA):
            letter_format = DeadLetterFormat.KAFKA
        elif name.startswith(_SPRING):
            letter_format = DeadLetterFormat.SPRING
    if letter_format is None:
        return None
    found = {field: codec.decode(last.get(name)) for name, field, codec in _FIELDS[letter_format]}
    if letter_format is DeadLetterFormat.SPRING and (found["exception"] or _SPRING_WRAPPER).endswith(_SPRING_WRAPPER):
        found["exception"] = _decoded(last.get(f"{_SPRING}exception-cause-fqcn")) or found["exception"]
    return DeadLetterOrigin(**found)


def strip(headers: Iterable[tuple[str, HeaderValue]]) -> HeaderList:
    """Return the headers without those that tell of a death, in either format, or of a stay in a retry topic.

    A mark that the own headers were lost stays: the message is not what it was.
    """
    return [(name, value) for name, value in headers if not name.startswith((_KAFKA, _PENSTOCK, _SPRING, RETRY_PREFIX))]


def replayed(headers: Iterable[tuple[str, HeaderValue]], topic: str, partition: int, offset: int) -> HeaderList:
    """Return the headers of a message that goes back to work, with the place of its dead letter as the last."""
    kept = [(name, value) for name, value in strip(headers) if name != REPLAYED_FROM]
    return [*kept, (REPLAYED_FROM, f"{topic}/{partition}/{offset}")]


def _encoded(text: str) -> bytes:
    """Return UTF-8, whatever surrogates the text holds."""
    return text[:MAX_TEXT_CHARS].encode("utf-8", "backslashreplace")


def _encoded_stack(text: str) -> bytes:
    """Return the end of a stack: what was called last stands there."""
    return text[-MAX_STACK_CHARS:].encode("utf-8", "backslashreplace")


def _decoded(value: HeaderValue, limit: int = MAX_TEXT_CHARS) -> str | None:
    if value is None:
        return None
    # A character takes four bytes at most: what is cut off first was never going to be kept.
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
    """Return the codec of a big-endian two's complement; what does not fit is left out."""
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

#: Of each format: the header of each field of `DeadLetterOrigin`, in the order in which they are written.
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
