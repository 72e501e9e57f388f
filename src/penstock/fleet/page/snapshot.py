"""What the page shows, as JSON has it: of all groups a little, of the one that is looked at its details. Pure.

Bounded: a list has so many entries, the ones first that most need somebody, and how many there are in all.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.consumer.latencies import quantile
from penstock.fleet.page.history import History
from penstock.fleet.page.problems import BAD, WARN, as_json, problems_of
from penstock.fleet.reports.group_state import Group, Member
from penstock.fleet.reports.report import Report, total_lag, tried, urgency

_MOST_GROUPS = 300
_MOST_MEMBERS = 300
_MOST_PARTITIONS = 250
_MOST_ENTRIES = 60
#: Problems of a group that stand beside it among all groups.
_NAMED = 5

_COUNTS = (
    "in_flight",
    "parked_keys",
    "held_keys",
    "dead_letters",
    "dead_letter_failures",
    "stalls",
    "over_time_limit",
    "abandoned_calls",
    "failed_commits",
)


def overview(groups: Sequence[Group]) -> dict[str, Any]:
    """Return all groups, those with the worst problems first."""
    shown = [_of_group(group) for group in groups]
    shown.sort(key=lambda group: (-group["bad"], -group["warn"], -group["silent"], group["name"]))
    return {"groups": shown[:_MOST_GROUPS], "count": len(shown)}


def group_view(
    group: Group, history: History, member: str | None = None, *, with_stacks: bool = False
) -> dict[str, Any]:
    """Return a group with its members, or, by name, one of them alone with all of its partitions."""
    members = [seen for seen in group.members if member in {None, seen.report.member}]
    living = [member.report for member in members if not member.is_silent]
    problems = [as_json(problem, with_stack=with_stacks) for problem in problems_of(group, member)]
    partitions = [(partition, report) for report in living for partition in report.partitions]
    worst = heapq.nlargest(_MOST_PARTITIONS, partitions, key=lambda pair: urgency(pair[0]))
    parked = [{**message, "member": report.member} for report in living for message in report.parked]
    parked.sort(key=tried, reverse=True)
    transactions = [
        {**transaction, "member": report.member, "operator": report.operator}
        for report in living
        for transaction in report.transactions
    ]
    transactions.sort(key=lambda transaction: -(transaction["age"] or 0.0))
    return {
        "name": group.name,
        "member": member,
        **_sums(members),
        "problems": problems,
        "members": [_of_member(member) for member in sorted(members, key=_need)[:_MOST_MEMBERS]],
        "member_count": len(members),
        "partitions": [_partition(partition, report.member) for partition, report in worst],
        "partition_count": sum(report.partition_count for report in living),
        "left_out": sum(report.left_out.get("partitions", 0) for report in living),
        "parked": [_slim(message) for message in parked[:_MOST_ENTRIES]],
        "parked_count": sum(int(report.counts.get("parked_keys", 0)) for report in living),
        "lanes": _lanes(living),
        "pauses": _summed(report.pauses for report in living),
        "paused": _paused(living),
        "dead_letters": _dead_letters(living),
        "transactions": [_slim(transaction) for transaction in transactions[:_MOST_ENTRIES]],
        "coordinators": [
            {"member": report.member, "counts": report.coordinator, "waits": report.waits, "operator": report.operator}
            for report in living
            if report.coordinator is not None
        ][:_MOST_ENTRIES],
        "sinks": [{**_slim(sink), "member": report.member} for report in living for sink in report.sinks][
            :_MOST_ENTRIES
        ],
        "latencies": _latencies(history.latencies(group.name)),
    }


def group_history(group: str, history: History, member: str | None = None) -> dict[str, Any]:
    """Return the series of a group, or of one of its members, and of its Spark queries."""
    series = history.of_group(group) if member is None else history.of_member(group, member)
    return {"series": series, "sinks": history.of_sinks(group)}


def shown_places(groups: Iterable[Group]) -> Iterator[tuple[str, int, int]]:
    """Yield topic, partition and offset of messages that the page names: what blocks, is parked or was given up."""
    for report in (member.report for group in groups for member in group.members):
        for partition in report.partitions:
            if partition["blocking_offset"] is not None:
                yield partition["topic"], partition["partition"], partition["blocking_offset"]
        for message in (*report.parked, *report.dead_letters):
            if message["offset"] is not None:
                yield message["topic"], message["partition"], message["offset"]


def overview_history(groups: Iterable[str], history: History, every: int = 6) -> dict[str, Any]:
    """Return the messages handled a second of each group, of every so-many-th point."""
    series = {}
    for name in list(groups)[:_MOST_GROUPS]:
        points = history.of_group(name).get("handled", [])
        series[name] = points[len(points) % every :: every] if len(points) > 4 * every else points
    return {"handled": series}


def _of_group(group: Group) -> dict[str, Any]:
    problems = problems_of(group)
    levels = [problem.level for problem in problems]
    return {
        "name": group.name,
        **_sums(group.members),
        "bad": levels.count(BAD),
        "warn": levels.count(WARN),
        "problems": [as_json(problem) for problem in problems[:_NAMED]],
        "sinks": sum(len(member.report.sinks) for member in group.members),
        "pending": sum((member.report.coordinator or {}).get("pending", 0) for member in group.members),
    }


def _sums(members: Sequence[Member]) -> dict[str, Any]:
    """Return the sums of those that live; of counts that were not reported, 0."""
    living = [member.report for member in members if not member.is_silent]
    sums: dict[str, Any] = {name: sum(report.counts.get(name, 0) for report in living) for name in _COUNTS}
    return {
        **sums,
        "living": len(living),
        "silent": sum(member.is_missed for member in members),
        "partitions": sum(report.partition_count for report in living),
        "lag": total_lag(living),
        "rate": round(sum(_rate(report, "handled") for report in living), 1),
        "failed_rate": round(sum(report.rates.get("failed", 0.0) for report in living), 2),
        "commands": any(report.commands for report in living),
    }


def _rate(report: Report, name: str) -> float:
    # A coordinator alone publishes instead of handling.
    return report.rates.get(name, report.rates.get("committed", 0.0))


def _of_member(member: Member) -> dict[str, Any]:
    report, counts = member.report, member.report.counts
    return {
        "member": report.member,
        "host": report.host,
        "process": report.process,
        "silent": member.is_silent,
        "replaced": member.is_replaced,
        "age": round(member.age_s, 1),
        "uptime": report.uptime_s,
        "partitions": report.partition_count,
        "lag": report.lag,
        "rate": round(_rate(report, "handled"), 1),
        "failed_rate": report.rates.get("failed", 0.0),
        "busy": counts.get("busy_workers"),
        "workers": counts.get("workers"),
        "commands": report.commands,
        **{name: counts.get(name, 0) for name in _COUNTS},
    }


def _need(member: Member) -> tuple[bool, bool, int, str]:
    return not member.is_missed, member.is_replaced, -member.report.known_lag, member.report.member


def _slim(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _partition(partition: Mapping[str, Any], member: str) -> dict[str, Any]:
    return {**_slim({name: value for name, value in partition.items() if name != "stack"}), "member": member}


def _lanes(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Return the lanes by handler: those of all members laid over one another, depths added, the oldest age."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in sorted({name for report in reports for name in report.lanes})[:_MOST_ENTRIES]:
        reported = [report.lanes[name] for report in reports if name in report.lanes]
        buckets = max(len(depths["depth"]) for depths in reported)
        depth, age = [0.0] * buckets, [0.0] * buckets
        for depths in reported:
            # A member with fewer lanes has each in the first of the buckets that it stands for.
            for number, (deep, old) in enumerate(zip(depths["depth"], depths["age"], strict=True)):
                at = number * buckets // len(depths["depth"])
                depth[at], age[at] = depth[at] + deep, max(age[at], old)
        found[name] = {"depth": depth, "age": age}
    return [{"handler": name, **lanes} for name, lanes in found.items()]


def _summed(mappings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for mapping in mappings:
        for name, number in mapping.items():
            sums[name] = sums.get(name, 0) + number
    return {name: number for name, number in sums.items() if number}


def _paused(reports: Iterable[Report]) -> dict[str, int]:
    """Return how many partitions are paused now, by why."""
    found: dict[str, int] = {}
    for report in reports:
        for partition in report.partitions:
            if partition["paused"] is not None and partition["partition"] >= 0:
                found[partition["paused"]] = found.get(partition["paused"], 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1])[:_MOST_ENTRIES])


def _dead_letters(reports: Iterable[Report]) -> list[dict[str, Any]]:
    """Return dead letters by topic and error, those of all members added up, the last one's place."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for report in reports:
        for letter in report.dead_letters:
            place = (letter["topic"], letter["dead_letter_topic"], letter["error"])
            former = found.get(place)
            if former is None:
                found[place] = dict(letter)
                continue
            count = former["count"] + letter["count"]
            if (letter["age"] or 0.0) < (former["age"] or 0.0):
                found[place] = former = dict(letter)
            former["count"] = count
    return sorted(found.values(), key=lambda letter: -letter["count"])[:_MOST_ENTRIES]


def _latencies(counts: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float | None]]:
    parts = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: {title: quantile(of, part) for title, part in parts.items()} for name, of in counts.items()}
