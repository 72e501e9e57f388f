"""What was of the last half hour: rates, lag and latencies by group and member, in rings of fixed size. Pure.

Counts in reports are since a member's start, so a point is their difference: none is lost between two reports. Where
there are more members than rings, those that were not heard of for longest lose theirs.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.consumer.latencies import BUCKETS, quantile
from penstock.fleet.reports.group_state import Group, Member
from penstock.fleet.reports.report import total_lag

#: Seconds between two points, and how many there are: half an hour.
STEP_S = 5.0
POINTS = 360
#: Rings of members and groups that are kept at most, and of the Spark queries of one group.
_MOST_MEMBERS = 2_000
_MOST_GROUPS = 500
_MOST_SINKS = 16

#: What a ring holds, by name.
GROUP_SERIES = ("handled", "failed", "lag", "in_flight", "p50", "p99")
MEMBER_SERIES = ("handled", "lag", "p99")
_COUNTED = ("handled", "failed")


class Ring:
    """The last points of some series; NaN where nothing is known."""

    def __init__(self, names: Sequence[str]) -> None:
        self._series = {name: array("f", [math.nan]) * POINTS for name in names}
        self._next = 0

    def add(self, point: Mapping[str, float | None]) -> None:
        """Add a point; what it lacks is not known."""
        for name, values in self._series.items():
            value = point.get(name)
            values[self._next] = math.nan if value is None else value
        self._next = (self._next + 1) % POINTS

    def points(self) -> dict[str, list[float | None]]:
        """Return each series, the oldest point first, None where nothing is known; without what was before all."""
        ordered = {name: [*values[self._next :], *values[: self._next]] for name, values in self._series.items()}
        known = [n for n in range(POINTS) if any(not math.isnan(values[n]) for values in ordered.values())]
        begin = min(known, default=POINTS)
        return {name: [_short(value) for value in values[begin:]] for name, values in ordered.items()}


def _short(value: float) -> float | None:
    if math.isnan(value):
        return None
    return float(f"{value:.4g}")


@dataclass(slots=True)
class _Kept:
    ring: Ring
    sequence: int = 0
    uptime_s: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)
    latencies: Mapping[str, Sequence[float]] = field(default_factory=dict)
    #: The batch that is drawn last, by query: of each batch the time counts once.
    batches: dict[str, int] = field(default_factory=dict)
    #: Latency counts of the last point, for the figures beside the chart.
    recent: dict[str, list[float]] = field(default_factory=dict)


class History:
    """Takes the state of all groups every `STEP_S`. For one thread."""

    def __init__(self) -> None:
        self._members: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._groups: OrderedDict[str, _Kept] = OrderedDict()
        self._sinks: dict[str, OrderedDict[str, Ring]] = {}

    def add(self, groups: Iterable[Group]) -> None:
        """Add a point of each group and each of its members."""
        for group in groups:
            total: dict[str, float] = {}
            recent: dict[str, list[float]] = {"handler": [0.0] * BUCKETS, "done": [0.0] * BUCKETS}
            for member in group.members:
                self._add_member(member, total, recent)
            kept = self._kept(self._groups, group.name, GROUP_SERIES, _MOST_GROUPS)
            kept.recent = recent
            if total_lag(member.report for member in group.members if not member.is_silent) is None:
                total.pop("lag", None)
            kept.ring.add({**total, **_quantiles(recent["done"])})
            self._add_sinks(group, kept)
        for name in self._sinks.keys() - self._groups.keys():
            del self._sinks[name]

    def of_group(self, name: str) -> dict[str, list[float | None]]:
        """Return the series of a group; empty where none are kept."""
        kept = self._groups.get(name)
        return {} if kept is None else kept.ring.points()

    def of_member(self, group: str, member: str) -> dict[str, list[float | None]]:
        """Return the series of a member; empty where none are kept."""
        kept = self._members.get((group, member))
        return {} if kept is None else kept.ring.points()

    def of_sinks(self, group: str) -> dict[str, list[float | None]]:
        """Return the seconds of batches by the name of the query."""
        return {name: ring.points()["batch_seconds"] for name, ring in self._sinks.get(group, {}).items()}

    def latencies(self, group: str) -> Mapping[str, Sequence[float]]:
        """Return the latency counts of the last point of a group."""
        kept = self._groups.get(group)
        return {} if kept is None else kept.recent

    def _add_member(self, member: Member, total: dict[str, float], recent: dict[str, list[float]]) -> None:
        report = member.report
        kept = self._kept(self._members, (report.group, report.member), MEMBER_SERIES, _MOST_MEMBERS)
        point: dict[str, float] = {}
        counted: dict[str, list[float]] = {}
        if not member.is_silent:
            point = {"in_flight": report.counts.get("in_flight", 0.0)}
            if report.lag is not None:
                point["lag"] = report.lag
            took_s = report.uptime_s - kept.uptime_s
            goes_on = kept.sequence > 0 and report.sequence > kept.sequence and took_s > 0
            if goes_on:
                for name in _COUNTED:
                    grown = report.counts.get(name, 0.0) - kept.counts.get(name, 0.0)
                    point[name] = max(0.0, grown / took_s)
                counted = {name: _grown(now, kept.latencies.get(name)) for name, now in report.latencies.items()}
            elif report.sequence == kept.sequence:
                # No report since, as where they come every minute: what was goes on.
                point |= {name: report.rates[name] for name in _COUNTED if name in report.rates}
            if report.sequence != kept.sequence:
                kept.sequence, kept.uptime_s = report.sequence, report.uptime_s
                kept.counts, kept.latencies = report.counts, report.latencies
        for name, value in point.items():
            total[name] = total.get(name, 0.0) + value
        for name, counts in counted.items():
            if name in recent and len(counts) == BUCKETS:
                recent[name] = [sum(pair) for pair in zip(recent[name], counts, strict=True)]
        kept.ring.add({**point, "p99": quantile(counted.get("done", ()), 0.99)})

    def _add_sinks(self, group: Group, kept: _Kept) -> None:
        rings = self._sinks.setdefault(group.name, OrderedDict())
        for member in group.members:
            for sink in member.report.sinks:
                name = sink["name"]
                if name not in rings and len(rings) >= _MOST_SINKS:
                    continue
                ring = rings.setdefault(name, Ring(("batch_seconds",)))
                batches = sink["batches"] or 0
                is_new = batches != kept.batches.get(name) and not member.is_silent
                kept.batches[name] = batches
                ring.add({"batch_seconds": sink["batch_seconds"] if is_new else None})
        if len(kept.batches) > _MOST_SINKS:
            kept.batches.clear()

    @staticmethod
    def _kept(table: OrderedDict[Any, _Kept], key: Any, names: Sequence[str], most: int) -> _Kept:
        kept = table.get(key)
        if kept is None:
            kept = table[key] = _Kept(Ring(names))
        table.move_to_end(key)
        while len(table) > most:
            table.popitem(last=False)
        return kept


def _grown(now: Sequence[float], before: Sequence[float] | None) -> list[float]:
    if before is None or len(before) != len(now):
        return list(now)
    # A worker that ended took its counts along.
    return [max(0.0, value - other) for value, other in zip(now, before, strict=True)]


def _quantiles(counts: Sequence[float]) -> dict[str, float | None]:
    return {"p50": quantile(counts, 0.5), "p99": quantile(counts, 0.99)}
