"""Decoders: what makes a message's `body` of its value."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from types import UnionType
from typing import get_origin

from penstock.consumer.handlers.serialization.serdes import RecordDecoder, record_decoder
from penstock.errors import ConfigurationError

#: Makes a body of bytes.
Decode = Callable[[bytes], object]
#: What a handler decodes with: a value alone, or a record.
Decoder = Decode | RecordDecoder
#: A name, a type that JSON is checked against, a deserializer of confluent-kafka, or a callable of bytes.
DecoderSpec = str | type | UnionType | Decode | None

#: Types that make something of any bytes, or nothing of what they should.
_NO_DECODERS = (str, bool, dict, list, tuple, set, frozenset)
#: Where dataclasses, named tuples, attrs classes and typed dictionaries tell their fields.
_FIELDS = ("__dataclass_fields__", "_fields", "__attrs_attrs__", "__required_keys__")

_scan = json.JSONDecoder().raw_decode


def _decode_json(value: bytes) -> object:
    """Return what `json.loads` does, in half the time for the bytes that nearly all are: UTF-8 and no space before."""
    try:
        text = value.decode()
        body, end = _scan(text)
        if end == len(text):
            return body
    except ValueError:
        pass
    # Another encoding, space around it, or no JSON at all: where UTF-8 was read to its end, that says the same.
    return json.loads(value)


def decoder_of(given: DecoderSpec) -> Decoder | None:
    """Return the function that decodes a value, or None; `ConfigurationError` where nothing can be made of it.

    A deserializer of confluent-kafka gives what decodes a record: it gets the topic and the headers.
    """
    if given is None:
        return None
    if given == "json":
        return _decode_json
    if (decode := _decode_of_type(given)) is not None:
        return decode
    if (deserializing := record_decoder(given)) is not None:
        return deserializing
    if isinstance(given, str) or not callable(given):
        raise ConfigurationError(
            "decoder must be 'json', a pydantic model, a dataclass, a msgspec struct, a deserializer of "
            f"confluent-kafka or a callable of bytes, but is {_name_of(given)}"
        )
    return given


def _decode_of_type(given: object) -> Decode | None:
    """Return what decodes JSON as a type that tells what is in it; None for what is called with the bytes.

    A pydantic model is known by `model_validate_json`, a msgspec struct by `__struct_fields__`; dataclasses,
    `list[Model]` and the like are for whichever of the two packages is there.
    """
    if not isinstance(given, type):
        return None if get_origin(given) is None else _decode_as(given)
    validate: Decode | None = getattr(given, "model_validate_json", None)
    if validate is not None:
        return validate
    if hasattr(given, "__struct_fields__"):
        # The user's own package: a struct of it was given.
        decode: Decode = import_module("msgspec").json.Decoder(given).decode
        return decode
    if get_origin(given) is not None or any(hasattr(given, name) for name in _FIELDS):
        return _decode_as(given)
    if issubclass(given, _NO_DECODERS):
        raise ConfigurationError(
            f"decoder={given.__name__} decodes nothing: it makes of bytes what it likes; give 'json' for what JSON "
            "holds, bytes.decode for text, or a function of bytes"
        )
    return None


def _decode_as(given: object) -> Decode:
    """Return what decodes JSON as a type, by the first of the user's packages that knows it."""
    why = []
    for name in ("pydantic", "msgspec"):
        try:
            module = import_module(name)
            decode: Decode = (
                module.TypeAdapter(given).validate_json if name == "pydantic" else module.json.Decoder(given).decode
            )
        except ImportError:
            why.append(f"{name} is not installed")
        except Exception as error:  # noqa: BLE001 - each has its own for a type that it does not know
            why.append(f"{name} says: {(str(error).splitlines() or [type(error).__name__])[0]}")
        else:
            return decode
    raise ConfigurationError(
        f"decoder={_name_of(given)} needs pydantic or msgspec to be decoded from JSON ({'; '.join(why)}); install one "
        "of them, or give 'json' or a function of bytes"
    )


def _name_of(given: object) -> str:
    """Name what was given; of an object, which may hold anything, its type."""
    if isinstance(given, type):
        return given.__name__
    return repr(given) if isinstance(given, str | bytes | int) or get_origin(given) else f"a {type(given).__name__}"
