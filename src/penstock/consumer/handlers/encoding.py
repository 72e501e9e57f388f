"""Encoders: what makes the value of a published message of the object that a handler returns."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

from penstock.errors import ConfigurationError

#: Makes bytes, or text, of an object.
Encoder = Callable[[Any], bytes | str | None]
#: A name, a model class, or a callable of an object.
EncoderSpec = str | type | Encoder | None


def encoder_of(given: EncoderSpec) -> Encoder | None:
    """Return the function that encodes a value, or None.

    Args:
        given: "json"; a pydantic model (known by `model_dump_json`); a msgspec struct (known by `__struct_fields__`,
            encoded as JSON); or any callable of an object that returns bytes or text.

    Raises:
        ConfigurationError: it is none of these.
    """
    if given is None:
        return None
    if given == "json":
        return _json
    dump: Encoder | None = getattr(given, "model_dump_json", None)
    if dump is not None:
        return dump
    if hasattr(given, "__struct_fields__"):
        encode: Encoder = import_module("msgspec").json.encode  # the user's own package: a struct of it was given
        return encode
    if isinstance(given, str) or not callable(given):
        raise ConfigurationError(
            f"encoder must be 'json', a pydantic model, a msgspec struct or a callable of an object, but is {given!r}"
        )
    return given


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
