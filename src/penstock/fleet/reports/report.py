"""The format of a report: the state of one process as JSON, bounded in size. Pure.

The encoder takes the description that `penstock explain` shows. It writes a hash instead of each message key, so that
a reader can recognise the same key in two reports. Partitions that do not fit are counted instead; the most urgent ones
come first. Records may be forged: the decoder checks each field, and refuses records of another shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Annotated, Any

from penstock.consumer.latencies import BUCKETS
from penstock.errors import MessageFormatError
from penstock.fleet.reports.entries import (
    ANY_TEXT,
    DEAD_LETTERS,
    MOST_TEXT,
    PARKED,
    PARTITIONS,
    SINKS,
    TRANSACTIONS,
    compact_json,
    fitting,
    rounded_numbers,
)
from penstock.fleet.wire import FLAG, FLOAT, INTEGER, VERSION, decode_record, fields_of, list_of, mapping_of, parse_json
from penstock.fleet_member import MOST_INTERVAL_S, Sender

#: The size limit of a report.
MOST_BYTES = 64 << 10

#: The size limits of lists without entries.
_LANES_BYTES = 6 << 10
_WAITS_BYTES = 8 << 10
_MOST_WAITS = 16
_MOST_COUNTS = 100
_MOST_TEXTS = 16
#: The number of handlers with lanes in a report, and of buckets of their lanes.
_MOST_HANDLERS = 8
_MOST_BUCKETS = 64
#: The size limit of a key: two texts with each character escaped.
_MOST_KEY_BYTES = MOST_TEXT * 13
#: Space for the last part of a report: the names of the partitions' list and the sums of the partitions left out.
_LAST_BYTES = 150
#: The states in which a message moves by itself; all other states need a look.
MOVING = frozenset({"idle", "queued", "in handler", "behind a call", "publishing"})
#: The counts whose rates are reported.
_RATED = ("received", "handled", "failed", "retried", "dead_letters", "published", "committed", "checks")


def _are_lanes(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {"depth", "age"} and len(value["depth"]) == len(value["age"])


_NUMBERS = mapping_of(FLOAT, _MOST_COUNTS).or_none
_BUCKETED = mapping_of(list_of(FLOAT, _MOST_BUCKETS), 2)
_LANES = replace(_BUCKETED, fits=lambda value: _BUCKETED.fits(value) and _are_lanes(value))
_INTERVAL = replace(FLOAT, read=lambda claimed: min(MOST_INTERVAL_S, max(0.1, claimed)))
_Text = Annotated[str, ANY_TEXT]
_Integer = Annotated[int, INTEGER]
_Numbers = Annotated[Mapping[str, float], _NUMBERS]
_Listed = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one process. All texts may be forged: escape them when you show them.

    Attributes:
        group: name of the app, or of the coordinators of a store.
        member: name of the process in the group; unique among the running processes.
        host: name of its machine.
        process: its process id on that machine.
        sequence: number of the report since the start of the process, from 1 on.
        interval_s: the promised seconds until the next report, at most.
        uptime_s: seconds since the start of the process.
        counts: counts since the start, with the names of `ConsumerStatistics`.
        rates: the increase of some counts per second since the previous report.
        pauses: the number of pauses of partitions, by reason.
        partitions: the state of each partition, with the fields of `Explanation` and `key_hash`; the most urgent first.
        left_out: the partitions that did not fit: `partitions` is their number, `lag` and `in_flight` their sums.
        parked: parked keys, the most attempts first; not all of them.
        sinks: the Spark queries, with the fields of `SinkStatistics` except its partitions.
        coordinator: counts of the process's transaction coordinator, by `CoordinatorStatistics`; None without one.
        waits: the reasons why the coordinator's pending transactions wait, in sentences.
        transactions: the oldest pending transactions, with the fields of `PendingTransaction`.
        operator: how to settle them. `store` is `kafka` if any process with permission can. `group` and `member` are
            the target of commands to the coordinator. Empty if unknown.
        dead_letters: counts of dead letters since the start, by topic and class of the error.
        lanes: for each handler `depth` (messages) and `age` (seconds since the fetch of the oldest) of its lanes, in at
            most 64 buckets.
        latencies: counts since the start by `BOUNDARIES_S`: `handler` for the time in a handler, `done` for the time
            since the fetch of the message.
        commands: whether it executes commands of the topic of commands.
    """

    group: _Text
    member: _Text
    host: _Text
    process: _Integer
    sequence: _Integer
    interval_s: Annotated[float, _INTERVAL]
    uptime_s: Annotated[float, FLOAT]
    counts: _Numbers = field(default_factory=dict)
    rates: _Numbers = field(default_factory=dict)
    pauses: _Numbers = field(default_factory=dict)
    partitions: Annotated[_Listed, PARTITIONS.as_field] = ()
    left_out: _Numbers = field(default_factory=dict)
    parked: Annotated[_Listed, PARKED.as_field] = ()
    sinks: Annotated[_Listed, SINKS.as_field] = ()
    coordinator: Annotated[Mapping[str, float] | None, _NUMBERS] = None
    waits: Annotated[Sequence[str], list_of(ANY_TEXT, _MOST_WAITS).or_none] = ()
    transactions: Annotated[_Listed, TRANSACTIONS.as_field] = ()
    operator: Annotated[Mapping[str, str], mapping_of(ANY_TEXT, _MOST_TEXTS).or_none] = field(default_factory=dict)
    dead_letters: Annotated[_Listed, DEAD_LETTERS.as_field] = ()
    lanes: Annotated[Mapping[str, Mapping[str, Sequence[float]]], mapping_of(_LANES, _MOST_HANDLERS).or_none] = field(
        default_factory=dict
    )
    latencies: Annotated[Mapping[str, Sequence[float]], mapping_of(list_of(FLOAT, BUCKETS), _MOST_HANDLERS).or_none] = (
        field(default_factory=dict)
    )
    commands: Annotated[bool, FLAG.or_none] = False

    @property
    def lag(self) -> int | None:
        """The sum of the partitions' lags; None if one is unknown, for example while its broker is away."""
        return None if any(partition["lag"] is None for partition in self.partitions) else self.known_lag

    @property
    def known_lag(self) -> int:
        """The sum of the known lags of partitions."""
        known: list[int] = [partition["lag"] or 0 for partition in self.partitions]
        return sum(known, start=int(self.left_out.get("lag", 0)))

    @property
    def partition_count(self) -> int:
        """The number of its partitions."""
        return sum(1 for partition in self.partitions if partition["partition"] >= 0) + int(
            self.left_out.get("partitions", 0)
        )

    @property
    def is_spare(self) -> bool:
        """Whether its group gives it no partition: then it has no lag."""
        return self.partition_count == 0 and any(part["state"] == "no partition" for part in self.partitions)

    @property
    def rate(self) -> float:
        """Messages/s that it handles, or publishes as a coordinator without an app."""
        return self.rates.get("handled", self.rates.get("committed", 0.0))


