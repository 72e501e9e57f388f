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

_POLL_S = 0.2


def broker(
    *,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port on 127.0.0.1; 0 is any free port.")] = 9092,
    nodes: Annotated[
        int,
        typer.Option(min=1, max=9, help="Number of brokers. With 3, topics have three replicas."),
    ] = 1,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Keep topics in this folder, and use the topics in it.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep topics, in penstock's own folder.")] = False,
    security: Annotated[
        str | None,
        typer.Option(
            "--security",
            metavar="KIND",
            help="Authenticate clients by sasl_ssl, sasl_plaintext or ssl (client certificates).",
        ),
    ] = None,
    acls: Annotated[
        bool, typer.Option("--acls", help="With --security: users have only the permissions that they were given.")
    ] = False,
) -> None:
    """Run a real Kafka broker on this machine until Ctrl-C.

    Topics are deleted when it ends, except with --keep or --data-dir. The first start downloads Kafka. With --security,
    it prints the name of a file with the settings of an administrator.
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
            typer.echo(
                f"  settings: {running.settings_file()}, as NAME=VALUE, of an administrator; only you can read it"
            )
        typer.echo(f"  connect:  penstock.App(..., bootstrap_servers={running.bootstrap_servers!r}{config})")
        typer.echo("  topics:   " + (f"kept in {folder}" if folder else "deleted when the broker ends"))
        typer.echo("  stop:     Ctrl-C")
        while running.running:
            time.sleep(_POLL_S)
        raise DevBrokerError(
            f"the broker at {running.bootstrap_servers} ended unexpectedly; read {running.log_path} or start it again"
        )


def kept_folder() -> Path:
    """Return the folder of --keep ($XDG_DATA_HOME/penstock/broker, else below ~/.local/share)."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "penstock" / "broker"
