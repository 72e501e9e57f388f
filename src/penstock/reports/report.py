"""The format of a report: what one process tells of itself, bounded, as JSON. Pure.

It is made from the description that `penstock explain` shows. Keys of messages are left out: a hash stands for each, so
that a reader sees that two reports tell of the same key. What does not fit is left out and counted, the partitions that
most need somebody first. Whatever is in the topic may be forged: a reader takes what has the shape of a report, field
by field, and refuses the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from penstock.errors import MessageFormatError

#: A report is no larger than this.
MOST_BYTES = 64 << 10

_VERSION = 1
#: Of it, for the parked keys and the sinks together at most.
_BESIDE_BYTES = 20 << 10
#: Characters of a text, and of a stack.
_TEXT = 500
_STACK = 4_000
#: Of a key: two texts of which each character is escaped. What is longer does not read when it is cut.
_MOST_KEY_BYTES = _TEXT * 13
_MOST_WAITS = 16
_WAITS_BYTES = 8 << 10
_MOST_COUNTS = 100
_MOST_ENTRIES = 2_000
_MOST_NUMBER = 1 << 63
#: Seconds between two reports that a reader believes at most: who claims more would be heard of too late.
MOST_INTERVAL_S = 60.0

_Fields = Mapping[str, type]
_NAMES: _Fields = {"group": str, "member": str, "host": str}
_NUMBERS: _Fields = {"process": int, "sequence": int, "interval_s": float, "uptime_s": float}
#: Of `Explanation` in the consumer, save for the key.
_PARTITION: _Fields = {
    **dict.fromkeys(("topic", "paused", "handler", "state", "worker", "detail", "trouble", "key_hash", "stack"), str),
    **dict.fromkeys(("partition", "watermark", "position", "in_flight", "parked", "bytes_in_flight", "lag"), int),
    **dict.fromkeys(("gaps", "blocking_offset", "attempt"), int),
    **dict.fromkeys(("age", "due_in", "rate"), float),
}
_PARKED: _Fields = {
    **dict.fromkeys(("topic", "handler", "state", "key_hash"), str),
    **dict.fromkeys(("partition", "offset", "attempt"), int),
    **dict.fromkeys(("age", "due_in"), float),
}
#: Of `SinkStatistics` in the Spark engine, without its partitions.
_SINK: _Fields = {
    **dict.fromkeys(("name", "state", "last_error"), str),
    **dict.fromkeys(("batch_id", "batches", "rows", "lag", "restarts"), int),
    **dict.fromkeys(("rows_per_s", "batch_seconds", "retry_in"), float),
}
#: What a partition has that does not say so.
_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("in_flight", "parked", "bytes_in_flight", "gaps", "attempt"), 0),
    "watermark": -1,
    "handler": "",
    "state": "idle",
}
_MUST_HAVE = {"partitions": ("topic", "partition"), "parked": ("topic", "partition", "offset"), "sinks": ("name",)}
#: Where a message is when it moves by itself; all other states need a look.
_MOVING = frozenset({"idle", "queued", "in handler", "publishing"})


class NewerReportError(MessageFormatError):
    """A report of a version that this reader does not know."""


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one process. All texts may be anybody's: escape them where they are shown.

    Attributes:
        group: name of the app, or of what else reports.
        member: name of the process in it; no two that run at the same time share one.
        host: name of its machine.
        process: its id there.
        sequence: number of the report since its start, from 1 on.
        interval_s: seconds until the next report at most, as it promises.
        uptime_s: seconds since its start.
        counts: counts since the start, as `ConsumerStatistics` has them.
        rates: of some of them, how many a second since the report before.
        pauses: how often partitions were paused, by reason.
        partitions: what holds each partition, as `Explanation` has it, with `key_hash`, and `stack` where asked for;
            those that most need somebody first.
        left_out: of the partitions that did not fit: `partitions`, how many; `lag` and `in_flight`, their sums.
        parked: parked keys, those that were tried most first; not all of them.
        sinks: the Spark queries, as `SinkStatistics` has them, without their partitions.
        coordinator: counts of the transaction coordinator in the process, as `CoordinatorStatistics` has them, or None.
        waits: what the coordinator's pending transactions wait for, in sentences.
    """

    group: str
    member: str
    host: str
    process: int
    sequence: int
    interval_s: float
    uptime_s: float
    counts: Mapping[str, float]
    rates: Mapping[str, float]
    pauses: Mapping[str, float]
    partitions: Sequence[Mapping[str, Any]]
    left_out: Mapping[str, float]
    parked: Sequence[Mapping[str, Any]]
    sinks: Sequence[Mapping[str, Any]]
    coordinator: Mapping[str, float] | None
    waits: Sequence[str]

    @property
    def lag(self) -> int:
        """The sum of what is known of the partitions' lags."""
        known: list[int] = [one["lag"] or 0 for one in self.partitions]
        return sum(known, start=int(self.left_out.get("lag", 0)))

    @property
    def partition_count(self) -> int:
        """How many partitions it has."""
        return sum(1 for one in self.partitions if one["partition"] >= 0) + int(self.left_out.get("partitions", 0))


