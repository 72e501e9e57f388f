"""Encoders: what makes the value of a published message of the object that a handler returns."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

from penstock.consumer.handlers.serialization.serdes import RecordEncoder, record_encoder
from penstock.errors import ConfigurationError

#: Makes bytes, or text, of an object.
Encode = Callable[[Any], bytes | str | None]
#: What a handler encodes with: the value alone, or the value for a topic, with headers.
Encoder = Encode | RecordEncoder
#: A name, a model class, a serializer of confluent-kafka, or a callable of an object.
EncoderSpec = str | type | Encode | None


def encoder_of(given: EncoderSpec) -> Encoder | None:
    """Return the function that encodes a value, or None.

    Args:
        given: "json"; a pydantic model (known by `model_dump_json`); a msgspec struct (known by `__struct_fields__`,
            encoded as JSON); a serializer of confluent-kafka, which gets the topic and the headers; or any callable
            of an object that returns bytes or text.

    Raises:
        ConfigurationError: it is none of these.
    """
    if given is None:
        return None
    if given == "json":
        return _json
    dump: Encode | None = getattr(given, "model_dump_json", None)
    if dump is not None:
        return dump
    if hasattr(given, "__struct_fields__"):
        encode: Encode = import_module("msgspec").json.encode  # the user's own package: a struct of it was given
        return encode
    if (serializing := record_encoder(given)) is not None:
        return serializing
    if isinstance(given, str) or not callable(given):
        raise ConfigurationError(
            "encoder must be 'json', a pydantic model, a msgspec struct, a serializer of confluent-kafka or a callable "
            f"of an object, but is {given!r}"
        )
    return given


def _json(value: object) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # A lone surrogate, which `decoder="json"` takes, has no UTF-8: this writes it as JSON's own escape.
    return text.encode("utf-8", "backslashreplace")
