"""`penstock check`: the settings of an app, its connection, its topics and its rights, before it is started."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options.app_options import AppServers, Settings, Target, loaded
from penstock.cli.options.connection import ClientSettings, ConfigFile
from penstock.cli.output import AsJson, print_json, print_table

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.cli.check.findings import Findings

_STATES = ("held", "ok"), ("missing", "missing"), ("unknown", "not told")


def check(  # noqa: PLR0917 - typer reads options from parameters; nobody calls this by position
    target: Target,
    servers: AppServers = None,
    settings: Settings = None,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
    principal: Annotated[
        str | None,
        typer.Option(
            metavar="User:NAME", help="For whom the commands are; left out: whom brokers take this client for."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what an app would run with and whether its cluster lets it; starts nothing and changes nothing.

    It prints each setting with where it stands, secrets hidden; asks the brokers for the app's topics and rights; and
    prints the least rights that the app needs as commands of kafka-acls, sinks and coordinator included.

    Exit codes: 0 it can start, 1 a topic or a right is missing, 2 wrong use, 3 no broker.
    """
    from penstock.cli.check import findings as found
    from penstock.cli.check.needs import commands

    app = loaded(target, servers, settings, config, config_file)
    findings = found.look(app)
    user = principal or found.principal(app)
    lines = commands(findings.needs.rights, user, app.bootstrap_servers)
    if as_json:
        print_json(_as_json(app, findings, user, lines))
    else:
        _print(app, findings, user, lines)
    if findings.failure is not None:
        raise findings.failure
    _raise_for_missing(app, findings, user)


def _raise_for_missing(app: App, findings: Findings, user: str) -> None:
    from penstock.clients.rights import MissingRightError
    from penstock.errors import TopicNotFoundError

    if findings.missing:
        raise MissingRightError(f"app {app.name} cannot start", findings.missing, user)
    if findings.absent:
        names = ", ".join(topic.name for topic in findings.absent)
        raise TopicNotFoundError(
            f"app {app.name} cannot start: no topic {names} at {app.bootstrap_servers}; create it, as by "
            f"kafka-topics.sh --bootstrap-server {app.bootstrap_servers} --create --topic {findings.absent[0].name}"
        )


def _print(app: App, findings: Findings, user: str, lines: list[str]) -> None:
    from penstock.cli.check.findings import settings_of

    typer.echo(f"app {app.name}")
    print_table(
        ("setting", "value", "from"), [(setting.name, setting.value, setting.origin) for setting in settings_of(app)]
    )
    typer.echo()
    if findings.failure is None:
        typer.echo(f"brokers at {app.bootstrap_servers}: answer, as {user}")
        rows = [(topic.name, topic.use, _partitions(topic)) for topic in findings.topics]
        print_table(("topic", "for", "partitions"), rows)
        for text in findings.single_copies:
            typer.echo(f"warning: {text}")
        typer.echo()
        for name, mark in _STATES:
            for right in getattr(findings, name):
                typer.echo(f"{mark:<9}{right}")
        if findings.unknown:
            typer.echo("not told: brokers tell no rights on transactional ids, on topics that are not there, or at all")
    else:
        typer.echo(f"brokers at {app.bootstrap_servers}: no answer")
    typer.echo()
    typer.echo("The least rights that it needs:")
    for line in lines:
        typer.echo(line)
    for note in findings.needs.notes:
        typer.echo(f"# {note}")


def _partitions(topic: Any) -> str:
    if topic.partitions is not None:
        return str(topic.partitions)
    return "missing" if topic.required else "made at the start"


def _as_json(app: App, findings: Findings, user: str, lines: list[str]) -> dict[str, Any]:
    from penstock.cli.check.findings import as_rows, settings_of

    return {
        "app": app.name,
        "ok": findings.failure is None and not findings.missing and not findings.absent,
        "settings": [dataclasses.asdict(setting) for setting in settings_of(app)],
        "bootstrap_servers": app.bootstrap_servers,
        "answers": findings.failure is None,
        "principal": user,
        "topics": [dataclasses.asdict(topic) for topic in findings.topics],
        "single_copies": list(findings.single_copies),
        "rights": [row for name, mark in _STATES for row in as_rows(getattr(findings, name), mark)],
        "commands": lines,
        "notes": list(findings.needs.notes),
    }
