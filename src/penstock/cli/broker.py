"""`penstock broker`: the embedded Kafka, for a terminal."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import log_to_stderr
from penstock.errors import DevBrokerError
from penstock.supervisor.stopping import until_signal

_LOOK_INTERVAL_S = 0.2


def broker(
    *,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port on 127.0.0.1; 0 takes a free one.")] = 9092,
    nodes: Annotated[
        int,
        typer.Option(min=1, max=9, help="How many brokers: with 3, topics have three copies."),
    ] = 1,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Keep topics in this folder and find them there again.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep topics, in a folder of penstock's own.")] = False,
    security: Annotated[
        str | None,
        typer.Option(
            "--security",
            metavar="KIND",
            help="Ask clients who they are: sasl_ssl, sasl_plaintext or ssl (client certificates).",
        ),
    ] = None,
    acls: Annotated[
        bool, typer.Option("--acls", help="With --security: users may do only what an administrator allowed them.")
    ] = False,
) -> None:
    """Run a real Kafka broker on this machine until Ctrl-C.

    Topics are gone when it ends, unless --keep or --data-dir asks for them. The first start fetches Kafka. With
    --security, the settings of a user that may do everything are in a file, whose name is printed.
    """
    from penstock.devbroker import DevBroker

    log_to_stderr()
    folder = data_dir or (kept_folder() if keep else None)
    with (
        until_signal(),
        DevBroker(nodes=nodes, port=port or None, data_dir=folder, security=security, acls=acls) as running,
    ):
        typer.echo(f"Kafka runs at {running.bootstrap_servers}")
        config = ""
        if security is not None:
            config = ", config=..."
            typer.echo(f"  settings: {running.settings_file()}, as NAME=VALUE; they are those of an administrator,")
            typer.echo("            and you alone can read them")
        typer.echo(f"  connect:  penstock.App(..., bootstrap_servers={running.bootstrap_servers!r}{config})")
        typer.echo("  topics:   " + (f"kept in {folder}" if folder else "gone when the broker ends"))
        typer.echo("  stop:     Ctrl-C")
        while running.running:
            time.sleep(_LOOK_INTERVAL_S)
        raise DevBrokerError(
            f"the broker at {running.bootstrap_servers} ended by itself; start it again, or read {running.log_path}"
        )


def kept_folder() -> Path:
    """Return the folder of --keep ($XDG_DATA_HOME/penstock/broker, else below ~/.local/share)."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "penstock" / "broker"
