"""`penstock audit`: the actions on members, groups, dead letters and transactions, with their callers and results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import MOST_COUNT, Reading
from penstock.cli.output import Result, time_text
from penstock.places import counted

if TYPE_CHECKING:
    from penstock.fleet.commands.audit import AuditRecord

_LAST = 50


def audit(
    cluster: Reading,
    *,
    last: Annotated[
        int,
        typer.Option("--last", min=1, max=MOST_COUNT, help="The number of newest records to print of each partition."),
    ] = _LAST,
    follow: Annotated[bool, typer.Option("--follow", help="Print later records as well, until Ctrl-C.")] = False,
    details: Annotated[bool, typer.Option("--details", help="Print stacks as well.")] = False,
    topic: Annotated[str, typer.Option("--audit-topic", help="Topic of the audit.")] = "penstock.audit",
) -> Iterator[Result]:
    """Print the actions of the dashboard and the commands: the caller, the parameters and the result.

    The records of an action share one id: "asked", the answer of each member, and the outcome. With --follow, each
    record is its own JSON object.
    """
    from penstock.fleet.commands.audit import audit_records

    cluster.admin(f"the audit in {topic} cannot be read")
    reading = audit_records(cluster.servers, cluster.settings, topic, last, follow=follow)
    for found in ([record] for record in reading) if follow else [list(reading)]:
        yield _result(found, details=details)


def _result(found: list[AuditRecord | None], *, details: bool) -> Result:
    records = [record for record in found if record is not None]
    ignored = len(found) - len(records)
    lines = [line for record in records for line in _lines(record, details=details)]
    notes = [f"{counted(ignored, 'record')} ignored: not about actions"] if ignored else []
    return Result(facts={"records": [asdict(record) for record in records]}, lines=lines, notes=notes)


def _lines(record: AuditRecord, *, details: bool) -> Iterator[str]:
    step = record.kind.value if record.outcome is None else f"{record.kind.value} {record.outcome.value}"
    parameters = " ".join(f"{name}={value}" for name, value in record.parameters.items())
    said = f": {record.said}" if record.said else ""
    at = time_text(record.at_ms).removesuffix(" UTC")
    yield f"{at} {record.id[:8]} {record.name} {step} by {record.by} [{parameters}]{said}"
    yield from (f"    {line}" for line in (record.details or "").splitlines() if details)
