"""The lists of a report: their fields, how they are written in bounded size, and how they are read. Pure.

What is in the topic may be forged, so whatever is read has the type and the size that any report may have, or is
refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.fleet.wire import FLOAT, INTEGER, MOST_NUMBER, Field, text

ReadT = TypeVar("ReadT")

#: Characters of a text.
MOST_TEXT = 500
_MOST_ENTRIES = 2_000
#: The fields of a report's texts, and of its values by their type.
ANY_TEXT = text(MOST_TEXT)
_OF_KIND: Mapping[type, Field] = {str: ANY_TEXT, int: INTEGER, float: FLOAT}


@dataclass(frozen=True, slots=True)
class Entries:
    """A list of a report.

    Attributes:
        fields: what an entry has, and of which type; what is None is not written.
        defaults: what is meant where an entry does not say; not written either. None for the others.
        needed: fields without which it is no entry.
        room: bytes of a report that it takes at most.
    """

    fields: Mapping[str, type]
    defaults: Mapping[str, Any]
    needed: Sequence[str]
    room: int

    @property
    def as_field(self) -> Field:
        """The field that holds the list; read, each entry has all of `fields`."""
        what = f"a list of at most {_MOST_ENTRIES} objects, each with {' and '.join(self.needed)}"
        return Field(what, self._fits, is_needed=False, read=self._filled)

    def _fits(self, given: object) -> bool:
        return isinstance(given, list) and len(given) <= _MOST_ENTRIES and all(map(self._is_entry, given))

    def _is_entry(self, said: object) -> bool:
        if not isinstance(said, dict):
            return False
        for name, value in said.items():
            kind: Any = self.fields.get(name)
            # Most values are as they should be, and a call for each is most of what reading costs.
            is_well = type(value) is kind and (
                len(value) <= MOST_TEXT if kind is str else -MOST_NUMBER < value < MOST_NUMBER
            )
            # What a later member tells in other fields is left out.
            if not is_well and kind is not None and not _OF_KIND[kind].fits(value):
                return False
        return all(name in said for name in self.needed)

    def _filled(self, given: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        empty = {**dict.fromkeys(self.fields), **self.defaults}
        found = []
        for said in given:
            entry = {**empty, **said}
            if len(entry) > len(empty):
                entry = {name: entry[name] for name in empty}
            if "position" in entry and entry["position"] is None:
                entry["position"] = entry["watermark"]
            found.append(entry)
        return found

    def written(self, entries: Iterable[Mapping[str, Any]], room: int | None = None) -> list[dict[str, Any]]:
        """Return the first entries that fit into `room` bytes, as they are written."""
        return fitting(map(self._slim, entries), self.room if room is None else room)

    def _slim(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        slim = {}
        for name, kind in self.fields.items():
            value = entry.get(name)
            if value is None or (name in self.defaults and value == self.defaults[name]):
                continue
            if kind is str:
                value = value[:MOST_TEXT]
            elif kind is float:
                value = round(value, 3)
            slim[name] = value
        if "position" in slim and slim["position"] == slim.get("watermark"):
            del slim["position"]
        return slim


#: Of `Explanation` in the consumer, save for the key; they take the room that the rest leaves.
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
#: Of `SinkStatistics` in the Spark engine, without its partitions.
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
#: Dead letters by reason: how many since the start, the topic that has them, and where the last came from.
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
#: Of `PendingTransaction`; `topics` in one text.
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


def fitting(values: Iterable[ReadT], room: int) -> list[ReadT]:
    """Return the first values that fit into so many bytes as JSON."""
    fits: list[ReadT] = []
    for value in values:
        room -= len(dump(value).encode()) + 1
        if room < 0 or len(fits) == _MOST_ENTRIES:
            break
        fits.append(value)
    return fits


def written_numbers(given: Mapping[str, Any]) -> dict[str, float]:
    """Return what of a mapping are numbers, rounded."""
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in given.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def dump(value: Any) -> str:
    """Return JSON without blanks."""
    # What no encoding takes is escaped, as the default does.
    return json.dumps(value, separators=(",", ":"))
