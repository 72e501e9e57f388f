"""`penstock explain`: what holds each partition of the apps that run here."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from penstock.errors import PenstockError


def explain(
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="Only apps of this name.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Show the keys of messages that hold a partition.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line for each process.")] = False,
) -> None:
    """Tell why each partition of the apps that run on this machine does not move.

    It asks every app of this user's that was started, by `penstock run`, `App.run()` or `App.start()`.

    Exit codes: 0 all answered, 1 none runs here, or one did not answer.
    """
    from penstock.consumer.inspection.explain_server import ask_all, folder

    answers = [one for one in ask_all() if group is None or one.content is None or one.content["group"] == group]
    if not any(one.content for one in answers):
        silent = "".join(f"; process {one.process} did not answer" for one in answers)
        raise PenstockError(
            f"no app{f' called {group}' if group else ''} of this user's answers in {folder()}{silent}; run this where "
            "the app runs, as its user, with the same XDG_RUNTIME_DIR"
        )
    for one in answers:
        if one.content is None:
            typer.echo(f"process {one.process} did not answer: it is starting or ending, or a handler holds Python")
            continue
        if not keys:
            for partition in one.content["partitions"]:
                del partition["key"]
        if as_json:
            typer.echo(json.dumps({"process": one.process, **one.content}))
        else:
            _print(one.process, one.content)
    if any(one.content is None for one in answers):
        raise typer.Exit(1)


def _print(process: int, said: dict[str, Any]) -> None:
    partitions = said["partitions"]
    count = sum(one["partition"] >= 0 for one in partitions)
    typer.echo(f"{said['group']}, process {process}: {count} partition{'' if count == 1 else 's'}")
    for one in partitions:
        typer.echo(f"  {one['text']}" + (f", key {one['key']}" if one.get("key") else ""))
    for one in said["sinks"]:
        typer.echo(f"  {one['text']}")
