"""The headers of dead letters: in two formats, and read back, also if they are forged. Pure."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dead_letters.headers import (
    MAX_STACK_CHARS,
    MAX_TEXT_CHARS,
    REPLAYED_FROM,
    DeadLetterFormat,
    DeadLetterOrigin,
    HeaderValue,
    read,
    replayed,
    strip,
    write,
)
from penstock.message import HEADERS_LOST, FixedRecord

FORMATS = pytest.mark.parametrize("letter_format", list(DeadLetterFormat))
OURS = ("__dlq.errors.", "kafka_dlt-", "penstock-exception-")


class UnreadableHeaders(FixedRecord):
    """A record with a header whose name is not UTF-8, as the client library shows it."""

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def record(*headers: tuple[str, bytes | None], kind: type[FixedRecord] = FixedRecord) -> FixedRecord:
    return kind("orders", 3, 1_234_567_890_123, b"key", b"value", headers, 1_700_000_000_000)


def failure(text: str = "it broke") -> Exception:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError(text)
    return caught.value


def origin(error: BaseException | None = None) -> DeadLetterOrigin:
    return DeadLetterOrigin.of(record(), error or failure(), group="billing", attempts=5)


def as_read(headers: list[tuple[str, HeaderValue]]) -> list[tuple[str, bytes | None]]:
    """Return headers as a consumer sees them: text has become bytes."""
    return [(name, value.encode() if isinstance(value, str) else value) for name, value in headers]


def test_kafkas_headers_are_those_of_kip_1191_and_all_text() -> None:
    headers = dict(write(DeadLetterFormat.KAFKA, record(), origin()))

    stack = headers.pop("penstock-exception-stack")
    assert isinstance(stack, bytes)
    assert b"Traceback" in stack
    assert headers == {
        "__dlq.errors.topic": b"orders",
        "__dlq.errors.partition": b"3",
        "__dlq.errors.offset": b"1234567890123",
        "__dlq.errors.group": b"billing",
        "__dlq.errors.delivery.count": b"5",
        "__dlq.errors.message": b"it broke",
        "penstock-exception-class": b"builtins.RuntimeError",
    }


def test_springs_headers_are_those_of_its_recoverer_with_binary_numbers() -> None:
    headers = dict(write(DeadLetterFormat.SPRING, record(), origin()))

    stack = headers.pop("kafka_dlt-exception-stacktrace")
    assert isinstance(stack, bytes)
    assert b"Traceback" in stack
    assert headers == {
        "kafka_dlt-exception-fqcn": b"builtins.RuntimeError",
        "kafka_dlt-exception-message": b"it broke",
        "kafka_dlt-original-topic": b"orders",
        "kafka_dlt-original-partition": struct.pack(">i", 3),
        "kafka_dlt-original-offset": struct.pack(">q", 1_234_567_890_123),
        "kafka_dlt-original-timestamp": struct.pack(">q", 1_700_000_000_000),
        "kafka_dlt-original-timestamp-type": b"CreateTime",
        "kafka_dlt-original-consumer-group": b"billing",
    }


@FORMATS
def test_what_is_written_is_read_back(letter_format: DeadLetterFormat) -> None:
    written = origin()

    found = read(as_read(write(letter_format, record(("own", b"1")), written)))

    assert found is not None
    assert found.attempts == (5 if letter_format is DeadLetterFormat.KAFKA else None)
    for field in ("topic", "partition", "offset", "group", "exception", "message", "stack"):
        assert getattr(found, field) == getattr(written, field), field


@FORMATS
@settings(max_examples=40)
@given(
    own=st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: not name.startswith(OURS)),
            st.none() | st.binary(),
        )
    )
)
def test_own_headers_stand_first_and_strip_gives_them_back(
    letter_format: DeadLetterFormat, own: list[tuple[str, bytes | None]]
) -> None:
    written = write(letter_format, record(*own), origin())

    assert written[: len(own)] == own
    assert strip(as_read(written)) == own


@FORMATS
@pytest.mark.parametrize("earlier", list(DeadLetterFormat))
def test_a_record_that_dies_again_and_again_carries_the_headers_of_one_death(
    letter_format: DeadLetterFormat, earlier: DeadLetterFormat
) -> None:
    headers = as_read(write(earlier, record(("own", b"1")), origin(failure("the first death"))))
    first_length = len(write(letter_format, record(("own", b"1")), origin()))

    for number in range(5):
        headers = as_read(write(letter_format, record(*headers), origin(failure(f"death {number}"))))

    found = read(headers)
    assert found is not None
    assert found.message == "death 4"
    assert len(headers) == first_length


@FORMATS
def test_a_header_name_that_is_not_utf_8_costs_the_own_headers_and_says_so(letter_format: DeadLetterFormat) -> None:
    headers = write(letter_format, record(kind=UnreadableHeaders), origin())

    assert headers[0][0] == HEADERS_LOST
    found = read(as_read(headers))
    assert found is not None
    assert found.topic == "orders"
    assert [name for name, _ in strip(headers)] == [HEADERS_LOST]


@FORMATS
def test_an_error_that_cannot_be_printed_is_written_all_the_same(letter_format: DeadLetterFormat) -> None:
    headers = write(letter_format, record(), origin(UnprintableError()))

    found = read(as_read(headers))
    assert found is not None
    assert found.exception is not None
    assert found.exception.endswith("UnprintableError")
    assert found.message == "(its text raised RuntimeError)"


def test_headers_that_tell_of_no_death_are_no_origin() -> None:
    assert read([]) is None
    assert read([("traceparent", b"00-1-2-01"), ("penstock-exception-class", b"x")]) is None


def test_a_name_that_stands_twice_counts_by_its_last_and_so_does_the_format() -> None:
    forged = [("__dlq.errors.topic", b"payments"), ("kafka_dlt-original-topic", b"salaries")]

    found = read([*forged, *as_read(write(DeadLetterFormat.KAFKA, record(), origin()))])

    assert found is not None
    assert found.topic == "orders"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("__dlq.errors.topic", b"../etc"),
        ("__dlq.errors.topic", b".."),
        ("__dlq.errors.topic", b"x" * 250),
        ("__dlq.errors.topic", b"orders\n"),
        ("__dlq.errors.topic", None),
        ("__dlq.errors.partition", b"-1"),
        ("__dlq.errors.partition", b"2147483648"),
        ("__dlq.errors.partition", b"1_0"),
        ("__dlq.errors.partition", "\u0661".encode()),
        ("__dlq.errors.offset", b"9223372036854775808"),
        ("__dlq.errors.offset", b"9" * 10_000),
        ("__dlq.errors.offset", b" 1"),
        ("__dlq.errors.delivery.count", b""),
        ("kafka_dlt-original-partition", b"3"),
        ("kafka_dlt-original-partition", b"\xff\xff\xff\xff"),
        ("kafka_dlt-original-offset", b"\x00" * 9),
    ],
)
def test_a_field_that_cannot_be_what_it_claims_is_none(name: str, value: bytes | None) -> None:
    assert read([(name, value)]) == DeadLetterOrigin()


NAMES = [
    name
    for letter_format in DeadLetterFormat
    for name, _ in write(letter_format, record(), DeadLetterOrigin("t", 0, 0, "g", 1, "e", "m", "s"))
]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*NAMES, REPLAYED_FROM, HEADERS_LOST, "__dlq.errors.", "kafka_dlt-"]) | st.text(),
            st.none() | st.binary() | st.text() | st.integers(0, 1 << 70).map(lambda number: str(number).encode()),
        )
    )
)
def test_forged_headers_are_read_without_an_error_and_within_bounds(headers: list[tuple[str, HeaderValue]]) -> None:
    found = read(headers)

    if found is not None:
        assert found.partition is None or 0 <= found.partition < 1 << 31
        assert found.offset is None or 0 <= found.offset < 1 << 63
        assert len(found.topic or "") <= 249
        assert len(found.message or "") <= MAX_TEXT_CHARS
        assert len(found.stack or "") <= MAX_STACK_CHARS
    assert read(strip(headers)) is None


def test_a_replayed_message_names_its_last_dead_letter_once() -> None:
    headers = as_read(
        write(DeadLetterFormat.KAFKA, record(("own", b"1"), (REPLAYED_FROM, b"dlq.orders/0/1")), origin())
    )

    assert replayed(headers, "dlq.orders", 2, 77) == [("own", b"1"), (REPLAYED_FROM, "dlq.orders/2/77")]
