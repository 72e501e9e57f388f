"""`penstock explain`: what holds each partition of the apps that run here."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from penstock.cli.options.connection import SERVERS_OPTION, ClientSettings, ConfigFile, client_settings
from penstock.cli.status.command import DEFAULT_TOPIC, ReportTopic, explain_members
from penstock.errors import ConfigurationError, PenstockError


def explain(  # noqa: PLR0917 - typer reads options from parameters; nobody calls this by position
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="Only apps of this name.")] = None,
    members_of: Annotated[
        str | None,
        typer.Option(
            "--group", metavar="GROUP", help="All members of this group, from their reports, wherever they run."
        ),
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Show the keys of messages that hold a partition.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line for each process.")] = False,
    bootstrap_servers: Annotated[str | None, SERVERS_OPTION] = None,
    topic: ReportTopic = DEFAULT_TOPIC,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
) -> None:
    """Tell why each partition of the apps that run on this machine does not move.

    It asks every app of this user's that was started, by `penstock run`, `App.run()` or `App.start()`. With --group it
    reads what the members of a group reported (`penstock run --report`), which holds no keys, but a hash of each.

    Exit codes: 0 all answered, 1 none runs here, or one did not answer, or fell silent; with --group also 2 wrong use,
    3 no broker.
    """
    if members_of is not None:
        if bootstrap_servers is None:
            raise ConfigurationError("--group reads reports from Kafka: give --bootstrap-servers as well")
        explain_members(bootstrap_servers, client_settings(config, config_file), topic, members_of, as_json=as_json)
        return
    from penstock.consumer.inspect.explain_server import ask_all, folder

    answers = [
        answer for answer in ask_all() if group is None or answer.content is None or answer.content["group"] == group
    ]
    if not any(answer.content for answer in answers):
        silent = "".join(f"; process {answer.process} did not answer" for answer in answers)
        raise PenstockError(
            f"no app{f' called {group}' if group else ''} of this user's answers in {folder()}{silent}; run this where "
            "the app runs, as its user, with the same XDG_RUNTIME_DIR"
        )
    for answer in answers:
        if answer.content is None:
            typer.echo(f"process {answer.process} did not answer: it is starting or ending, or a handler holds Python")
            continue
        if not keys:
            for part in (*answer.content["partitions"], *answer.content.get("parked", ())):
                del part["key"]
        if as_json:
            typer.echo(json.dumps({"process": answer.process, **answer.content}))
        else:
            _print(answer.process, answer.content)
    if any(answer.content is None for answer in answers):
        raise typer.Exit(1)


def _print(process: int, said: dict[str, Any]) -> None:
    partitions = said["partitions"]
    count = sum(partition["partition"] >= 0 for partition in partitions)
    typer.echo(f"{said['group']}, process {process}: {count} partition{'' if count == 1 else 's'}")
    for partition in partitions:
        typer.echo(f"  {partition['text']}" + (f", key {partition['key']}" if partition.get("key") else ""))
    for partition in said["sinks"]:
        typer.echo(f"  {partition['text']}")