_FIELDS = fields_of(Report)


def read_key(key: bytes | None) -> tuple[str, str]:
    """Return the group and the member in a record's key; `MessageFormatError` if it is not a report's key."""
    names = parse_json(key, _MOST_KEY_BYTES)
    if not list_of(ANY_TEXT, 2, 2).fits(names):
        raise MessageFormatError("a report with an unreadable key; it is ignored")
    group, member = names
    return group, member


def key_hash(key: object, group: str) -> str:
    """Return the hash of a message key for the reports of a group: equal keys have equal hashes."""
    whole = key if isinstance(key, bytes) else str(key).encode(errors="backslashreplace")
    return blake2b(
        whole, digest_size=8, salt=blake2b(group.encode(errors="replace"), digest_size=16).digest()
    ).hexdigest()


def encode_report(
    sender: Sender, description: Mapping[str, Any], rates: Mapping[str, float], numbers: Mapping[str, float]
) -> bytes:
    """Return the value of a report.

    `description` is the description that `penstock explain` shows; `numbers` are `sequence`, `interval_s` and
    `uptime_s`.
    """
    counts = description.get("counts") or {}
    lanes = (description.get("lanes") or {}).items()
    deepest = sorted(lanes, key=lambda item: -sum(item[1]["depth"]))[:_MOST_HANDLERS]
    parked = sorted(description.get("parked", ()), key=parked_urgency, reverse=True)
    head: dict[str, Any] = {
        "version": VERSION,
        "group": sender.group[:MOST_TEXT],
        "member": sender.member[:MOST_TEXT],
        "host": sender.host[:MOST_TEXT],
        "process": sender.process,
        **numbers,
        "counts": rounded_numbers(counts),
        "pauses": rounded_numbers(counts.get("pauses") or {}),
        "rates": {name: round(rate, 2) for name, rate in rates.items()},
        "commands": bool(description.get("commands")),
        "latencies": description.get("latencies") or {},
        "lanes": dict(fitting(((name[:MOST_TEXT], depths) for name, depths in deepest), _LANES_BYTES)),
        "parked": PARKED.encode(_hashed(parked, sender.group)),
        "sinks": SINKS.encode(description.get("sinks", ())),
        "dead_letters": DEAD_LETTERS.encode(description.get("dead_letters", ())),
    }
    if coordinator := description.get("coordinator"):
        head["coordinator"] = rounded_numbers(coordinator["counts"])
        head["operator"] = {name: text[:MOST_TEXT] for name, text in coordinator.get("operator", {}).items()}
        head["waits"] = fitting((why[:MOST_TEXT] for why in coordinator["waits"][:_MOST_WAITS]), _WAITS_BYTES)
        head["transactions"] = TRANSACTIONS.encode(coordinator.get("transactions", ()))
    ranked = sorted(description.get("partitions", ()), key=urgency, reverse=True)
    max_bytes = MOST_BYTES - len(compact_json(head).encode()) - _LAST_BYTES
    shown = head["partitions"] = PARTITIONS.encode(_hashed(ranked, sender.group), max_bytes)
    if left_out := ranked[len(shown) :]:
        sums = {name: sum(partition.get(name) or 0 for partition in left_out) for name in ("lag", "in_flight")}
        head["left_out"] = {"partitions": len(left_out), **sums}
    return compact_json(head).encode()


