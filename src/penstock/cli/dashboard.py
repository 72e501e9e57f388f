"""`penstock dashboard`: the page of all groups."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import Cluster
from penstock.cli.output import log_to_stderr, print_error
from penstock.cli.status import REPORTS_TOPIC, ReportTopic
from penstock.supervisor.stopping import until_signal

DEFAULT_ADDRESS = "127.0.0.1:8400"
#: Seconds between two looks whether a signal came.
_SIGNAL_POLL_S = 0.5


def dashboard(
    cluster: Cluster,
    *,
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
    topic: ReportTopic = REPORTS_TOPIC,
) -> None:
    """Serve a page that shows how all groups do, live, from their members' reports; until SIGTERM or Ctrl-C.

    Members report with `penstock run --report`, or App(report=True). Needs Read and Describe on the topic of reports,
    and with --show-messages on the topics whose messages are looked at.

    It has no password and no TLS of its own: whoever reaches the address sees the page. On another address than that of
    this machine put a reverse proxy before it that has both.
    """
    from penstock.fleet import Address, Dashboard
    from penstock.fleet.actions import dashboard_token

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
            print_error(f"whoever reaches {page.address} sees it: it has no password and no TLS of its own")
        while True:
            time.sleep(_SIGNAL_POLL_S)
