"""`penstock status`: all members of one group or of all groups, by their reports."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import Reading
from penstock.cli.output import Result, Table
from penstock.errors import PenstockError
from penstock.fleet_member import REPORTS_TOPIC
from penstock.places import age_text, counted

if TYPE_CHECKING:
    from penstock.fleet.page.problems import Problem
    from penstock.fleet.reports.group_state import Group, Member
    from penstock.fleet.reports.reader import ReportReader
    from penstock.fleet.reports.report import Report

ReportTopic = Annotated[str, typer.Option("--report-topic", help="Topic of the reports.")]

#: The timeout in seconds for learning whether a member is alive; seconds between two results with --watch.
_LIVENESS_BUDGET_S = 9.0
_WATCH_INTERVAL_S = 1.0
#: The number of problems shown of each group.
_MOST_SHOWN = 20
#: The columns of the table; JSON has the whole report.
_COLUMNS = (
    "member",
    "group",
    "state",
    "partition_count",
    "lag",
    "handled_per_second",
    "failed_per_second",
    "in_flight",
    "parked",
)


def status(
    cluster: Reading,
    *,
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="Only this group.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until Ctrl-C.")] = False,
    topic: ReportTopic = REPORTS_TOPIC,
) -> Iterator[Result]:
    """Show the state and the problems of a group's members on all machines, by their reports.

    Members report with `penstock run --report` or App(report=True). The command waits for the next report of each
    member, so that the state is current: 2 seconds, and up to 9 if one is silent. Ends with 1 if no member reports, or
    if a member is silent and no other member has its partitions. With --watch, each result is its own JSON object.
    """
    with _reader(cluster, topic) as reader:
        if not watch:
            yield _result(_settled(reader, group, topic), reader)
        while watch:
            yield _result([found for found in reader.groups() if group in {None, found.name}], reader, watch=True)
            next_at = time.monotonic() + _WATCH_INTERVAL_S
            while (left := next_at - time.monotonic()) > 0:
                reader.follow(left)


def explain_members(cluster: Reading, topic: str, group: str) -> Result:
    """Return the reason why each partition of a group's members does not move, for `penstock explain --reports`."""
    with _reader(cluster, topic) as reader:
        (found,) = _settled(reader, group, topic)
    rows = [
        {"member": member.report.member, **_partition(partition)}
        for member in found.members
        for partition in member.report.partitions
    ]
    lines = [text for member in found.members for text in explained(member)]
    shown = ("member", "state", "age_s", "is_silent", "partition_count", "left_out")
    members = [{name: row[name] for name in shown} for row in map(_member_row, found.members)]
    facts = {"group": group, "members": members, "partitions": rows}
    return Result(facts=facts, lines=lines, code=int(any(member.is_missed for member in found.members)))


def _reader(cluster: Reading, topic: str) -> ReportReader:
    from penstock.fleet.reports.reader import ReportReader

    cluster.admin(f"the reports in {topic} cannot be read")
    return ReportReader(cluster.servers, cluster.settings, topic)


def _settled(reader: ReportReader, group: str | None, topic: str) -> list[Group]:
    reader.settle(_LIVENESS_BUDGET_S, group)
    if found := [found for found in reader.groups() if group in {None, found.name}]:
        return found
    no_member = "no member" if group is None else f"no member of {group}"
    raise PenstockError(
        f"{no_member} reports to {topic}; start apps with `penstock run --report` or App(report=True), or correct the "
        "name"
    )


def _result(groups: Sequence[Group], reader: ReportReader, *, watch: bool = False) -> Result:
    from penstock.fleet.page.problems import as_json, problems_of

    rows = [_member_row(member) for group in groups for member in group.members]
    problems = {group.name: problems_of(group) for group in groups}
    facts = {"problems": [{"group": name, **as_json(problem)} for name, found in problems.items() for problem in found]}
    lines = [text for group in groups for text in group_lines(group, problems[group.name])]
    notes = []
    if ignored := reader.ignored:
        each = ", ".join(f"{count} {why}" for why, count in sorted(ignored.items()))
        notes.append(f"ignored records, which are no reports: {each}")
    if watch and reader.trouble is not None:
        notes.append(f"no broker answers, so the state is old: {reader.trouble}")
    is_missed = any(member.is_missed for group in groups for member in group.members)
    tables, code = [Table("members", rows, _COLUMNS)], int(is_missed and not watch)
    return Result(tables, facts, lines=lines, notes=notes, code=code, clear=watch)


def _member_row(member: Member) -> dict[str, Any]:
    report = member.report
    return {
        **asdict(report),
        "partitions": [_partition(partition) for partition in report.partitions],
        "parked_messages": report.parked,
        "age_s": round(member.age_s, 3),
        "is_silent": member.is_silent,
        "is_replaced": member.is_replaced,
        "state": _state(member),
        "partition_count": report.partition_count,
        "lag": report.lag,
        "handled_per_second": _rate(report, "handled"),
        "failed_per_second": _rate(report, "failed"),
        "in_flight": report.counts.get("in_flight"),
        "parked": report.counts.get("parked_keys"),
    }


def _rate(report: Report, name: str) -> float | None:
    return round(report.rates[name], 1) if name in report.rates else None


def _partition(partition: Mapping[str, Any]) -> dict[str, Any]:
    return {**partition, "text": _sentence(partition)}


def _state(member: Member) -> str:
    if not member.is_silent:
        return "reports"
    return f"silent for {age_text(member.age_s)}" + (", others have its partitions" if member.is_replaced else "")


def explained(member: Member) -> Iterator[str]:
    """Yield the explanation of each partition of a member."""
    report = member.report
    silent = f", silent for {age_text(member.age_s)}" if member.is_silent else ""
    yield f"{report.group}, {report.member}: {counted(report.partition_count, 'partition')}{silent}"
    for partition in report.partitions:
        yield f"  {_sentence(partition)}" + (f", key hash {partition['key_hash']}" if partition["key_hash"] else "")
    if sums := report.left_out:
        yield (
            f"  {counted(int(sums.get('partitions', 0)), 'partition')} more, with lag {sums.get('lag', 0):.0f} and "
            f"{sums.get('in_flight', 0):.0f} in flight, did not fit into the report"
        )


def _sentence(partition: Mapping[str, Any]) -> str:
    """Return the sentence about a partition, as `penstock explain` prints it."""
    from penstock.fleet.page.problems import explanation

    return str(explanation(partition))


def group_lines(group: Group, problems: Sequence[Problem]) -> Iterator[str]:
    """Yield the sums of a group, and its problems as the page has them, the worst first."""
    from penstock.fleet.reports.report import total_lag

    living = [member.report for member in group.members if not member.is_silent]
    silent = sum(member.is_missed for member in group.members)
    lag = total_lag(living)
    yield (
        f"{group.name}: {counted(len(living), 'member')}"
        + (f" and {silent} silent" if silent else "")
        + f", {counted(sum(report.partition_count for report in living), 'partition')}, "
        + f"{'lag unknown' if lag is None else f'lag {lag}'}, {sum(report.rate for report in living):.0f} messages/s"
    )
    for problem in problems[:_MOST_SHOWN]:
        yield f"  {problem.level:<5}{problem.title}: {problem.text}"
    if len(problems) > _MOST_SHOWN:
        yield f"  and {len(problems) - _MOST_SHOWN} more: see `penstock explain {group.name} --reports`"
