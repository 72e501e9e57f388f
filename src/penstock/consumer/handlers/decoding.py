"""Decoders: what makes a message's `body` of its value."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module

from penstock.errors import ConfigurationError

Decoder = Callable[[bytes], object]
#: A name, a model class, or a callable of bytes.
DecoderSpec = str | type | Decoder | None


def decoder_of(given: DecoderSpec) -> Decoder | None:
    """Return the function that decodes a value, or None; `ConfigurationError` where nothing can be made of it.

    A pydantic model is known by `model_validate_json`, a msgspec struct, decoded from JSON, by `__struct_fields__`.
    """
    if given is None:
        return None
    if given == "json":
        return json.loads
    validate: Decoder | None = getattr(given, "model_validate_json", None)
    if validate is not None:
        return validate
    if hasattr(given, "__struct_fields__"):
        # The user's own package: a struct of it was given.
        decode: Decoder = import_module("msgspec").json.Decoder(given).decode
        return decode
    if isinstance(given, str) or not callable(given):
        raise ConfigurationError(
            f"decoder must be 'json', a pydantic model, a msgspec struct or a callable of bytes, but is {given!r}"
        )
    return given
