"""`penstock dashboard`: the page of all groups."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import Cluster
from penstock.cli.output import log_to_stderr, print_error
from penstock.cli.status import ReportTopic
from penstock.fleet_member import REPORTS_TOPIC
from penstock.supervisor.stopping import until_signal

DEFAULT_ADDRESS = "127.0.0.1:8400"
#: Seconds between two checks for a signal.
_SIGNAL_POLL_S = 0.5


def dashboard(
    cluster: Cluster,
    *,
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Listening address. Only this machine can reach 127.0.0.1.")
    ] = DEFAULT_ADDRESS,
    show_messages: Annotated[
        bool, typer.Option("--show-messages", help="Show keys, headers and values of messages to all viewers.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the token for actions (also PENSTOCK_DASHBOARD_TOKEN=TOKEN). Without a token there are no "
            "actions.",
        ),
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The page's address at a reverse proxy, as browsers see it: https://ops.example/penstock/. It allows "
            "actions through the proxy, and takes client addresses from X-Forwarded-For.",
        ),
    ] = None,
    topic: ReportTopic = REPORTS_TOPIC,
) -> None:
    """Serve a live page of all groups, from their members' reports, until SIGTERM or Ctrl-C.

    Members report with `penstock run --report` or App(report=True). It needs Read and Describe on the topic of reports,
    and with --show-messages on the topics of the messages.

    The page has no password and no TLS: anyone who can reach the address sees it. To serve other machines, put a
    reverse proxy with both in front of it.
    """
    from penstock.fleet import Address, Dashboard
    from penstock.fleet.actions.tokens import dashboard_token

    log_to_stderr()
    address = Address.parse(http)
    with (
        until_signal(),
        Dashboard(
            cluster.servers,
            address,
            config=cluster.settings,
            topic=topic,
            show_messages=show_messages,
            token=dashboard_token(token_file),
            public_url=public_url,
        ) as page,
    ):
        typer.echo(f"The dashboard of {cluster.servers} is at http://{page.address}; Ctrl-C stops it.")
        if not address.is_loopback:
            print_error(f"anyone who can reach {page.address} sees the page: it has no password and no TLS")
        while True:
            time.sleep(_SIGNAL_POLL_S)
