"""The membership state of all groups: the last report of each member, and which members are silent. Pure and bounded.

Clocks of members do not count. The time of a report is the broker's append time. The reader estimates the broker's
clock from records: it is never behind the time of a record that has arrived. So an age is never overstated, and a
member that reported in time is never called silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.errors import MessageFormatError
from penstock.fleet.reports.report import Report, decode_report, read_key
from penstock.fleet.wire import NewerRecordError

#: A member is silent after so many of its report intervals and so many seconds without a report.
_INTERVALS = 3.0
_GRACE_S = 1.0
#: Seconds after which a silent member is forgotten.
_FORGOTTEN_S = 24 * 3600.0
#: The limits of members in memory, and of the bytes of their reports.
_MOST_MEMBERS = 10_000
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """A member at one moment: its last report, the least age of it, and whether the next report is overdue.

    Attributes:
        is_replaced: whether it is silent, and other members own everything that its last report names.
    """

    report: Report
    age_s: float
    is_silent: bool
    is_replaced: bool = False

    @property
    def is_missed(self) -> bool:
        """Whether it is silent, and no other member is known to own its partitions."""
        return self.is_silent and not self.is_replaced


@dataclass(frozen=True, slots=True)
class Group:
    """A group at one moment, its members by name."""

    name: str
    members: Sequence[Member]


@dataclass(slots=True)
class _Known:
    report: Report
    size: int
    #: The append time by the broker's clock, as the reader estimates it.
    at: float
    #: Whether it arrived after the reader had caught up.
    is_fresh: bool


class GroupStates:
    """Collects records into the state of all groups. Not thread-safe: for the reader's thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Known] = {}
        self._bytes = 0
        # The least difference of the broker's clock to the reader's.
        self._ahead: float | None = None
        # The time of the brokers' last answer by the reader's clock.
        self._answered_at = 0.0
        self._is_caught_up = False
        #: The number of ignored records, by reason: "unreadable", "newer version", "too many".
        self.ignored: Counter[str] = Counter()
        #: Rises with every record that changed the state, so that a viewer knows when to redraw.
        self.changes = 0

    def note_answer(self, now: float) -> None:
        """Note that brokers answered, and that all their records were read."""
        self._answered_at = now

    def note_caught_up(self, now: float) -> None:
        """Note that all records were read that existed at the start."""
        self._is_caught_up = True
        self.note_answer(now)

    def add(self, key: bytes | None, value: bytes | None, appended_s: float | None, now: float) -> None:
        """Add a record; `appended_s` is its append time in seconds, None if the topic's timestamps are another time."""
        self.note_answer(now)
        if appended_s is not None:
            ahead = appended_s - now
            self._ahead = ahead if self._ahead is None else max(self._ahead, ahead)
        try:
            if value is None:
                former = self._known.pop(read_key(key), None)
                self._bytes -= 0 if former is None else former.size
                self.changes += 1
                return
            report = decode_report(key, value)
        except NewerRecordError:
            self.ignored["newer version"] += 1
            return
        except MessageFormatError:
            self.ignored["unreadable"] += 1
            return
        member = (report.group, report.member)
        former = self._known.get(member)
        size = len(value) + len(key or b"")
        growth = size - (0 if former is None else former.size)
        if (former is None and len(self._known) >= _MOST_MEMBERS) or self._bytes + growth > _MOST_BYTES:
            self.ignored["too many"] += 1
            return
        self._bytes += growth
        at = self._broker_now(now) if appended_s is None else appended_s
        self._known[member] = _Known(report, size, at, self._is_caught_up)
        self.changes += 1

    def groups(self, now: float) -> list[Group]:
        """Return all groups at this moment, sorted by name."""
        for member in [name for name, known in self._known.items() if self._age(known, now) > _FORGOTTEN_S]:
            self._bytes -= self._known.pop(member).size
            self.changes += 1
        found: dict[str, list[Member]] = {}
        for (group, _), known in sorted(self._known.items()):
            found.setdefault(group, []).append(Member(known.report, self._age(known, now), self._is_silent(known, now)))
        return [Group(name, _with_replaced(members)) for name, members in found.items()]

    def is_settled(self, now: float, group: str | None = None) -> bool:
        """Return whether each member, of one group or of all, is known to be alive or silent."""
        return all(
            known.is_fresh or self._is_silent(known, now)
            for (name, _), known in self._known.items()
            if group in {None, name}
        )

    def _broker_now(self, now: float) -> float:
        # While no broker answers, nothing is known of the members, so their ages stand still.
        return min(now, self._answered_at) + (self._ahead or 0.0)

    def _age(self, known: _Known, now: float) -> float:
        return max(0.0, self._broker_now(now) - known.at)

    def _is_silent(self, known: _Known, now: float) -> bool:
        return self._age(known, now) > _INTERVALS * known.report.interval_s + _GRACE_S


def _with_replaced(members: Sequence[Member]) -> list[Member]:
    """Return the members with `is_replaced`: living members own everything that the silent one owned.

    The partitions of a dead member are reassigned all at once, so the ones in its last report stand for all. A
    partition that does not fit into the reports of living members counts as not reassigned.
    """
    living = [member.report for member in members if not member.is_silent]
    owned = {resource for report in living for resource in _owned(report)}
    return [
        replace(member, is_replaced=bool(living) and owned.issuperset(_owned(member.report)))
        if member.is_silent
        else member
        for member in members
    ]


def _owned(report: Report) -> Iterator[tuple[str, str, int]]:
    """Yield the resources that one member owns exclusively: partitions, Spark queries, the coordinator of a store."""
    for partition in report.partitions:
        if partition["partition"] >= 0:
            yield "partition", partition["topic"], partition["partition"]
    for sink in report.sinks:
        if sink["state"] != "standby":
            yield "sink", sink["name"], 0
    if (report.coordinator or {}).get("partitions"):
        yield "coordinator", str(report.operator.get("group", "")), 0
