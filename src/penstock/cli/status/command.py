"""`penstock status`: all members of a group, or of all groups, from what they reported to Kafka."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options.connection import BootstrapServers, ClientSettings, ConfigFile, client_settings
from penstock.cli.output import age_text, print_error, printable
from penstock.cli.signals import until_signal
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.fleet.reports.group_state import Group, Member
    from penstock.fleet.reports.reader import ReportReader
    from penstock.fleet.reports.report import Report

#: As in `reports/settings.py`, which imports the client.
DEFAULT_TOPIC = "penstock.reports"
ReportTopic = Annotated[str, typer.Option("--report-topic", help="Topic that the members report to.")]

#: Seconds that it takes at most to learn whether a member lives, and between two looks with --watch.
_SETTLE_S = 9.0
_LOOK_S = 1.0
#: Partitions and parked keys that are shown of each member.
_MOST_SHOWN = 10


def status(  # noqa: PLR0917 - typer reads options from parameters; nobody calls this by position
    bootstrap_servers: BootstrapServers,
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="Only this group.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line for each group.")] = False,
    topic: ReportTopic = DEFAULT_TOPIC,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
) -> None:
    """Tell how the members of a group do, wherever they run, from their reports; and which of them fell silent.

    Members report where they are told to: `penstock run --report`, or App(report=True). It waits for the next report of
    each, so that what it tells is of now: 2 seconds, and up to 9 where one is silent.

    Exit codes: 0 all members report, or others have what a silent one had, 1 one is silent, or none of the group
    reports, 2 wrong use, 3 no broker.
    """
    from penstock.fleet.reports.reader import ReportReader

    reading = ReportReader(bootstrap_servers, client_settings(config, config_file), topic)
    if watch:
        with until_signal(), reading as reader:
            _watch(reader, group, as_json=as_json)
        return
    with reading as reader:
        reader.settle(_SETTLE_S, group)
        found = _found(reader, group)
        if not found:
            raise _none(group, topic)
        _show(found, reader.states.ignored, as_json=as_json)
        if any(member.is_missed for group in found for member in group.members):
            raise typer.Exit(1)


def explain_members(bootstrap_servers: str, settings: dict[str, str], topic: str, group: str, *, as_json: bool) -> None:
    """Print what holds each partition of a group's members, as `penstock explain` does for those that run here."""
    from penstock.fleet.reports.reader import ReportReader

    with ReportReader(bootstrap_servers, settings, topic) as reader:
        reader.settle(_SETTLE_S, group)
        found = _found(reader, group)
        if not found:
            raise _none(group, topic)
    for member in found[0].members:
        if as_json:
            typer.echo(json.dumps(_member_json(member)))
            continue
        report = member.report
        typer.echo(
            f"{printable(report.group)}, {printable(report.member)}: {_partitions(report.partition_count)}"
            + (f", {_silence(member)}" if member.is_silent else "")
        )
        for partition in report.partitions:
            typer.echo(f"  {_partition_text(partition)}")
        for line in (*_left_out(report.left_out), *_sink_lines(report.sinks)):
            typer.echo(f"  {line}")
    if any(member.is_missed for member in found[0].members):
        raise typer.Exit(1)


def _found(reader: ReportReader, group: str | None) -> list[Group]:
    return [found for found in reader.groups() if group in {None, found.name}]


def _none(group: str | None, topic: str) -> PenstockError:
    whose = "no member" if group is None else f"no member of {group}"
    return PenstockError(
        f"{whose} reports to {topic}; start apps with `penstock run --report` or App(report=True), or correct the name"
    )


def _watch(reader: ReportReader, group: str | None, *, as_json: bool) -> None:
    from rich.console import Console

    while True:
        if not as_json:
            Console().clear()
        _show(_found(reader, group), reader.states.ignored, as_json=as_json)
        if reader.trouble is not None:
            print_error(f"no broker answers, so nothing newer is known: {printable(reader.trouble)}")
        next_at = time.monotonic() + _LOOK_S
        while (left := next_at - time.monotonic()) > 0:
            reader.follow(left)


