"""The state of all groups, from their reports: the last of each member, and who fell silent. Pure, and bounded.

No clock of a member counts. A report's time is when the broker appended it, and the broker's clock is known as far as
records tell: it is never behind the time of a record that has arrived. So an age is never overstated, and nobody is
called silent who was heard of in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.errors import MessageFormatError
from penstock.fleet.reports.report import Report, decode_report, read_key
from penstock.fleet.wire import NewerRecordError

#: A member is silent when nothing came for so many of its intervals, and this many seconds more.
_INTERVALS = 3.0
_GRACE_S = 1.0
#: Seconds after which a silent member is forgotten.
_FORGOTTEN_S = 24 * 3600.0
#: Members that are known at a time, and bytes of their reports.
_MOST_MEMBERS = 10_000
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """A member at one moment: its last report, how old it is at least, and whether the next is overdue.

    Attributes:
        is_replaced: whether it is silent and others have all that its last report names: then nobody misses it.
    """

    report: Report
    age_s: float
    is_silent: bool
    is_replaced: bool = False

    @property
    def is_missed(self) -> bool:
        """Whether it is silent, and what it had is with nobody, as far as is known."""
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
    #: On the broker's clock, as this reader knows it.
    at: float
    #: Whether it came after the first reading to the end.
    is_fresh: bool


class GroupStates:
    """Takes records one by one. Not thread-safe: for the reader's thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Known] = {}
        self._bytes = 0
        # The broker's clock less the reader's, at least; and the reader's when brokers were heard last.
        self._ahead: float | None = None
        self._heard = 0.0
        self._is_caught_up = False
        #: Records that were passed over, by why: "unreadable", "newer version", "too many".
        self.ignored: Counter[str] = Counter()
        #: Rises with every record that changed something: whoever shows the state sees whether it is another one.
        self.changes = 0

    def heard(self, now: float) -> None:
        """Note that brokers answered, and that all they had has been taken."""
        self._heard = now

    def caught_up(self, now: float) -> None:
        """Note that all was read that there was at the start."""
        self._is_caught_up = True
        self.heard(now)

    def take(self, key: bytes | None, value: bytes | None, appended_s: float | None, now: float) -> None:
        """Take a record; `appended_s` is the broker's time of it in seconds, None where the topic has another time."""
        self.heard(now)
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
        place = (report.group, report.member)
        former = self._known.get(place)
        size = len(value) + len(key or b"")
        grown = size - (0 if former is None else former.size)
        if (former is None and len(self._known) >= _MOST_MEMBERS) or self._bytes + grown > _MOST_BYTES:
            self.ignored["too many"] += 1
            return
        self._bytes += grown
        at = self._broker_now(now) if appended_s is None else appended_s
        self._known[place] = _Known(report, size, at, self._is_caught_up)
        self.changes += 1

    def groups(self, now: float) -> list[Group]:
        """Return all groups by name, at this moment."""
        for place in [member for member, known in self._known.items() if self._age(known, now) > _FORGOTTEN_S]:
            self._bytes -= self._known.pop(place).size
            self.changes += 1
        found: dict[str, list[Member]] = {}
        for (group, _), known in sorted(self._known.items()):
            found.setdefault(group, []).append(Member(known.report, self._age(known, now), self._is_silent(known, now)))
        return [Group(name, _with_replaced(members)) for name, members in found.items()]

    def is_settled(self, now: float, group: str | None = None) -> bool:
        """Tell whether of each member, of one group or of all, is known that it lives, or that it is silent."""
        return all(
            known.is_fresh or self._is_silent(known, now)
            for (name, _), known in self._known.items()
            if group in {None, name}
        )

    def _broker_now(self, now: float) -> float:
        # While no broker answers nothing is known of the members, so their ages stand still.
        return min(now, self._heard) + (self._ahead or 0.0)

    def _age(self, known: _Known, now: float) -> float:
        return max(0.0, self._broker_now(now) - known.at)

    def _is_silent(self, known: _Known, now: float) -> bool:
        return self._age(known, now) > _INTERVALS * known.report.interval_s + _GRACE_S


def _with_replaced(members: Sequence[Member]) -> list[Member]:
    """Return members with who of the silent ones is replaced: somebody lives, and the living have what it had.

    A dead member's partitions go to others all at once, so those that fitted into its last report stand for all. Where
    reports of the living leave partitions out, what cannot be seen counts as not taken over.
    """
    living = [member.report for member in members if not member.is_silent]
    owned = {what for report in living for what in _owned(report)}
    return [
        replace(member, is_replaced=bool(living) and owned.issuperset(_owned(member.report)))
        if member.is_silent
        else member
        for member in members
    ]


def _owned(report: Report) -> Iterator[tuple[str, str, int]]:
    """Yield what no two members have at a time: partitions, Spark queries, and a store's coordinator as a whole."""
    for partition in report.partitions:
        if partition["partition"] >= 0:
            yield "partition", partition["topic"], partition["partition"]
    for sink in report.sinks:
        if sink["state"] != "standby":
            yield "sink", sink["name"], 0
    if (report.coordinator or {}).get("partitions"):
        yield "coordinator", str(report.operator.get("group", "")), 0
