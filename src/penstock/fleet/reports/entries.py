"""The lists of a report: their fields, how they are written in bounded size, and how they are read. Pure.

What is in the topic may be forged, so whatever is read has the type and the size that any report may have, or is
refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

ReadT = TypeVar("ReadT")

#: Characters of a text, and of a stack.
MOST_TEXT = 500
_MOST_STACK = 4_000
_MOST_COUNTS = 100
_MOST_TEXTS = 16
_MOST_ENTRIES = 2_000
_MOST_NUMBER = 1 << 63
#: Handlers whose lanes are reported, and in how many buckets at most.
MOST_HANDLERS = 8
_MOST_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class Entries:
    """A list of a report.

    Attributes:
        fields: what an entry has, and of which type; what is None is not written.
        defaults: what is meant where an entry does not say; not written either. None for the others.
        needed: fields without which it is no entry.
    """

    fields: Mapping[str, type]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needed: Sequence[str] = ()

    @property
    def empty(self) -> dict[str, Any]:
        """An entry that says nothing."""
        return {**dict.fromkeys(self.fields), **self.defaults}


#: Of `Explanation` in the consumer, save for the key.
PARTITIONS = Entries(
    {
        **dict.fromkeys(("topic", "paused", "handler", "state", "worker", "detail", "trouble"), str),
        **dict.fromkeys(("key_hash", "stack"), str),
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
)
PARKED = Entries(
    {
        **dict.fromkeys(("topic", "handler", "state", "key_hash"), str),
        **dict.fromkeys(("partition", "offset", "attempt"), int),
        **dict.fromkeys(("age", "due_in"), float),
    },
    {"state": "parked", "attempt": 0, "handler": ""},
    ("topic", "partition", "offset"),
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
)


def read_entries(given: Any, of: Entries) -> tuple[Mapping[str, Any], ...]:
    """Return the entries of a list that anybody may have written; `TypeError` or `ValueError` where it is none."""
    if not isinstance(given, list | tuple) or len(given) > _MOST_ENTRIES:
        raise TypeError("no list, or too long")
    empty, kinds = of.empty, of.fields
    found = []
    for said in given:
        entry = empty.copy()
        for name, value in said.items():
            # What a later member tells beside it is left out.
            kind: Any = kinds.get(name)
            if kind is not None:
                # Most values are as they should be, and a call for each is most of what reading costs.
                is_well = type(value) is kind and (
                    len(value) <= _MOST_STACK if kind is str else -_MOST_NUMBER < value < _MOST_NUMBER
                )
                entry[name] = value if is_well else checked(value, kind)
        if any(entry[name] is None for name in of.needed):
            raise ValueError("it lacks its name")
        if of is PARTITIONS and entry["position"] is None:
            entry["position"] = entry["watermark"]
        found.append(entry)
    return tuple(found)


def read_mapping(given: Any, most: int, read: Callable[[Any], ReadT]) -> dict[str, ReadT]:
    """Return a mapping of at most so many values, each read by `read`; raises as `read_entries`."""
    if not isinstance(given, dict) or len(given) > most:
        raise TypeError("no mapping, or too large")
    return {checked(name, str): read(value) for name, value in given.items()}


def read_numbers(given: Any) -> Mapping[str, float]:
    """Return a mapping of numbers that anybody may have written; raises as `read_entries`."""
    return read_mapping(given, _MOST_COUNTS, lambda value: checked(value, float))


def read_texts(given: Any) -> Mapping[str, str]:
    """Return a mapping of texts that anybody may have written; raises as `read_entries`."""
    return read_mapping(given, _MOST_TEXTS, lambda value: checked(value, str))


def read_number_lists(given: Any, most: int) -> Mapping[str, Sequence[float]]:
    """Return a mapping of lists of at most so many numbers; raises as `read_entries`."""

    def read(numbers: Any) -> Sequence[float]:
        if not isinstance(numbers, list) or len(numbers) > most:
            raise TypeError("no list, or too long")
        return tuple(checked(number, float) for number in numbers)

    return read_mapping(given, MOST_HANDLERS, read)


def read_lanes(given: Any) -> Mapping[str, Mapping[str, Sequence[float]]]:
    """Return the lanes of handlers, `depth` and `age` by bucket; raises as `read_entries`."""

    def read(said: Any) -> Mapping[str, Sequence[float]]:
        lanes = read_number_lists(said, _MOST_BUCKETS)
        if lanes.keys() != {"depth", "age"} or len(lanes["depth"]) != len(lanes["age"]):
            raise ValueError("no lanes")
        return lanes

    return read_mapping(given, MOST_HANDLERS, read)


def checked(value: Any, kind: type) -> Any:
    """Return a value of that kind; `TypeError` where it is of another, or beyond what any report holds."""
    if kind is str:
        if not isinstance(value, str) or len(value) > _MOST_STACK:
            raise TypeError("no text, or too long")
        return value
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise TypeError("no number")
    # NaN is not below anything either.
    if not -_MOST_NUMBER < value < _MOST_NUMBER:
        raise TypeError("a number out of its range")
    return value


def fitting(values: Iterable[ReadT], room: int) -> list[ReadT]:
    """Return the first values that fit into so many bytes as JSON."""
    fits: list[ReadT] = []
    for value in values:
        room -= len(dump(value).encode()) + 1
        if room < 0 or len(fits) == _MOST_ENTRIES:
            break
        fits.append(value)
    return fits


def written(entries: Iterable[Mapping[str, Any]], of: Entries, room: int) -> list[dict[str, Any]]:
    """Return the first entries that fit into so many bytes, as they are written."""
    return fitting((_slim(entry, of) for entry in entries), room)


def written_numbers(given: Mapping[str, Any]) -> dict[str, float]:
    """Return what of a mapping are numbers, rounded."""
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in given.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _slim(entry: Mapping[str, Any], of: Entries) -> dict[str, Any]:
    slim = {}
    for name, kind in of.fields.items():
        value = entry.get(name)
        if value is None or (name in of.defaults and value == of.defaults[name]):
            continue
        if kind is str:
            value = value[-_MOST_STACK:] if name == "stack" else value[:MOST_TEXT]
        elif kind is float:
            value = round(value, 3)
        slim[name] = value
    if of is PARTITIONS and slim.get("position") == slim.get("watermark"):
        slim.pop("position", None)
    return slim


def dump(value: Any) -> str:
    """Return JSON without blanks."""
    # What no encoding takes is escaped, as the default does.
    return json.dumps(value, separators=(",", ":"))
