"""The attributes of a message, and the limits of outgoing ones."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigurationError
from penstock.fleet.page.server import _message_json
from penstock.group_offsets.oldest import Oldest
from penstock.message import FixedRecord, Message, timestamp_of
from penstock.transactions.messages import Terms, a_half


class Timed(FixedRecord):
    """A record of a producer that wrote -1 as time: it has the type of the producer's clock."""

    def timestamp(self) -> tuple[int, int]:
        return 1, -1


class Unreadable(FixedRecord):
    """A record with a header whose name is not UTF-8, as the client library shows it."""

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        raise SystemError("returned a result with an exception set")


@pytest.mark.parametrize("kind", [FixedRecord, Timed])
def test_a_record_without_a_time_has_none_and_no_age(kind: type[FixedRecord]) -> None:
    record = kind("t", 0, 5, b"k", b"v", (), None)

    assert Message(record).timestamp is None
    assert Oldest(5, timestamp_of(record)).age_s(1e9) is None
    assert _message_json(record)["timestamp"] is None


def test_a_header_that_cannot_be_read_does_not_keep_its_message_from_being_shown() -> None:
    shown = _message_json(Unreadable("t", 0, 5, b"k", b"v", (), None))

    assert shown["headers"] == [["penstock-headers-lost", "a header name is not UTF-8"]]
    assert shown["value"] == "v"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"topic": "o\0ut"}, "topic must be a topic's name"),
        ({"partition": 1 << 31}, "partition must be a number from 0"),
        ({"headers": {"a\0b": b""}}, "header names must be text without NUL"),
        ({"headers": {"\ud800": b""}}, "a header's name is text that cannot be encoded"),
        ({"headers": {"penstock-tx": b""}}, "header names must not begin with 'penstock-'"),
    ],
    ids=lambda one: str(next(iter(one))) if isinstance(one, dict) else "",
)
def test_a_half_is_checked_as_what_a_handler_returns(wrong: dict[str, object], text: str) -> None:
    given = {"topic": "out", "key": b"k", "value": b"v", "headers": (), "partition": None, **wrong}

    with pytest.raises(ConfigurationError, match=text):
        a_half("id", "g", Terms(), **given)  # type: ignore[arg-type] # that is what is tested
