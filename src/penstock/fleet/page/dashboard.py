"""The dashboard of all groups: reads the topic of reports, and serves the page."""

from __future__ import annotations

import logging
from functools import partial
from typing import Self

from penstock.fleet.actions import ActionSettings, routes
from penstock.fleet.address import Address
from penstock.fleet.page.hub import Hub
from penstock.fleet.page.messages import read_message
from penstock.fleet.page.routes import page_routes
from penstock.fleet.page.sources import ReportSource
from penstock.fleet.server import HttpServer
from penstock.fleet.visitors import Visitors
from penstock.fleet_member import REPORTS_TOPIC, CommandSettings
from penstock.options import ClientConfig

_log = logging.getLogger(__name__)


class Dashboard:
    """Serves the page of all groups until it is left. A context manager; it waits for brokers and reports, if need be.

    Args:
        bootstrap_servers: addresses of the brokers.
        address: where to listen. Who reaches it sees names of topics, groups, handlers and hosts.
        config: client settings by librdkafka's names.
        topic: the topic of reports.
        show_messages: whether the page shows keys, headers and values of messages.
        token: what whoever asks for an action must show; None: the page only shows.
        commands: the topics of commands and of their audit.
        public_url: the page's address at a reverse proxy, as browsers see it.

    Raises:
        ConfigurationError: a package is missing, the address cannot be had, or `public_url` is none.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        address: Address,
        *,
        config: ClientConfig | None = None,
        topic: str = REPORTS_TOPIC,
        show_messages: bool = False,
        token: str | None = None,
        commands: CommandSettings | None = None,
        public_url: str | None = None,
    ) -> None:
        visitors = Visitors(is_loopback=address.is_loopback, public_url=public_url)
        self._server = HttpServer(address)
        #: Where it listens: with the port that was free, where any was asked for.
        self.address = self._server.address
        settings = config or {}
        self._hub = Hub(ReportSource(bootstrap_servers, settings, topic), {"of": topic, "messages": show_messages})
        self._routes = page_routes(
            self._hub,
            visitors=visitors,
            read_message=partial(read_message, bootstrap_servers, settings) if show_messages else None,
            actions=routes(
                ActionSettings(
                    bootstrap_servers,
                    settings,
                    token,
                    commands or CommandSettings(),
                    visitors=visitors,
                    members=self._hub.listening,
                )
            ),
        )

    def __enter__(self) -> Self:
        """Serve."""
        self._hub.__enter__()
        self._server.start(self._routes)
        _log.info("the dashboard is at http://%s", self.address)
        return self

    def __exit__(self, *_: object) -> None:
        """End, within seconds, whatever browsers and brokers do."""
        # The streams end first: the server waits for them.
        self._hub.__exit__()
        self._server.stop()
