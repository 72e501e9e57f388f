"""What was of the last half hour: rates, lag and latencies by group and member, in rings of fixed size. Pure.

Counts in reports are since a member's start, so a point is their difference: none is lost between two reports. Where
there are more members than rings, those that were not heard of for longest lose theirs.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from penstock.consumer.latencies import BUCKETS, quantile
from penstock.fleet.reports.group_state import Group
from penstock.fleet.reports.report import Report, total_lag

#: Seconds between two points, and how many there are: half an hour.
STEP_S = 5.0
POINTS = 360
#: Rings of members and groups that are kept at most, and series of one: six, and one for each Spark query.
_MOST_RINGS = 2_500
_MOST_SERIES = 22

_COUNTED = ("handled", "failed")
_ALWAYS = dict.fromkeys((*_COUNTED, "lag", "in_flight", "p50", "p99"))


class Ring:
    """The last points of some series; NaN where nothing is known."""

    def __init__(self) -> None:
        self._series: dict[str, array[float]] = {}
        self._next = 0

    def add(self, point: Mapping[str, float | None]) -> None:
        """Add a point; what it lacks is not known."""
        for name in point:
            if name not in self._series and len(self._series) < _MOST_SERIES:
                self._series[name] = array("f", [math.nan]) * POINTS
        for name, values in self._series.items():
            value = point.get(name)
            values[self._next] = math.nan if value is None else value
        self._next = (self._next + 1) % POINTS

    def points(self) -> dict[str, list[float | None]]:
        """Return each series, the oldest point first, None where nothing is known; without what was before all."""
        ordered = {name: [*values[self._next :], *values[: self._next]] for name, values in self._series.items()}
        known = [n for n in range(POINTS) if any(not math.isnan(values[n]) for values in ordered.values())]
        begin = min(known, default=POINTS)
        return {
            name: [None if math.isnan(value) else float(f"{value:.4g}") for value in values[begin:]]
            for name, values in ordered.items()
        }


class History:
    """Takes the state of all groups every `STEP_S`. For one thread.

    The series are `handled` and `failed` (a second), `lag`, `in_flight`, `p50` and `p99` (seconds from the fetch to the
    end of the handler), and `batch NAME`, the seconds of each batch of a Spark query.
    """

    def __init__(self) -> None:
        # By group and member, None for all of a group; the last that got a point is at the end.
        self._rings: OrderedDict[tuple[str, str | None], Ring] = OrderedDict()
        # The reports of the last point.
        self._before: dict[tuple[str, str], Report] = {}

    def add(self, groups: Iterable[Group]) -> None:
        """Add a point of each group and each of its members."""
        groups = list(groups)
        for group in groups:
            for member in group.members:
                self._add(group.name, member.report.member, [] if member.is_silent else [member.report])
        # Groups come last: where there are too many rings, members lose theirs first.
        for group in groups:
            self._add(group.name, None, [member.report for member in group.members if not member.is_silent])
        self._before = {(it.name, seen.report.member): seen.report for it in groups for seen in it.members}
        while len(self._rings) > _MOST_RINGS:
            self._rings.popitem(last=False)

    def series(self, group: str, member: str | None = None) -> dict[str, list[float | None]]:
        """Return the series of a group or of one of its members; empty where none are kept."""
        ring = self._rings.get((group, member))
        return {} if ring is None else ring.points()

    def _add(self, group: str, member: str | None, living: Sequence[Report]) -> None:
        pairs = [(report, self._before.get((group, report.member))) for report in living]
        self._rings.setdefault((group, member), Ring()).add(_point(pairs))
        self._rings.move_to_end((group, member))


def _point(reports: Sequence[tuple[Report, Report | None]]) -> dict[str, float | None]:
    """Return what reports say together, each with the one before it."""
    if not reports:
        return _ALWAYS
    sums: dict[str, float] = defaultdict(float)
    batches: dict[str, float] = {}
    done = [0.0] * BUCKETS
    for report, before in reports:
        sums["in_flight"] += report.counts.get("in_flight", 0.0)
        known = set() if before is None else {(sink["name"], sink["batches"]) for sink in before.sinks}
        for sink in report.sinks:
            if (sink["name"], sink["batches"]) not in known and sink["batch_seconds"] is not None:
                batches[f"batch {sink['name']}"] = sink["batch_seconds"]
        if before is None or report.sequence < before.sequence:
            continue  # the first report of a process is no difference
        rates = report.rates
        if (took_s := report.uptime_s - before.uptime_s) > 0:
            rates = {name: _grown(report.counts, before.counts, name) / took_s for name in _COUNTED}
            before_done = before.latencies.get("done") or [0.0] * BUCKETS
            # A worker that ended took its counts along.
            pairs = zip(report.latencies.get("done", ()), before_done, strict=False)
            grown = [max(0.0, now - then) for now, then in pairs]
            done = [value + more for value, more in zip(done, grown, strict=True)] if len(grown) == BUCKETS else done
        # Without a report since, as where they come every minute, what was goes on.
        for name in _COUNTED:
            sums[name] += rates.get(name, 0.0)
    quantiles = {"p50": quantile(done, 0.5), "p99": quantile(done, 0.99)}
    return {**_ALWAYS, **sums, **batches, **quantiles, "lag": total_lag(report for report, _ in reports)}


def _grown(now: Mapping[str, float], before: Mapping[str, float], name: str) -> float:
    return max(0.0, now.get(name, 0.0) - before.get(name, 0.0))
