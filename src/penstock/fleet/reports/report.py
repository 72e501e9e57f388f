"""The format of a report: what one process tells of itself, bounded, as JSON. Pure.

It is made from the description that `penstock explain` shows. Keys of messages are left out: a hash stands for each, so
that a reader sees that two reports tell of the same key. What does not fit is left out and counted, the partitions that
most need somebody first. Whatever is in the topic may be forged: a reader takes what has the shape of a report, field
by field, and refuses the rest.
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
    dump,
    fitting,
    written_numbers,
)
from penstock.fleet.wire import FLAG, FLOAT, INTEGER, VERSION, fields_of, list_of, loaded, mapping_of, record
from penstock.fleet_member import MOST_INTERVAL_S, Sender

#: A report is no larger than this.
MOST_BYTES = 64 << 10

#: Of it, for lists that are not of entries, at most.
_LANES_BYTES = 6 << 10
_WAITS_BYTES = 8 << 10
_MOST_WAITS = 16
_MOST_COUNTS = 100
_MOST_TEXTS = 16
#: Handlers whose lanes are reported, and in how many buckets at most.
_MOST_HANDLERS = 8
_MOST_BUCKETS = 64
#: Of a key: two texts of which each character is escaped. What is longer does not read when it is cut.
_MOST_KEY_BYTES = MOST_TEXT * 13
#: For what is written last: the names of the partitions' list and the sums of what it leaves out.
_LAST_BYTES = 150
#: Where a message is when it moves by itself; all other states need a look.
MOVING = frozenset({"idle", "queued", "in handler", "behind a call", "publishing"})
#: Of the counts, those whose rates are reported.
_RATED = ("received", "handled", "failed", "retried", "dead_letters", "published", "committed", "checks")


def _are_lanes(said: object) -> bool:
    return isinstance(said, dict) and said.keys() == {"depth", "age"} and len(said["depth"]) == len(said["age"])


_NUMBERS = mapping_of(FLOAT, _MOST_COUNTS).or_none
_BUCKETED = mapping_of(list_of(FLOAT, _MOST_BUCKETS), 2)
_LANES = replace(_BUCKETED, fits=lambda said: _BUCKETED.fits(said) and _are_lanes(said))
_INTERVAL = replace(FLOAT, read=lambda claimed: min(MOST_INTERVAL_S, max(0.1, claimed)))
_Text = Annotated[str, ANY_TEXT]
_Integer = Annotated[int, INTEGER]
_Numbers = Annotated[Mapping[str, float], _NUMBERS]
_Listed = Sequence[Mapping[str, Any]]


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
        partitions: what holds each partition, as `Explanation` has it, with `key_hash`; those that most need somebody
            first.
        left_out: of the partitions that did not fit: `partitions`, how many; `lag` and `in_flight`, their sums.
        parked: parked keys, those that were tried most first; not all of them.
        sinks: the Spark queries, as `SinkStatistics` has them, without their partitions.
        coordinator: counts of the transaction coordinator in the process, as `CoordinatorStatistics` has them, or None.
        waits: what the coordinator's pending transactions wait for, in sentences.
        transactions: the oldest of those, as `PendingTransaction` has them.
        operator: who settles them: `store`, `kafka` where anybody may; `group` and `member`, for which commands are
            that the coordinator hears. Empty where it does not say.
        dead_letters: how many dead letters were written since the start, by topic and class of the error.
        lanes: of each handler, `depth` (messages) and `age` (seconds since the oldest was fetched) of its lanes, in 64
            buckets at most.
        latencies: counts since the start by `BOUNDARIES_S`: `handler`, of the time in a handler, and `done`, of that
            since the message was fetched.
        commands: whether it carries out what is asked of it by the topic of commands.
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
        """The sum of the partitions' lags; None where one is not known, as while its broker is away."""
        return None if any(partition["lag"] is None for partition in self.partitions) else self.known_lag

    @property
    def known_lag(self) -> int:
        """The sum of what is known of the partitions' lags."""
        known: list[int] = [partition["lag"] or 0 for partition in self.partitions]
        return sum(known, start=int(self.left_out.get("lag", 0)))

    @property
    def partition_count(self) -> int:
        """How many partitions it has."""
        return sum(1 for partition in self.partitions if partition["partition"] >= 0) + int(
            self.left_out.get("partitions", 0)
        )


_FIELDS = fields_of(Report)


def read_key(key: bytes | None) -> tuple[str, str]:
    """Return the group and the member that a record's key names; `MessageFormatError` where it is none."""
    named = loaded(key, _MOST_KEY_BYTES)
    if not list_of(ANY_TEXT, 2, 2).fits(named):
        raise MessageFormatError("a report's key that does not read; it is passed over")
    group, member = named
    return group, member


def key_hash(key: object, group: str) -> str:
    """Return what stands for a key in the reports of a group: the same for the same key."""
    whole = key if isinstance(key, bytes) else str(key).encode(errors="backslashreplace")
    return blake2b(
        whole, digest_size=8, salt=blake2b(group.encode(errors="replace"), digest_size=16).digest()
    ).hexdigest()