def _show(groups: Sequence[Group], ignored: Mapping[str, int], *, as_json: bool) -> None:
    for group in groups:
        if as_json:
            members = [_member_json(member) for member in group.members]
            typer.echo(json.dumps({"group": group.name, "members": members}))
        else:
            for line in _group_lines(group):
                typer.echo(line)
    if ignored:
        counted = ", ".join(f"{count} {why}" for why, count in sorted(ignored.items()))
        print_error(f"records that are no reports were passed over: {counted}")


def _member_json(member: Member) -> dict[str, Any]:
    """Return a member as JSON has it, each partition with the sentence that `penstock explain` prints."""
    shown = asdict(member.report)
    shown["partitions"] = [{**partition, "text": _sentence(partition)} for partition in member.report.partitions]
    return {**shown, "age_s": round(member.age_s, 3), "is_silent": member.is_silent, "is_replaced": member.is_replaced}


def _group_lines(group: Group) -> Iterator[str]:
    from penstock.fleet.reports.report import total_lag

    living = [member.report for member in group.members if not member.is_silent]
    silent = sum(member.is_missed for member in group.members)
    count = sum(report.partition_count for report in living)
    handled = sum(report.rates.get("handled", 0.0) for report in living)
    yield (
        f"{printable(group.name)}: {len(living)} member{'' if len(living) == 1 else 's'}"
        + (f" and {silent} silent" if silent else "")
        + f", {_partitions(count)}, {_lag_text(total_lag(living))}, {handled:.0f} messages/s"
    )
    for member in group.members:
        yield from (f"  {line}" for line in _member_lines(member))


def _lag_text(lag: int | None) -> str:
    return "lag unknown" if lag is None else f"lag {lag}"


def _member_lines(member: Member) -> Iterator[str]:
    report, counts, rates = member.report, member.report.counts, member.report.rates
    if member.is_silent:
        yield f"{printable(report.member)}: {_silence(member)}; its last report:"
    else:
        yield f"{printable(report.member)}, process {report.process} on {printable(report.host)}:"
    if counts:
        yield (
            f"  {_partitions(report.partition_count)}, {_lag_text(report.lag)}, "
            f"{rates.get('handled', 0):.0f} messages/s, {rates.get('failed', 0):.1f} failed/s, "
            f"{counts.get('in_flight', 0):.0f} in flight, {counts.get('parked_keys', 0):.0f} keys parked"
            f"{_latency_text(report)}"
            + _nonzero(counts, {"held_keys": "held", "dead_letters": "dead letters", "stalls": "stalls"})
            + _nonzero(counts, {"over_time_limit": "over the time limit", "abandoned_calls": "threads abandoned"})
            + _nonzero(counts, {"dead_letter_failures": "dead letters refused", "failed_commits": "commits failed"})
        )
    if pauses := [f"{printable(reason)} {count:.0f}" for reason, count in report.pauses.items() if count]:
        yield f"  pauses so far: {', '.join(pauses)}"
    held = [partition for partition in report.partitions if _is_held(partition)]
    for partition in held[:_MOST_SHOWN]:
        yield f"  {_partition_text(partition)}"
        if partition["stack"]:
            yield from (f"      {printable(line)}" for line in partition["stack"].splitlines())
    if len(held) > _MOST_SHOWN:
        yield f"  and {len(held) - _MOST_SHOWN} partitions more that something holds: see `penstock explain --group`"
    yield from (f"  {line}" for line in _left_out(report.left_out))
    for partition in report.parked[:_MOST_SHOWN]:
        yield f"  {_parked_text(partition)}"
    yield from (f"  {line}" for line in _dead_letter_lines(report.dead_letters))
    yield from (f"  {line}" for line in _sink_lines(report.sinks))
    if report.coordinator is not None:
        of = report.coordinator
        yield (
            f"  coordinator: {of.get('pending', 0):.0f} transactions pending, the oldest for "
            f"{age_text(of.get('oldest_pending_age', 0.0))}, {of.get('held', 0):.0f} held, "
            f"{of.get('no_producer', 0):.0f} checks reached no producer"
        )
        yield from (f"    {printable(why)}" for why in report.waits)
        yield from (f"    {_transaction_text(transaction)}" for transaction in report.transactions[:_MOST_SHOWN])


