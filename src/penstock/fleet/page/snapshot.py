"""The snapshot for the page, as JSON: a summary of all groups, or the details of one. Pure.

It is bounded: each list has a limit, has the most urgent entries first, and comes with the total number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from typing import Any

from penstock.fleet.page.history import History
from penstock.fleet.page.problems import BAD, WARN, as_json, explanation, problems_of
from penstock.fleet.reports.group_state import Group, Member
from penstock.fleet.reports.report import Report, parked_urgency, total_lag, urgency

_MOST_GROUPS = 300
_MOST_MEMBERS = 300
_MOST_PARTITIONS = 250
_MOST_ENTRIES = 60
#: The number of problems that the summary of a group has.
_NAMED = 5
#: The small charts of the overview show every sixth point of the history.
_EVERY = 6

_COUNTS = ("in_flight", "parked_keys", "held_keys", "dead_letters", "dead_letter_failures")


def overview(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the summaries of all groups, the worst problems first."""
    summaries = [_of_group(group) for group in groups]
    summaries.sort(key=lambda group: (-group["bad"], -group["warn"], -group["silent"], group["name"]))
    return {"groups": summaries[:_MOST_GROUPS], "count": len(summaries)}


def overview_history(groups: Iterable[str], history: History) -> dict[str, Any]:
    """Return the rate of handled messages of each group: every sixth point, if there are enough."""
    series = {}
    for name in list(groups)[:_MOST_GROUPS]:
        points = history.series(name).get("handled", [])
        series[name] = points[len(points) % _EVERY :: _EVERY] if len(points) > 4 * _EVERY else points
    return {"handled": series}


def group_view(group: Group, member: str | None = None) -> dict[str, Any]:
    """Return the details of a group, or of the named member only."""
    members = [candidate for candidate in group.members if member in {None, candidate.report.member}]
    living = [candidate.report for candidate in members if not candidate.is_silent]
    partitions = _entries(living, "partitions", urgency, _MOST_PARTITIONS)
    return {
        "name": group.name,
        "member": member,
        **_sums(living),
        "living": len(living),
        "silent": sum(candidate.is_missed for candidate in members),
        "problems": [as_json(problem) for problem in problems_of(group, member)],
        "members": [_of_member(candidate) for candidate in sorted(members, key=_member_order)[:_MOST_MEMBERS]],
        "member_count": len(members),
        "partitions": [{**_without_empty(part), "holds": _blocker(part)} for part in partitions],
        "parked": [_without_empty(message) for message in _entries(living, "parked", parked_urgency)],
        "lanes": _lanes(living),
        "pauses": sum((Counter(report.pauses) for report in living), Counter()),
        "paused": _paused(living),
        "dead_letters": _dead_letters(living),
        "transactions": [
            _without_empty(transaction)
            for transaction in _entries(living, "transactions", lambda transaction: transaction["age"] or 0.0)
        ],
        "coordinators": [
            {"member": report.member, "counts": report.coordinator, "operator": report.operator}
            for report in living
            if report.coordinator is not None
        ][:_MOST_ENTRIES],
        "sinks": [_without_empty(sink) for sink in _entries(living, "sinks", lambda sink: sink["lag"] or 0)],
    }


def shown_places(groups: Iterable[Group]) -> Iterator[tuple[str, int, int]]:
    """Yield topic, partition and offset of the messages that the page names: blocking, parked and dead ones."""
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
    """Return the sums of reports; a count that was not reported is 0."""
    return {
        **{name: sum(report.counts.get(name, 0) for report in reports) for name in _COUNTS},
        "partition_count": sum(report.partition_count for report in reports),
        "lag": total_lag(reports),
        "rate": sum(report.rate for report in reports),
        "failed_rate": sum(report.rates.get("failed", 0.0) for report in reports),
        # Without those of a coordinator, whose only commands settle transactions: `operator` is the target of these.
        "commands": any(report.commands and report.operator.get("group") != report.group for report in reports),
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
        **(sums := _sums([report])),
        # A member that hangs may still answer with its stacks; a replaced one is gone.
        "commands": sums["commands"] and not member.is_replaced,
    }


def _member_order(member: Member) -> tuple[bool, bool, int, str]:
    return not member.is_missed, member.is_replaced, -member.report.known_lag, member.report.member


def _entries(
    reports: Iterable[Report], name: str, rank: Callable[[Mapping[str, Any]], Any], most: int = _MOST_ENTRIES
) -> list[dict[str, Any]]:
    """Return the highest entries of a list of all reports, each with its member and the operator of its store."""
    pairs = [(entry, report) for report in reports for entry in getattr(report, name)]
    return [
        {**entry, "member": report.member, "operator": report.operator}
        for entry, report in nlargest(most, pairs, key=lambda pair: rank(pair[0]))
    ]


def _without_empty(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry without its empty fields."""
    return {name: value for name, value in entry.items() if value not in (None, "", {})}


def _blocker(part: Mapping[str, Any]) -> str:
    """Return the reason why a partition does not move, in a phrase."""
    paused = f"paused: {part['paused']}" if part["paused"] else ""
    if part["trouble"]:
        return str(part["trouble"])
    if part["blocking_offset"] is None:
        return paused or ("nothing: it is being read" if part["lag"] else "nothing: it is up to date")
    return explanation(part).holder() + (f"; {paused}" if paused else "")


def _lanes(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Return the lanes by handler, combined over all members: the sum of depths and the highest age."""
    found = []
    for name in sorted({name for report in reports for name in report.lanes})[:_MOST_ENTRIES]:
        reported = [report.lanes[name] for report in reports if name in report.lanes]
        buckets = max(len(lanes["depth"]) for lanes in reported)
        depth, age = [0.0] * buckets, [0.0] * buckets
        for lanes in reported:
            # A lane of a member with fewer lanes covers several buckets: it counts in the first of them.
            for number, (messages, oldest) in enumerate(zip(lanes["depth"], lanes["age"], strict=True)):
                bucket = number * buckets // len(lanes["depth"])
                depth[bucket], age[bucket] = depth[bucket] + messages, max(age[bucket], oldest)
        found.append({"handler": name, "depth": depth, "age": age})
    return found


def _paused(reports: Iterable[Report]) -> dict[str, int]:
    """Return the number of partitions that are paused now, by reason."""
    parts = [part for report in reports for part in report.partitions if part["partition"] >= 0]
    return dict(Counter(part["paused"] for part in parts if part["paused"] is not None).most_common(_MOST_ENTRIES))


def _dead_letters(reports: Iterable[Report]) -> list[dict[str, Any]]:
    """Return the counts of dead letters by topic and error over all members, with the place of the latest one."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    entries = [entry for report in reports for entry in report.dead_letters]
    for entry in sorted(entries, key=lambda entry: -(entry["age"] or 0.0)):
        kind = (entry["topic"], entry["dead_letter_topic"], entry["error"])
        count = found[kind]["count"] if kind in found else 0
        found[kind] = {**entry, "count": count + entry["count"]}
    return sorted(found.values(), key=lambda entry: -entry["count"])[:_MOST_ENTRIES]