def encode_report(
    sender: Sender, description: Mapping[str, Any], rates: Mapping[str, float], numbers: Mapping[str, float]
) -> bytes:
    """Return the value of a record.

    `description` is that of an app, as `penstock explain` has it; `numbers` are `sequence`, `interval_s` and
    `uptime_s`.
    """
    counts = description.get("counts") or {}
    lanes = (description.get("lanes") or {}).items()
    deepest = sorted(lanes, key=lambda item: -sum(item[1]["depth"]))[:_MOST_HANDLERS]
    parked = sorted(description.get("parked", ()), key=tried, reverse=True)
    head: dict[str, Any] = {
        "version": VERSION,
        "group": sender.group[:MOST_TEXT],
        "member": sender.member[:MOST_TEXT],
        "host": sender.host[:MOST_TEXT],
        "process": sender.process,
        **numbers,
        "counts": written_numbers(counts),
        "pauses": written_numbers(counts.get("pauses") or {}),
        "rates": {name: round(rate, 2) for name, rate in rates.items()},
        "commands": bool(description.get("commands")),
        "latencies": description.get("latencies") or {},
        "lanes": dict(fitting(((name[:MOST_TEXT], depths) for name, depths in deepest), _LANES_BYTES)),
        "parked": PARKED.written(_hashed(parked, sender.group)),
        "sinks": SINKS.written(description.get("sinks", ())),
        "dead_letters": DEAD_LETTERS.written(description.get("dead_letters", ())),
    }
    if coordinator := description.get("coordinator"):
        head["coordinator"] = written_numbers(coordinator["counts"])
        head["operator"] = {name: text[:MOST_TEXT] for name, text in coordinator.get("operator", {}).items()}
        head["waits"] = fitting((why[:MOST_TEXT] for why in coordinator["waits"][:_MOST_WAITS]), _WAITS_BYTES)
        head["transactions"] = TRANSACTIONS.written(coordinator.get("transactions", ()))
    ranked = sorted(description.get("partitions", ()), key=urgency, reverse=True)
    room = MOST_BYTES - len(dump(head).encode()) - _LAST_BYTES
    shown = head["partitions"] = PARTITIONS.written(_hashed(ranked, sender.group), room)
    if left_out := ranked[len(shown) :]:
        sums = {name: sum(partition.get(name) or 0 for partition in left_out) for name in ("lag", "in_flight")}
        head["left_out"] = {"partitions": len(left_out), **sums}
    return dump(head).encode()


def _hashed(entries: Iterable[Mapping[str, Any]], group: str) -> Iterator[Mapping[str, Any]]:
    """Yield entries with the hashes of their keys: of those that are written, the others cost nothing."""
    for entry in entries:
        key = entry.get("key")
        yield entry if key is None else {**entry, "key_hash": key_hash(key, group)}


def decode_report(key: bytes | None, value: bytes) -> Report:
    """Read a record; `MessageFormatError` where it is no report, or not one of whom its key names.

    `NewerRecordError` where it is of a later version.
    """
    report = Report(**record(value, MOST_BYTES, _FIELDS))
    if (report.group, report.member) != read_key(key):
        raise MessageFormatError("a report of somebody else than its key names; it is passed over")
    return report


def total_lag(reports: Iterable[Report]) -> int | None:
    """Return the sum of the lags of members; None where one of them is not known."""
    lags = [report.lag for report in reports]
    return None if None in lags else sum(lag or 0 for lag in lags)


def urgency(partition: Mapping[str, Any]) -> tuple[bool, bool, bool, float, int]:
    """Return what orders partitions: those that will not move by themselves first, then by age and lag."""
    return (
        partition.get("trouble") is not None,
        partition.get("state") not in MOVING,
        partition.get("paused") is not None,
        partition.get("age") or 0.0,
        partition.get("lag") or 0,
    )


def tried(message: Mapping[str, Any]) -> tuple[bool, int, float]:
    """Return what orders parked keys: those that are held, then those that were tried most."""
    return message.get("state") == "held", message.get("attempt") or 0, message.get("age") or 0.0


class ReportMaker:
    """Makes the reports of a process: numbered, with rates since the one before. For one thread.

    Args:
        sender: as whom it reports.
        now: when the process started, by the clock of all that follows, in seconds.
    """

    def __init__(self, sender: Sender, now: float) -> None:
        self._sender = sender
        self._started = now
        self._sequence = 0
        self._before: tuple[float, Mapping[str, Any]] | None = None

    def made(self, description: Mapping[str, Any], interval_s: float, now: float) -> bytes:
        """Return the value of the next record; the one after it comes within `interval_s`."""
        self._sequence += 1
        uptime_s = round(now - self._started, 3)
        numbers = {"sequence": self._sequence, "interval_s": round(interval_s, 3), "uptime_s": uptime_s}
        return encode_report(self._sender, description, self._rates(description, now), numbers)

    def _rates(self, description: Mapping[str, Any], now: float) -> dict[str, float]:
        """Return how many a second there were of each since the report before; nothing of the first."""
        coordinator = description.get("coordinator") or {"counts": {}}
        counts = {**coordinator["counts"], **(description.get("counts") or {})}
        then, self._before = self._before, (now, counts)
        if then is None or now <= then[0]:
            return {}
        return {
            name: max(0.0, (counts[name] - then[1].get(name, 0)) / (now - then[0])) for name in _RATED if name in counts
        }
