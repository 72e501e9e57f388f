"""What the page shows, as JSON has it: of all groups a little, of the one that is looked at its details. Pure.

Bounded: a list has so many entries, the ones first that most need somebody, and how many there are in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from typing import Any

from penstock.fleet.page.history import History
from penstock.fleet.page.problems import BAD, WARN, as_json, explanation, problems_of
from penstock.fleet.reports.group_state import Group, Member
from penstock.fleet.reports.report import Report, total_lag, tried, urgency

_MOST_GROUPS = 300
_MOST_MEMBERS = 300
_MOST_PARTITIONS = 250
_MOST_ENTRIES = 60
#: Problems of a group that stand beside it among all groups.
_NAMED = 5
#: Points of the overview's small charts: every so-many-th of the history.
_EVERY = 6

_COUNTS = ("in_flight", "parked_keys", "held_keys", "dead_letters", "dead_letter_failures")


def overview(groups: Sequence[Group]) -> dict[str, Any]:
    """Return all groups, those with the worst problems first."""
    shown = [_of_group(group) for group in groups]
    shown.sort(key=lambda group: (-group["bad"], -group["warn"], -group["silent"], group["name"]))
    return {"groups": shown[:_MOST_GROUPS], "count": len(shown)}


def overview_history(groups: Iterable[str], history: History) -> dict[str, Any]:
    """Return the messages handled a second of each group, of every sixth point once there are enough."""
    series = {}
    for name in list(groups)[:_MOST_GROUPS]:
        points = history.series(name).get("handled", [])
        series[name] = points[len(points) % _EVERY :: _EVERY] if len(points) > 4 * _EVERY else points
    return {"handled": series}


def group_view(group: Group, member: str | None = None) -> dict[str, Any]:
    """Return a group with its members, or, by name, one of them alone with all of its partitions."""
    members = [seen for seen in group.members if member in {None, seen.report.member}]
    living = [seen.report for seen in members if not seen.is_silent]
    partitions = _entries(living, "partitions", urgency, _MOST_PARTITIONS)
    return {
        "name": group.name,
        "member": member,
        **_sums(living),
        "living": len(living),
        "silent": sum(seen.is_missed for seen in members),
        "problems": [as_json(problem) for problem in problems_of(group, member)],
        "members": [_of_member(seen) for seen in sorted(members, key=_need)[:_MOST_MEMBERS]],
        "member_count": len(members),
        "partitions": [{**_slim(part), "holds": _holds(part)} for part in partitions],
        "parked": [_slim(message) for message in _entries(living, "parked", tried)],
        "lanes": _lanes(living),
        "pauses": sum((Counter(report.pauses) for report in living), Counter()),
        "paused": _paused(living),
        "dead_letters": _dead_letters(living),
        "transactions": [
            _slim(transaction) for transaction in _entries(living, "transactions", lambda it: it["age"] or 0.0)
        ],
        "coordinators": [
            {"member": report.member, "counts": report.coordinator, "operator": report.operator}
            for report in living
            if report.coordinator is not None
        ][:_MOST_ENTRIES],
        "sinks": [_slim(sink) for sink in _entries(living, "sinks", lambda it: it["lag"] or 0)],
    }


def shown_places(groups: Iterable[Group]) -> Iterator[tuple[str, int, int]]:
    """Yield topic, partition and offset of messages that the page names: what blocks, is parked or was given up."""
    for report in (member.report for group in groups for member in group.members):
        for partition in report.partitions:
            if partition["blocking_offset"] is not None:
                yield partition["topic"], partition["partition"], partition["blocking_offset"]
        for message in (*report.parked, *report.dead_letters):
            if message["offset"] is not None:
                yield message["topic"], message["partition"], message["offset"]


def _of_group(group: Group) -> dict[str, Any]:
    problems = problems_of(group)
    levels = [problem.level for problem in problems]
    living = [member.report for member in group.members if not member.is_silent]
    return {
        "name": group.name,
        **_sums(living),
        "living": len(living),
        "silent": sum(member.is_missed for member in group.members),
        "bad": levels.count(BAD),
        "warn": levels.count(WARN),
        "problems": [as_json(problem) for problem in problems[:_NAMED]],
        "pending": sum((report.coordinator or {}).get("pending", 0) for report in living),
    }


def _sums(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the sums of reports; of counts that were not reported, 0."""
    return {
        **{name: sum(report.counts.get(name, 0) for report in reports) for name in _COUNTS},
        "partition_count": sum(report.partition_count for report in reports),
        "lag": total_lag(reports),
        # A coordinator alone publishes instead of handling.
        "rate": sum(report.rates.get("handled", report.rates.get("committed", 0.0)) for report in reports),
        "failed_rate": sum(report.rates.get("failed", 0.0) for report in reports),
        "commands": any(report.commands for report in reports),
    }