def _hashed(entries: Iterable[Mapping[str, Any]], group: str) -> Iterator[Mapping[str, Any]]:
    """Yield entries with the hashes of their keys. It is lazy: entries that do not fit are not hashed."""
    for entry in entries:
        key = entry.get("key")
        yield entry if key is None else {**entry, "key_hash": key_hash(key, group)}


def decode_report(key: bytes | None, value: bytes) -> Report:
    """Return the report in a record; `MessageFormatError` if it is no report, or its key names another member.

    `NewerRecordError` if it is of a later version.
    """
    report = Report(**decode_record(value, MOST_BYTES, _FIELDS))
    if (report.group, report.member) != read_key(key):
        raise MessageFormatError("a report whose key names another member; it is ignored")
    return report


def total_lag(reports: Iterable[Report]) -> int | None:
    """Return the sum of the lags of members that have some; None if there is no such member or one is unknown."""
    lags = [report.lag for report in reports if not report.is_spare]
    return None if None in lags or not lags else sum(lag or 0 for lag in lags)


def urgency(partition: Mapping[str, Any]) -> tuple[bool, bool, bool, float, int]:
    """Return the sort key of partitions: partitions that do not move by themselves are higher, then by age and lag."""
    return (
        partition.get("trouble") is not None,
        partition.get("state") not in MOVING,
        partition.get("paused") is not None,
        partition.get("age") or 0.0,
        partition.get("lag") or 0,
    )


def parked_urgency(message: Mapping[str, Any]) -> tuple[bool, int, float]:
    """Return the sort key of parked keys: held keys are higher, then by attempts."""
    return message.get("state") == "held", message.get("attempt") or 0, message.get("age") or 0.0


class ReportMaker:
    """Makes the reports of a process: numbered, with rates since the previous one. For one thread.

    Args:
        sender: the names of the process.
        now: the start time of the process in seconds, by the same clock as later calls.
    """

    def __init__(self, sender: Sender, now: float) -> None:
        self._sender = sender
        self._started = now
        self._sequence = 0
        self._previous: tuple[float, Mapping[str, Any]] | None = None

    def next_report(self, description: Mapping[str, Any], interval_s: float, now: float) -> bytes:
        """Return the value of the next report. It promises the following one within `interval_s`."""
        self._sequence += 1
        uptime_s = round(now - self._started, 3)
        numbers = {"sequence": self._sequence, "interval_s": round(interval_s, 3), "uptime_s": uptime_s}
        return encode_report(self._sender, description, self._rates(description, now), numbers)

    def _rates(self, description: Mapping[str, Any], now: float) -> dict[str, float]:
        """Return the increase of counts per second since the previous report; empty for the first report."""
        coordinator = description.get("coordinator") or {"counts": {}}
        counts = {**coordinator["counts"], **(description.get("counts") or {})}
        previous, self._previous = self._previous, (now, counts)
        if previous is None or now <= previous[0]:
            return {}
        then, before = previous
        return {
            name: max(0.0, (counts[name] - before.get(name, 0)) / (now - then)) for name in _RATED if name in counts
        }
