"""The lists of a report: their fields, an encoder with a size limit, and a decoder. Pure.

Records may be forged, so the decoder refuses values of another type or size than a report can have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.fleet.wire import FLOAT, INTEGER, MOST_NUMBER, Field, text

ValueT = TypeVar("ValueT")

#: The length limit of a text in characters.
MOST_TEXT = 500
_MOST_ENTRIES = 2_000
#: The field of a report's texts, and the fields of its values by their type.
ANY_TEXT = text(MOST_TEXT)
_FIELD_OF_TYPE: Mapping[type, Field] = {str: ANY_TEXT, int: INTEGER, float: FLOAT}


@dataclass(frozen=True, slots=True)
class Entries:
    """The format of a list of a report.

    Attributes:
        fields: the types of an entry's values, by name. The encoder omits values that are None.
        defaults: the values that the encoder omits and the decoder fills in; None for all other fields.
        needed: the required fields.
        max_bytes: the size limit of the encoded list.
    """

    fields: Mapping[str, type]
    defaults: Mapping[str, Any]
    needed: Sequence[str]
    max_bytes: int

    @property
    def as_field(self) -> Field:
        """The field of the list; each decoded entry has all of `fields`."""
        what = f"a list of at most {_MOST_ENTRIES} objects, each with {' and '.join(self.needed)}"
        return Field(what, self._fits, is_needed=False, read=self._decoded)

    def _fits(self, value: object) -> bool:
        return isinstance(value, list) and len(value) <= _MOST_ENTRIES and all(map(self._is_entry, value))

    def _is_entry(self, entry: object) -> bool:
        if not isinstance(entry, dict):
            return False
        for name, value in entry.items():
            kind: Any = self.fields.get(name)
            # The usual case without a function call: calls would be most of the cost of decoding.
            is_valid = type(value) is kind and (
                len(value) <= MOST_TEXT if kind is str else -MOST_NUMBER < value < MOST_NUMBER
            )
            # Unknown fields are of a later version; they are ignored.
            if not is_valid and kind is not None and not _FIELD_OF_TYPE[kind].fits(value):
                return False
        return all(name in entry for name in self.needed)

    def _decoded(self, entries: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        defaults = {**dict.fromkeys(self.fields), **self.defaults}
        found = []
        for encoded in entries:
            entry = {**defaults, **encoded}
            if len(entry) > len(defaults):
                entry = {name: entry[name] for name in defaults}
            if "position" in entry and entry["position"] is None:
                entry["position"] = entry["watermark"]
            found.append(entry)
        return found

    def encode(self, entries: Iterable[Mapping[str, Any]], max_bytes: int | None = None) -> list[dict[str, Any]]:
        """Return the first encoded entries that fit into `max_bytes`; the limit of the format if it is None."""
        return fitting(map(self._encoded, entries), self.max_bytes if max_bytes is None else max_bytes)

    def _encoded(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        encoded = {}
        for name, kind in self.fields.items():
            value = entry.get(name)
            if value is None or (name in self.defaults and value == self.defaults[name]):
                continue
            if kind is str:
                value = value[:MOST_TEXT]
            elif kind is float:
                value = round(value, 3)
            encoded[name] = value
        if "position" in encoded and encoded["position"] == encoded.get("watermark"):
            del encoded["position"]
        return encoded


#: The fields of `Explanation` in the consumer, without the key. The list gets the space that the other lists leave.
PARTITIONS = Entries(
    {
        **dict.fromkeys(("topic", "paused", "handler", "state", "worker", "detail", "trouble", "key_hash"), str),
        **dict.fromkeys(("partition", "watermark", "position", "in_flight", "parked", "bytes_in_flight", "lag"), int),
        **dict.fromkeys(("gaps", "blocking_offset", "attempt", "over_time_limit"), int),
        **dict.fromkeys(("age", "due_in", "rate"), float),
    },
    {
        **dict.fromkeys(("in_flight", "parked", "bytes_in_flight", "gaps", "attempt", "over_time_limit"), 0),
        "watermark": -1,
        "handler": "",
        "state": "idle",
    },
    ("topic", "partition"),
    64 << 10,
)
PARKED = Entries(
    {
        **dict.fromkeys(("topic", "handler", "state", "key_hash"), str),
        **dict.fromkeys(("partition", "offset", "attempt"), int),
        **dict.fromkeys(("age", "due_in"), float),
    },
    {"state": "parked", "attempt": 0, "handler": ""},
    ("topic", "partition", "offset"),
    8 << 10,
)
#: The fields of `SinkStatistics` in the Spark engine, without its partitions.
SINKS = Entries(
    {
        **dict.fromkeys(("name", "state", "last_error", "holder"), str),
        **dict.fromkeys(("batch_id", "batches", "rows", "lag", "restarts"), int),
        **dict.fromkeys(("rows_per_s", "batch_seconds", "retry_in"), float),
    },
    {"state": "", "batches": 0, "rows": 0, "restarts": 0},
    ("name",),
    6 << 10,
)
#: Dead letters by error class: the count since the start, the dead-letter topic, and the place of the last message.
DEAD_LETTERS = Entries(
    {
        **dict.fromkeys(("topic", "dead_letter_topic", "error"), str),
        **dict.fromkeys(("count", "partition", "offset"), int),
        "age": float,
    },
    {"dead_letter_topic": "", "error": "", "count": 0},
    ("topic",),
    4 << 10,
)
#: The fields of `PendingTransaction`; `topics` is one text.
TRANSACTIONS = Entries(
    {
        **dict.fromkeys(("id", "prefix", "group", "topics", "decided", "waits_for"), str),
        "checks": int,
        **dict.fromkeys(("age", "deliver_in"), float),
    },
    {"group": "", "topics": "", "checks": 0, "waits_for": "", "prefix": ""},
    ("id",),
    16 << 10,
)


def fitting(values: Iterable[ValueT], max_bytes: int) -> list[ValueT]:
    """Return the first values that together fit into `max_bytes` as JSON."""
    fits: list[ValueT] = []
    for value in values:
        max_bytes -= len(compact_json(value).encode()) + 1
        if max_bytes < 0 or len(fits) == _MOST_ENTRIES:
            break
        fits.append(value)
    return fits


def rounded_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a mapping, rounded; other values are left out."""
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def compact_json(value: Any) -> str:
    """Return JSON without blanks."""
    # `ensure_ascii` stays on: it escapes lone surrogates, which no encoding can carry.
    return json.dumps(value, separators=(",", ":"))
