"""`penstock dashboard`: the page of all groups."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options.connection import BootstrapServers, ClientSettings, ConfigFile, client_settings
from penstock.cli.output import log_to_stderr, print_error
from penstock.cli.signals import until_signal
from penstock.cli.status.command import DEFAULT_TOPIC, ReportTopic

DEFAULT_ADDRESS = "127.0.0.1:8400"
#: Seconds between two looks whether a signal came.
_LOOK_S = 0.5


def dashboard(  # noqa: PLR0917 - typer reads options from parameters; nobody calls this by position
    bootstrap_servers: BootstrapServers,
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to serve it. Only this machine reaches 127.0.0.1.")
    ] = DEFAULT_ADDRESS,
    show_messages: Annotated[
        bool, typer.Option("--show-messages", help="Show keys, headers and values of messages to whoever looks.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Holds the token that actions need, as PENSTOCK_DASHBOARD_TOKEN may. Without one it only shows.",
        ),
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Its address at a reverse proxy, as browsers see it: https://ops.example/penstock/. Actions work "
            "there then, and X-Forwarded-For says who asks.",
        ),
    ] = None,
    topic: ReportTopic = DEFAULT_TOPIC,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
) -> None:
    """Serve a page that shows how all groups do, live, from their members' reports; until SIGTERM or Ctrl-C.

    Members report where they are told to: `penstock run --report`, or App(report=True). Needs Read and Describe on the
    topic of reports, and with --show-messages on the topics whose messages are looked at.

    It has no password and no TLS of its own: whoever reaches the address sees the page. On another address than that of
    this machine put a reverse proxy before it that has both.

    Exit codes: 0 ended in order, 2 wrong use.
    """
    from penstock.fleet import Address, Dashboard
    from penstock.fleet.actions import dashboard_token

    log_to_stderr()
    address = Address.parse(http)
    settings = client_settings(config, config_file)
    with (
        until_signal(),
        Dashboard(
            bootstrap_servers,
            address,
            config=settings,
            topic=topic,
            show_messages=show_messages,
            token=dashboard_token(token_file),
            public_url=public_url,
        ) as page,
    ):
        typer.echo(f"The dashboard of {bootstrap_servers} is at http://{page.address}; Ctrl-C stops it.")
        if not address.is_loopback:
            print_error(f"whoever reaches {page.address} sees it: it has no password and no TLS of its own")
        while True:
            time.sleep(_LOOK_S)
