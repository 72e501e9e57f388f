"""Decoders and filters: the `body` of a handler, filtered messages, and messages without a decoder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, NewType

import pydantic
import pytest
import typing_extensions
from confluent_kafka import KafkaError
from hypothesis import example, given, settings, strategies
from stepped_engine import SteppedEngine

from penstock.consumer import handler
from penstock.consumer.handlers.serialization import decoder_of, encoder_of
from penstock.errors import ConfigurationError
from penstock.message import Message
from penstock.testing import TestApp
from support.consumers import app_of


def test_values_are_decoded_and_what_cannot_be_goes_to_the_dead_letters_without_a_try() -> None:
    app, seen = app_of(), list[tuple[bytes | None, object]]()
    app.handler("t", decoder="json", on_failure="dead_letter")(lambda m: seen.append((m.value, m.body)))

    with TestApp(app) as test:
        for value in (b'{"id": 1}', b"\xff\xfe\x00", None, b"", b"[" * 100_000, b'"last"'):
            test.send("t", value, key="k")
        test.advance(2)
        letters, now = test.dead_letters("t"), test.statistics()

        assert test.committed("t") == {0: 6}

    assert seen == [(b'{"id": 1}', {"id": 1}), (None, None), (b'"last"', "last")]
    assert [letter.value for letter in letters] == [b"\xff\xfe\x00", b"", b"[" * 100_000]
    for letter in letters:
        assert letter.header("__dlq.errors.delivery.count") == b"1"
        assert letter.header("penstock-exception-class") == b"penstock.errors.MessageFormatError"
        assert (letter.header("__dlq.errors.message") or b"").startswith(b"the value cannot be decoded: ")
    assert (now.failed, now.retried, now.in_flight) == (3, 0, 0)


def test_what_a_filter_refuses_is_done_and_counted_and_never_holds_the_watermark() -> None:
    app, seen = app_of(), list[bytes | None]()
    app.handler("t", filter=lambda m: m.header("tag") == b"mine")(lambda m: seen.append(m.value))

    with TestApp(app) as test:
        for tag, count in (("other", 300), ("mine", 5), ("other", 300)):
            for number in range(count):
                test.send("t", tag, key=f"k{number % 9}", headers=[("tag", tag)])
        test.advance(2)
        now = test.statistics()

        assert test.committed("t") == {0: 605}

    assert seen == [b"mine"] * 5
    assert (now.filtered, now.handled, now.in_flight) == (600, 5, 0)


@dataclass
class Order:
    """A dataclass, as users write them."""

    number: int


class Typed(typing_extensions.TypedDict):
    """The same as a dictionary."""

    number: int


class Named(NamedTuple):
    """The same as a tuple."""

    number: int


class Model(pydantic.BaseModel):
    """The same as a model."""

    number: int


class Struct:
    """Replaces a msgspec struct, which is recognised by its fields."""

    __struct_fields__ = ("number",)


Checked = pydantic.dataclasses.dataclass(Order)
BODY = b'{"number": 7}'


@pytest.mark.parametrize(
    ("given", "value", "body"),
    [
        (Order, BODY, Order(7)),
        (Checked, BODY, Checked(7)),
        (Model, BODY, Model(number=7)),
        (Typed, BODY, {"number": 7}),
        (Named, BODY, Named(7)),
        (list[Order], b"[%s]" % BODY, [Order(7)]),
        (dict[str, int], BODY, {"number": 7}),
        (Order | None, BODY, Order(7)),
        (int, b"12", 12),
        (NewType("Renamed", Order), BODY, Order(7)),
        (bytes.decode, b"\xc3\xa9", "é"),
    ],
    ids=repr,
)
def test_a_type_that_tells_its_fields_decodes_json(given: Any, value: bytes, body: object) -> None:
    decode: Any = decoder_of(given)

    assert decode(value) == body
    if value == BODY and given != dict[str, int]:
        with pytest.raises(ValueError, match="number"):
            decode(b"{}")


def test_a_struct_is_decoded_by_the_package_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    class Decoder:
        def __init__(self, struct: type) -> None:
            self._struct = struct

        def decode(self, value: bytes) -> tuple[type, bytes]:
            return self._struct, value

    package = SimpleNamespace(Decoder=Decoder, schema=repr, encode=repr)
    monkeypatch.setitem(sys.modules, "msgspec", SimpleNamespace(json=package))

    decode = decoder_of(Struct)

    assert decode is not None
    assert decode(b"x") == (Struct, b"x")
    assert encoder_of(Struct) is repr


def test_a_class_of_which_no_package_has_a_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def schema(given: type) -> object:
        raise TypeError(f"there is no schema of {given.__name__}")

    # msgspec makes a decoder of any class, which then takes no value.
    package = SimpleNamespace(Decoder=lambda _: SimpleNamespace(decode=print), schema=schema, encode=repr)
    monkeypatch.setitem(sys.modules, "msgspec", SimpleNamespace(json=package))

    for option in ("decoder", "encoder"):
        with pytest.raises(ConfigurationError, match=f"{option}=Struct needs .*there is no schema of Struct"):
            handler(print, **{option: Struct})
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(ConfigurationError, match=r"decoder=Struct needs pydantic or msgspec.*msgspec is not installed"):
        handler(print, decoder=Struct)


@pytest.mark.parametrize("given", [str, bytes, bytearray, bool, dict, list, tuple, set])
def test_a_type_that_makes_anything_of_bytes_is_refused_with_what_to_write(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"give 'json' .*, bytes\.decode for text"):
        handler(print, decoder=given)


@pytest.mark.parametrize("where", ["decoder", "filter", "key"])
def test_what_is_no_exception_costs_its_message_and_not_the_consumer(where: str) -> None:
    def panics(given: object) -> bytes:
        value = given.value if isinstance(given, Message) else given
        if value == b"bad":
            raise KafkaError(KafkaError._FAIL)  # type: ignore[misc] # it can be raised
        return b"fine"

    seen: list[bytes | None] = []
    options: dict[str, Callable[..., bytes]] = {where: panics}
    stepped = SteppedEngine({"t": handler(lambda one: seen.append(one.value), on_failure="drop", **options)})  # type: ignore[arg-type] # one of three

    stepped.feed("t", (b"a", b"bad"), (b"b", b"good"))
    stepped.serve()
    for _ in range(30):
        stepped.pass_time(10)

    assert seen == [b"good"]
    assert stepped.count("dropped") == 1
    assert stepped.of("t").tracker.in_flight == 0


@pytest.mark.parametrize("given", ["xml", 7, b"json", object(), Model(number=7)])
def test_what_is_no_decoder_is_refused(given: object) -> None:
    with pytest.raises(ConfigurationError, match="decoder must be 'json'"):
        handler(print, decoder=given)  # type: ignore[arg-type] # that is what is tested


@settings(max_examples=40)
@given(
    strategies.one_of(
        strategies.binary(),
        strategies.recursive(
            strategies.none() | strategies.booleans() | strategies.floats() | strategies.text(),
            lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text(), inner),
        ).flatmap(
            lambda body: strategies.sampled_from(["utf-8", "utf-16", "utf-16-le", "utf-32", "utf-8-sig"]).map(
                lambda encoding: json.dumps(body).encode(encoding)
            )
        ),
    )
)
@example(b" 1 ")
@example(b"1\n")
@example(b"1 2")
@example(b"")
@example(b"1\x00")
@example(b"NaN")
@example(b'"\xed\xa0\x80"')
@example(b'{"a": 1, "a": 2}')
def test_json_is_decoded_as_json_loads_does(value: bytes) -> None:
    decode = decoder_of("json")
    assert callable(decode)

    found, wanted = _outcome(decode, value), _outcome(json.loads, value)

    assert found == wanted or _is_nan(found, wanted)


def _outcome(decode: Callable[[bytes], Any], value: bytes) -> tuple[type, object]:
    try:
        return type(None), decode(value)
    except ValueError as error:
        return type(error), str(error)


def _is_nan(found: tuple[type, object], wanted: tuple[type, object]) -> bool:
    # Not equal to itself, wherever it stands.
    return "nan" in repr(wanted) and repr(found) == repr(wanted)