def _partitions(count: float) -> str:
    return f"{count:.0f} partition{'' if count == 1 else 's'}"


def _silence(member: Member) -> str:
    if member.is_replaced:
        return f"silent for {age_text(member.age_s)}, and replaced: others have what it had"
    return (
        f"silent for {age_text(member.age_s)}: it died, is stopped, or reaches no broker (it reports every "
        f"{member.report.interval_s:g} s)"
    )


def _nonzero(counts: Mapping[str, float], names: Mapping[str, str]) -> str:
    return "".join(f", {counts[name]:.0f} {word}" for name, word in names.items() if counts.get(name))


def _is_held(partition: Mapping[str, Any]) -> bool:
    return bool(
        partition["blocking_offset"] is not None
        or partition["trouble"]
        or partition["paused"]
        or partition["partition"] < 0
    )


def _partition_text(partition: Mapping[str, Any]) -> str:
    return printable(_sentence(partition)) + (
        f", key hash {printable(partition['key_hash'])}" if partition["key_hash"] else ""
    )


def _sentence(partition: Mapping[str, Any]) -> str:
    """Return the sentence that `penstock explain` prints."""
    from penstock.consumer.inspect.explain import Explanation

    return str(Explanation(**{name: value for name, value in partition.items() if name not in {"key_hash", "stack"}}))


def _parked_text(message: Mapping[str, Any]) -> str:
    place = f"{message['topic']}[{message['partition']}]"
    text = f"key hash {message['key_hash']} of {place}: offset {message['offset']}, {message['state']}"
    text += f" ({message['handler']}) after {message['attempt']} failed tries"
    if message["due_in"] is not None:
        text += f", next try in {message['due_in']:.1f} s"
    return printable(text)


def _latency_text(report: Report) -> str:
    from penstock.consumer.latencies import quantile

    half, most = (quantile(report.latencies.get("done", ()), part) for part in (0.5, 0.99))
    return "" if half is None or most is None else f", half done within {half:.3g} s and 99 % within {most:.3g} s"


def _dead_letter_lines(reasons: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for reason in reasons[:_MOST_SHOWN]:
        last = (
            ""
            if reason["offset"] is None
            else f", the last was {reason['topic']}[{reason['partition']}]@{reason['offset']}"
        )
        text = f"{reason['count']} dead letters of {reason['topic']} in {reason['dead_letter_topic']}"
        yield printable(f"{text}: {reason['error']}{last}")


def _transaction_text(transaction: Mapping[str, Any]) -> str:
    waits = transaction["waits_for"] or "its decision"
    checks = f" after {transaction['checks']} checks" if transaction["checks"] else ""
    text = f"transaction {transaction['id']} of {transaction['group']} for {transaction['topics']}"
    return printable(f"{text}: {age_text(transaction['age'] or 0.0)} old{checks}, waits for {waits}")


def _sink_lines(sinks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from penstock.spark_sink.progress import SinkState, SinkStatistics

    names = {state.value: state for state in SinkState}
    for sink in sinks:
        state = names.get(sink["state"])
        known = {name: value for name, value in sink.items() if name != "state" and value is not None}
        yield printable(
            f"sink {sink['name']}: {sink['state']}" if state is None else str(SinkStatistics(state=state, **known))
        )


def _left_out(sums: Mapping[str, float]) -> Iterator[str]:
    if sums:
        yield (
            f"{_partitions(sums.get('partitions', 0))} more, with lag {sums.get('lag', 0):.0f} and "
            f"{sums.get('in_flight', 0):.0f} in flight, did not fit into the report"
        )
