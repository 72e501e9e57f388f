"""`penstock audit`: what was done to members, groups, dead letters and transactions, by whom, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import Reading
from penstock.cli.output import Result, time_text

if TYPE_CHECKING:
    from penstock.fleet.commands.audit import AuditRecord

_LAST = 50


def audit(
    cluster: Reading,
    *,
    last: Annotated[int, typer.Option("--last", min=1, help="The newest so many records of each partition.")] = _LAST,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes, until Ctrl-C.")] = False,
    details: Annotated[bool, typer.Option("--details", help="Print stacks, too.")] = False,
    topic: Annotated[str, typer.Option("--audit-topic", help="Topic of the audit.")] = "penstock.audit",
) -> Iterator[Result]:
    """Print what was done by the dashboard's actions and by commands: who asked, for what, and what came of it.

    Three records tell of an action, by one id: asked, the answer of each member, and the outcome. With --follow, each
    record is a JSON object of its own.
    """
    from penstock.fleet.commands.audit import audit_records

    cluster.admin(f"the audit in {topic} cannot be read")
    reading = audit_records(cluster.servers, cluster.settings, topic, last, follow=follow)
    for found in ([record] for record in reading) if follow else [list(reading)]:
        yield _shown(found, details=details)


def _shown(found: list[AuditRecord | None], *, details: bool) -> Result:
    records = [record for record in found if record is not None]
    passed_over = len(found) - len(records)
    lines = [line for record in records for line in _lines(record, details=details)]
    notes = [f"{passed_over} records that are none of the audit were passed over"] if passed_over else []
    return Result(facts={"records": [asdict(record) for record in records]}, lines=lines, notes=notes)


def _lines(record: AuditRecord, *, details: bool) -> Iterator[str]:
    what = record.kind.value if record.outcome is None else f"{record.kind.value} {record.outcome.value}"
    parameters = " ".join(f"{name}={value}" for name, value in record.parameters.items())
    said = f": {record.said}" if record.said else ""
    at = time_text(record.at_ms).removesuffix(" UTC")
    yield f"{at} {record.id[:8]} {record.name} {what} by {record.by} [{parameters}]{said}"
    yield from (f"    {line}" for line in (record.details or "").splitlines() if details)
