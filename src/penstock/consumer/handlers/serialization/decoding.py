"""Decoders: what makes a message's `body` of its value."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module

from penstock.consumer.handlers.serialization.serdes import RecordDecoder, record_decoder
from penstock.errors import ConfigurationError

#: Makes a body of bytes.
Decode = Callable[[bytes], object]
#: What a handler decodes with: a value alone, or a record.
Decoder = Decode | RecordDecoder
#: A name, a model class, a deserializer of confluent-kafka, or a callable of bytes.
DecoderSpec = str | type | Decode | None


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
    A pydantic model is known by `model_validate_json`, a msgspec struct, decoded from JSON, by `__struct_fields__`.
    """
    if given is None:
        return None
    if given == "json":
        return _decode_json
    validate: Decode | None = getattr(given, "model_validate_json", None)
    if validate is not None:
        return validate
    if hasattr(given, "__struct_fields__"):
        # The user's own package: a struct of it was given.
        decode: Decode = import_module("msgspec").json.Decoder(given).decode
        return decode
    if (deserializing := record_decoder(given)) is not None:
        return deserializing
    if isinstance(given, str) or not callable(given):
        raise ConfigurationError(
            "decoder must be 'json', a pydantic model, a msgspec struct, a deserializer of confluent-kafka or a "
            f"callable of bytes, but is {given!r}"
        )
    return given