@dataclass(frozen=True, slots=True)
class Sender:
    """Whose report it is."""

    group: str
    member: str
    host: str
    process: int

    @property
    def key(self) -> bytes:
        """The key of its reports."""
        return json.dumps([self.group, self.member]).encode()


def read_key(key: bytes | None) -> tuple[str, str]:
    """Return the group and the member that a record's key names; `MessageFormatError` where it is none."""
    try:
        group, member = json.loads((key or b"")[:_MOST_KEY_BYTES])
        return _checked(group, str), _checked(member, str)
    except (ValueError, TypeError, RecursionError) as error:
        raise MessageFormatError("a report's key that does not read; it is passed over") from error


def key_hash(key: object, group: str) -> str | None:
    """Return what stands for a key in the reports of a group: the same for the same key; None for none."""
    if key is None:
        return None
    whole = key if isinstance(key, bytes) else str(key).encode(errors="backslashreplace")
    return blake2b(
        whole, digest_size=8, salt=blake2b(group.encode(errors="replace"), digest_size=16).digest()
    ).hexdigest()


def encode_report(
    sender: Sender, description: Mapping[str, Any], rates: Mapping[str, float], numbers: Mapping[str, float]
) -> bytes:
    """Return the value of a record.

    `description` is that of an app, as `penstock explain` has it, with keys hashed already; `numbers` are `sequence`,
    `interval_s` and `uptime_s`.
    """
    counts = dict(description.get("counts") or {})
    head: dict[str, Any] = {
        "version": _VERSION,
        "group": sender.group[:_TEXT],
        "member": sender.member[:_TEXT],
        "host": sender.host[:_TEXT],
        "process": sender.process,
        **numbers,
        "counts": _numbers(counts),
        "pauses": _numbers(counts.get("pauses") or {}),
        "rates": {name: round(rate, 2) for name, rate in rates.items()},
    }
    coordinator = description.get("coordinator")
    if coordinator:
        head["coordinator"] = _numbers(coordinator["counts"])
        head["waits"] = _fitting_texts(coordinator["waits"][:_MOST_WAITS], _WAITS_BYTES)
    parked, _ = _fitting(sorted(description.get("parked", ()), key=_tried, reverse=True), _PARKED, _BESIDE_BYTES // 2)
    sinks, _ = _fitting(description.get("sinks", ()), _SINK, _BESIDE_BYTES // 2)
    ranked = sorted(description.get("partitions", ()), key=_urgency, reverse=True)
    start = _dump(head)[:-1]
    beside = f',"parked":[{",".join(parked)}],"sinks":[{",".join(sinks)}]'
    room = MOST_BYTES - len((start + beside).encode()) - len(',"partitions":[],"left_out":{}}') - 100
    shown, left_out = _fitting(ranked, _PARTITION, room)
    tail = ""
    if left_out:
        sums = {name: sum(one.get(name) or 0 for one in left_out) for name in ("lag", "in_flight")}
        tail = f',"left_out":{_dump({"partitions": len(left_out), **sums})}'
    return f'{start}{beside},"partitions":[{",".join(shown)}]{tail}}}'.encode()


def decode_report(key: bytes | None, value: bytes) -> Report:
    """Read a record; `MessageFormatError` where it is no report, or not one of whom its key names.

    `NewerReportError` where it is of a later version.
    """
    named = read_key(key)
    try:
        report = _read(value)
    except MessageFormatError:  # which is a ValueError, too
        raise
    # json raises RecursionError for what is nested without end, and OverflowError comes of numbers without end.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise MessageFormatError(f"a report that does not read ({type(error).__name__}); it is passed over") from error
    if (report.group, report.member) != named:
        raise MessageFormatError("a report of somebody else than its key names; it is passed over")
    return report


def _read(value: bytes) -> Report:
    if len(value) > MOST_BYTES:
        raise ValueError("it is too large")
    said = json.loads(value)
    version = _checked(said["version"], int)
    if version < 1:
        raise ValueError("no version")
    if version > _VERSION:
        raise NewerReportError(f"a report of version {version}, of which this one knows nothing; it is passed over")
    names: dict[str, Any] = {name: _checked(said[name], kind) for name, kind in _NAMES.items()}
    numbers: dict[str, Any] = {name: _checked(said[name], kind) for name, kind in _NUMBERS.items()}
    numbers["interval_s"] = min(MOST_INTERVAL_S, max(0.1, numbers["interval_s"]))
    coordinator = said.get("coordinator")
    return Report(
        **names,
        **numbers,
        counts=_read_numbers(said.get("counts", {})),
        rates=_read_numbers(said.get("rates", {})),
        pauses=_read_numbers(said.get("pauses", {})),
        left_out=_read_numbers(said.get("left_out", {})),
        partitions=_read_entries(said, "partitions", _PARTITION, _DEFAULTS),
        parked=_read_entries(said, "parked", _PARKED, {"state": "parked", "attempt": 0, "handler": ""}),
        sinks=_read_entries(said, "sinks", _SINK, {"state": "", **dict.fromkeys(("batches", "rows", "restarts"), 0)}),
        coordinator=None if coordinator is None else _read_numbers(coordinator),
        waits=tuple(_checked(one, str) for one in said.get("waits", ())[:_MOST_WAITS]),
    )


def _read_entries(said: Any, name: str, fields: _Fields, defaults: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    entries = said.get(name, ())
    if not isinstance(entries, list | tuple) or len(entries) > _MOST_ENTRIES:
        raise TypeError("no list, or too long")
    empty = {**dict.fromkeys(fields), **defaults}
    found = []
    for given in entries:
        # What a later member tells beside it is left out.
        one = {**empty, **{field: _checked(given[field], kind) for field, kind in fields.items() if field in given}}
        if any(one[must] is None for must in _MUST_HAVE[name]):
            raise ValueError("it lacks its name")
        if fields is _PARTITION and one["position"] is None:
            one["position"] = one["watermark"]
        found.append(one)
    return tuple(found)


def _read_numbers(given: Any) -> Mapping[str, float]:
    if not isinstance(given, dict) or len(given) > _MOST_COUNTS:
        raise TypeError("no mapping, or too large")
    return {_checked(name, str): _checked(number, float) for name, number in given.items()}


def _checked(value: Any, kind: type) -> Any:
    """Return a value of that kind; `TypeError` where it is of another, or beyond what any report holds."""
    if kind is str:
        if not isinstance(value, str) or len(value) > _STACK:
            raise TypeError("no text, or too long")
        return value
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise TypeError("no number")
    # NaN is not below anything either.
    if not -_MOST_NUMBER < value < _MOST_NUMBER:
        raise TypeError("a number out of its range")
    return value


def _fitting(
    entries: Iterable[Mapping[str, Any]], fields: _Fields, room: int
) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return as many entries as fit into so many bytes, as JSON, and the others."""
    fitting: list[str] = []
    others: list[Mapping[str, Any]] = []
    for entry in entries:
        if others or len(fitting) == _MOST_ENTRIES:
            others.append(entry)
            continue
        text = _dump(_slim(entry, fields))
        room -= len(text.encode()) + 1
        if room < 0:
            others.append(entry)
        else:
            fitting.append(text)
    return fitting, others


def _fitting_texts(texts: Sequence[str], room: int) -> list[str]:
    """Return the first texts, cut, that fit into so many bytes."""
    fitting = []
    for text in texts:
        room -= len(_dump(text[:_TEXT])) + 1
        if room < 0:
            break
        fitting.append(text[:_TEXT])
    return fitting


def _slim(entry: Mapping[str, Any], fields: _Fields) -> dict[str, Any]:
    slim = {}
    for name, kind in fields.items():
        value = entry.get(name)
        if value is None or (fields is _PARTITION and name in _DEFAULTS and value == _DEFAULTS[name]):
            continue
        if kind is str:
            value = value[-_STACK:] if name == "stack" else value[:_TEXT]
        elif kind is float:
            value = round(value, 3)
        slim[name] = value
    if fields is _PARTITION and slim.get("position") == slim.get("watermark"):
        slim.pop("position", None)
    return slim


def _numbers(given: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in given.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _urgency(one: Mapping[str, Any]) -> tuple[bool, bool, bool, float, int]:
    """Return what orders partitions: those that will not move by themselves first, then by age and lag."""
    return (
        one.get("trouble") is not None,
        one.get("state") not in _MOVING,
        one.get("paused") is not None,
        one.get("age") or 0.0,
        one.get("lag") or 0,
    )


def _tried(one: Mapping[str, Any]) -> tuple[bool, int, float]:
    return one.get("state") == "held", one.get("attempt") or 0, one.get("age") or 0.0


def _dump(value: Any) -> str:
    # What no encoding takes is escaped, as the default does.
    return json.dumps(value, separators=(",", ":"))
