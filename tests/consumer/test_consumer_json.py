"""The decoder "json" says what `json.loads` says, in less time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import example, given, strategies

from penstock.consumer.handlers.serialization.decoding import decoder_of


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
