"""Which headers a dead letter carries, in Kafka's format or Spring's, and how they are read back.

Writing never raises: a dead letter that cannot be described must still be written. Reading trusts nothing: a field that
cannot be what it claims to be is None. A record that dies again gets the headers of its last death alone.

Sources: KIP-1191 for Kafka's names, all values text. For Spring's, `KafkaHeaders` and `DeadLetterPublishingRecoverer`
of spring-kafka: text, save that the partition is a big-endian int of 4 bytes, and offset and timestamp one of 8.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

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
_SPRING_ORIGINAL = "kafka_dlt-original-"
_SPRING_EXCEPTION = "kafka_dlt-exception-"
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
    fields = _kafka_fields(origin) if letter_format is DeadLetterFormat.KAFKA else _spring_fields(origin, record)
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
    return _read_kafka(last) if letter_format is DeadLetterFormat.KAFKA else _read_spring(last)


def strip(headers: Iterable[tuple[str, HeaderValue]]) -> HeaderList:
    """Return the headers without those that tell of a death, in either format, or of a stay in a retry topic.

    A mark that the own headers were lost stays: the message is not what it was.
    """
    return [(name, value) for name, value in headers if not name.startswith((_KAFKA, _PENSTOCK, _SPRING, RETRY_PREFIX))]


def replayed(headers: Iterable[tuple[str, HeaderValue]], topic: str, partition: int, offset: int) -> HeaderList:
    """Return the headers of a message that goes back to work, with the place of its dead letter as the last."""
    kept = [(name, value) for name, value in strip(headers) if name != REPLAYED_FROM]
    return [*kept, (REPLAYED_FROM, f"{topic}/{partition}/{offset}")]


def _kafka_fields(origin: DeadLetterOrigin) -> HeaderList:
    return [
        (f"{_KAFKA}topic", _encoded(origin.topic)),
        (f"{_KAFKA}partition", _digits(origin.partition)),
        (f"{_KAFKA}offset", _digits(origin.offset)),
        (f"{_KAFKA}group", _encoded(origin.group)),
        (f"{_KAFKA}delivery.count", _digits(origin.attempts)),
        (f"{_KAFKA}message", _encoded(origin.message)),
        (f"{_PENSTOCK}class", _encoded(origin.exception)),
        (f"{_PENSTOCK}stack", _encoded_stack(origin.stack)),
    ]


def _spring_fields(origin: DeadLetterOrigin, record: Record) -> HeaderList:
    kind, milliseconds = record.timestamp()
    known = 0 <= kind < len(_TIMESTAMP_TYPES)
    return [
        (f"{_SPRING_EXCEPTION}fqcn", _encoded(origin.exception)),
        (f"{_SPRING_EXCEPTION}message", _encoded(origin.message)),
        (f"{_SPRING_EXCEPTION}stacktrace", _encoded_stack(origin.stack)),
        (f"{_SPRING_ORIGINAL}topic", _encoded(origin.topic)),
        (f"{_SPRING_ORIGINAL}partition", _binary(origin.partition, _INT_BYTES)),
        (f"{_SPRING_ORIGINAL}offset", _binary(origin.offset, _LONG_BYTES)),
        (f"{_SPRING_ORIGINAL}timestamp", _binary(milliseconds, _LONG_BYTES)),
        (f"{_SPRING_ORIGINAL}timestamp-type", _encoded(_TIMESTAMP_TYPES[kind] if known else _TIMESTAMP_TYPES[0])),
        (f"{_SPRING_ORIGINAL}consumer-group", _encoded(origin.group)),
    ]


def _read_kafka(headers: Mapping[str, HeaderValue]) -> DeadLetterOrigin:
    return DeadLetterOrigin(
        topic=_topic(headers.get(f"{_KAFKA}topic")),
        partition=_number(headers.get(f"{_KAFKA}partition"), _MAX_INT),
        offset=_number(headers.get(f"{_KAFKA}offset"), _MAX_LONG),
        group=_decoded(headers.get(f"{_KAFKA}group")),
        attempts=_number(headers.get(f"{_KAFKA}delivery.count"), _MAX_INT),
        exception=_decoded(headers.get(f"{_PENSTOCK}class")),
        message=_decoded(headers.get(f"{_KAFKA}message")),
        stack=_decoded(headers.get(f"{_PENSTOCK}stack"), MAX_STACK_CHARS),
    )


def _read_spring(headers: Mapping[str, HeaderValue]) -> DeadLetterOrigin:
    exception = _decoded(headers.get(f"{_SPRING_EXCEPTION}fqcn"))
    if exception is None or exception.endswith(_SPRING_WRAPPER):
        exception = _decoded(headers.get(f"{_SPRING_EXCEPTION}cause-fqcn")) or exception
    return DeadLetterOrigin(
        topic=_topic(headers.get(f"{_SPRING_ORIGINAL}topic")),
        partition=_integer(headers.get(f"{_SPRING_ORIGINAL}partition"), _INT_BYTES),
        offset=_integer(headers.get(f"{_SPRING_ORIGINAL}offset"), _LONG_BYTES),
        group=_decoded(headers.get(f"{_SPRING_ORIGINAL}consumer-group")),
        exception=exception,
        message=_decoded(headers.get(f"{_SPRING_EXCEPTION}message")),
        stack=_decoded(headers.get(f"{_SPRING_EXCEPTION}stacktrace"), MAX_STACK_CHARS),
    )


def _encoded(text: str | None) -> bytes | None:
    """Return UTF-8, whatever surrogates the text holds."""
    return None if text is None else text[:MAX_TEXT_CHARS].encode("utf-8", "backslashreplace")


def _encoded_stack(text: str | None) -> bytes | None:
    """Return the end of a stack: what was called last stands there."""
    return None if text is None else text[-MAX_STACK_CHARS:].encode("utf-8", "backslashreplace")


def _digits(number: int | None) -> bytes | None:
    return None if number is None else str(number).encode()


def _binary(number: int | None, size: int) -> bytes | None:
    """Return a big-endian two's complement; None for a number that does not fit."""
    limit = 1 << (8 * size - 1)
    return None if number is None or not -limit <= number < limit else number.to_bytes(size, "big", signed=True)


def _decoded(value: HeaderValue, limit: int = MAX_TEXT_CHARS) -> str | None:
    if value is None:
        return None
    # A character takes four bytes at most: what is cut off first was never going to be kept.
    text = value if isinstance(value, str) else value[: 4 * limit].decode("utf-8", "replace")
    return text[:limit] or None


def _topic(value: HeaderValue) -> str | None:
    text = _decoded(value)
    return text if text is not None and is_topic_name(text) else None


def _number(value: HeaderValue, highest: int) -> int | None:
    text = _decoded(value)
    if text is None or not _DIGITS.fullmatch(text):
        return None
    number = int(text)
    return number if number <= highest else None


def _integer(value: HeaderValue, size: int) -> int | None:
    if not isinstance(value, bytes) or len(value) != size:
        return None
    number = int.from_bytes(value, "big", signed=True)
    return number if number >= 0 else None
