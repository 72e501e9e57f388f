"""What was of the last half hour: rates, lag and latencies by group and member, in series of bounded length. Pure.

Counts in reports are since a member's start, so a point is their difference: none is lost between two reports. Where
there are more members than may be, those that were not heard of for longest lose their series.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from penstock.consumer.latencies import BUCKETS, quantile
from penstock.fleet.reports.group_state import Group
from penstock.fleet.reports.report import Report, total_lag

#: Seconds between two points, and how many there are: half an hour.
STEP_S = 5.0
POINTS = 360
#: Members and groups whose series are kept at most, and series of each: five, and one for each Spark query.
_MOST_KEPT = 2_500
_MOST_SERIES = 21

_COUNTED = ("handled", "failed")
_SERIES = (*_COUNTED, "lag", "p50", "p99")


class History:
    """Takes the state of all groups every `STEP_S`. For one thread.

    The series are `handled` and `failed` (a second), `lag`, `p50` and `p99` (seconds from the fetch to the end of the
    handler), and `batch NAME`, the seconds of each batch of a Spark query, from its first batch on.
    """

    def __init__(self) -> None:
        # By group and member, None for all of a group; the last that got a point is at the end. NaN: not known.
        self._kept: OrderedDict[tuple[str, str | None], dict[str, array[float]]] = OrderedDict()
        # The reports of the last point.
        self._before: dict[tuple[str, str], Report] = {}

    def add(self, groups: Iterable[Group]) -> None:
        """Add a point of each group and each of its members."""
        groups = list(groups)
        for group in groups:
            for member in group.members:
                self._add(group.name, member.report.member, [] if member.is_silent else [member.report])
        # Groups come last: where there are too many, members lose theirs first.
        for group in groups:
            self._add(group.name, None, [member.report for member in group.members if not member.is_silent])
        self._before = {(it.name, seen.report.member): seen.report for it in groups for seen in it.members}
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)

    def series(self, group: str, member: str | None = None) -> dict[str, list[float | None]]:
        """Return the series of a group or of one of its members, None where nothing is known; empty without any."""
        return {
            name: [None if math.isnan(value) else float(f"{value:.4g}") for value in points]
            for name, points in self._kept.get((group, member), {}).items()
        }

    def _add(self, group: str, member: str | None, living: Sequence[Report]) -> None:
        point = _point([(report, self._before.get((group, report.member))) for report in living])
        series = self._kept.setdefault((group, member), {name: array("f") for name in _SERIES})
        self._kept.move_to_end((group, member))
        for name in point:
            if name not in series and len(series) < _MOST_SERIES:
                series[name] = array("f")
        for name, points in series.items():
            value = point.get(name)
            points.append(math.nan if value is None else value)
            del points[:-POINTS]


def _point(reports: Sequence[tuple[Report, Report | None]]) -> Mapping[str, float | None]:
    """Return what reports say together, each with the one before it; what is not known is left out, or None."""
    if not reports:
        return {}
    sums: dict[str, float] = {}
    batches: dict[str, float] = {}
    done = [0.0] * BUCKETS
    for report, before in reports:
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
            sums[name] = sums.get(name, 0.0) + rates.get(name, 0.0)
    lag = total_lag(report for report, _ in reports)
    return {**sums, **batches, "lag": lag, "p50": quantile(done, 0.5), "p99": quantile(done, 0.99)}


def _grown(now: Mapping[str, float], before: Mapping[str, float], name: str) -> float:
    return max(0.0, now.get(name, 0.0) - before.get(name, 0.0))
