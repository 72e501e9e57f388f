"""`penstock audit`: what was done to members, groups, dead letters and transactions, by whom, and what came of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options.connection import BootstrapServers, ClientSettings, ConfigFile, client_settings
from penstock.cli.output import print_error, printable
from penstock.cli.signals import until_signal

if TYPE_CHECKING:
    from penstock.fleet.commands.audit import AuditRecord

#: As in `commands/settings.py`, which imports the client.
_TOPIC = "penstock.audit"
_LAST = 50


def audit(  # noqa: PLR0917 - typer reads options from parameters; nobody calls this by position
    bootstrap_servers: BootstrapServers,
    last: Annotated[int, typer.Option("--last", min=1, help="The newest so many records of each partition.")] = _LAST,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes, until Ctrl-C.")] = False,
    details: Annotated[bool, typer.Option("--details", help="Print stacks, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line for each record.")] = False,
    topic: Annotated[str, typer.Option("--audit-topic", help="Topic of the audit.")] = _TOPIC,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
) -> None:
    """Print what was done by the dashboard's actions and by commands: who asked, for what, and what came of it.

    Three records tell of an action, by one id: asked, the answer of each member, and the outcome.

    Exit codes: 0 done, 1 failed, 2 wrong use, 3 no broker.
    """
    from penstock.fleet.commands.audit_log import audit_records

    passed_over = 0
    reading = audit_records(bootstrap_servers, client_settings(config, config_file), topic, last, follow=follow)
    with until_signal():
        for record in reading:
            if record is None:
                passed_over += 1
            elif as_json:
                typer.echo(json.dumps(_as_json(record)))
            else:
                typer.echo(_line(record))
                for line in (record.details or "").splitlines() if details else ():
                    typer.echo(f"    {printable(line)}")
    if passed_over:
        print_error(f"{passed_over} records that are none of the audit were passed over")


def _as_json(record: AuditRecord) -> dict[str, Any]:
    outcome = None if record.outcome is None else record.outcome.value
    return {**asdict(record), "kind": record.kind.value, "outcome": outcome}


def _line(record: AuditRecord) -> str:
    at = datetime.fromtimestamp(min(record.at_ms, 253_402_300_799_000) / 1000, UTC)
    what = record.kind.value if record.outcome is None else f"{record.kind.value} {record.outcome.value}"
    parameters = " ".join(f"{name}={value}" for name, value in record.parameters.items())
    told = f": {record.said}" if record.said else ""
    return printable(f"{at:%Y-%m-%d %H:%M:%S} {record.id[:8]} {record.name} {what} by {record.by} [{parameters}]{told}")