def _of_member(member: Member) -> dict[str, Any]:
    report = member.report
    return {
        "member": report.member,
        "host": report.host,
        "process": report.process,
        "silent": member.is_silent,
        "replaced": member.is_replaced,
        "age": member.age_s,
        "uptime": report.uptime_s,
        "busy": report.counts.get("busy_workers"),
        "workers": report.counts.get("workers"),
        **_sums([report]),
    }


def _need(member: Member) -> tuple[bool, bool, int, str]:
    return not member.is_missed, member.is_replaced, -member.report.known_lag, member.report.member


def _entries(
    reports: Iterable[Report], name: str, rank: Callable[[Mapping[str, Any]], Any], most: int = _MOST_ENTRIES
) -> list[dict[str, Any]]:
    """Return the entries of a list of all reports that rank first, each with its member and who operates it."""
    pairs = [(entry, report) for report in reports for entry in getattr(report, name)]
    return [
        {**entry, "member": report.member, "operator": report.operator}
        for entry, report in nlargest(most, pairs, key=lambda pair: rank(pair[0]))
    ]


def _slim(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry without what it does not say."""
    return {name: value for name, value in entry.items() if value not in (None, "", {})}


def _holds(part: Mapping[str, Any]) -> str:
    """Return what holds a partition, in a phrase."""
    paused = f"paused: {part['paused']}" if part["paused"] else ""
    if part["trouble"]:
        return str(part["trouble"])
    if part["blocking_offset"] is None:
        return paused or ("nothing: it is being read" if part["lag"] else "nothing: it is up to date")
    return explanation(part).holder() + (f"; {paused}" if paused else "")


def _lanes(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Return the lanes by handler: those of all members laid over one another, depths added, the oldest age."""
    found = []
    for name in sorted({name for report in reports for name in report.lanes})[:_MOST_ENTRIES]:
        reported = [report.lanes[name] for report in reports if name in report.lanes]
        buckets = max(len(lanes["depth"]) for lanes in reported)
        depth, age = [0.0] * buckets, [0.0] * buckets
        for lanes in reported:
            # A member with fewer lanes has each in the first of the buckets that it stands for.
            for number, (deep, old) in enumerate(zip(lanes["depth"], lanes["age"], strict=True)):
                at = number * buckets // len(lanes["depth"])
                depth[at], age[at] = depth[at] + deep, max(age[at], old)
        found.append({"handler": name, "depth": depth, "age": age})
    return found


def _paused(reports: Iterable[Report]) -> dict[str, int]:
    """Return how many partitions are paused now, by why."""
    parts = [part for report in reports for part in report.partitions if part["partition"] >= 0]
    return dict(Counter(part["paused"] for part in parts if part["paused"] is not None).most_common(_MOST_ENTRIES))


def _dead_letters(reports: Iterable[Report]) -> list[dict[str, Any]]:
    """Return dead letters by topic and error, those of all members added up, the last one's place."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    letters = [letter for report in reports for letter in report.dead_letters]
    for letter in sorted(letters, key=lambda it: -(it["age"] or 0.0)):
        place = (letter["topic"], letter["dead_letter_topic"], letter["error"])
        count = found[place]["count"] if place in found else 0
        found[place] = {**letter, "count": count + letter["count"]}
    return sorted(found.values(), key=lambda letter: -letter["count"])[:_MOST_ENTRIES]
