"""The history of the last half hour: rates, lag and latencies by group and member, as bounded time series. Pure.

Counts in reports are totals since a member's start, so a point is the difference of two reports: no event is lost
between them. If there are too many members, the ones with the oldest last report lose their series.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from penstock.consumer.latencies import BUCKETS, quantile
from penstock.fleet.reports.group_state import Group
from penstock.fleet.reports.report import Report, total_lag

#: Seconds between two points, and the number of points: half an hour.
STEP_S = 5.0
POINTS = 360
#: The limit of members and groups with series, and of series of each: five, and one for each Spark query.
_MOST_KEPT = 2_500
_MOST_SERIES = 21

_COUNTED = ("handled", "failed")
_SERIES = (*_COUNTED, "lag", "p50", "p99")


class History:
    """Collects the state of all groups every `STEP_S`. For one thread.

    The series are `handled` and `failed` (a second), `lag`, `p50` and `p99` (seconds from the fetch to the end of the
    handler), and `batch NAME`, the seconds of each batch of a Spark query, from its first batch on.
    """

    def __init__(self) -> None:
        # By group and member; member None is the whole group. The latest updated is last. NaN: unknown.
        self._kept: OrderedDict[tuple[str, str | None], dict[str, array[float]]] = OrderedDict()
        # The reports of the previous point.
        self._before: dict[tuple[str, str], Report] = {}

    def add(self, groups: Iterable[Group]) -> None:
        """Add a point of each group and each of its members."""
        groups = list(groups)
        for group in groups:
            for member in group.members:
                self._add(group.name, member.report.member, [] if member.is_silent else [member.report])
        # Groups are updated last, so members lose their series before groups do.
        for group in groups:
            self._add(group.name, None, [member.report for member in group.members if not member.is_silent])
        self._before = {
            (group.name, member.report.member): member.report for group in groups for member in group.members
        }
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)

    def series(self, group: str, member: str | None = None) -> dict[str, list[float | None]]:
        """Return the series of a group or of one of its members; unknown points are None."""
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
    """Return the sums of reports, each paired with its previous report; unknown values are absent or None."""
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
            continue  # a process's first report has no previous one
        rates = report.rates
        if (took_s := report.uptime_s - before.uptime_s) > 0:
            rates = {name: _grown(report.counts, before.counts, name) / took_s for name in _COUNTED}
            before_done = before.latencies.get("done") or [0.0] * BUCKETS
            # A count can fall: a worker that ended no longer contributes.
            pairs = zip(report.latencies.get("done", ()), before_done, strict=False)
            grown = [max(0.0, now - then) for now, then in pairs]
            done = [value + more for value, more in zip(done, grown, strict=True)] if len(grown) == BUCKETS else done
        # Without a new report, for example if they come every minute, the last rates continue.
        for name in _COUNTED:
            sums[name] = sums.get(name, 0.0) + rates.get(name, 0.0)
    lag = total_lag(report for report, _ in reports)
    return {**sums, **batches, "lag": lag, "p50": quantile(done, 0.5), "p99": quantile(done, 0.99)}


def _grown(now: Mapping[str, float], before: Mapping[str, float], name: str) -> float:
    return max(0.0, now.get(name, 0.0) - before.get(name, 0.0))
