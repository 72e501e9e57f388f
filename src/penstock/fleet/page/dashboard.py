"""The dashboard: the page of all groups, read from the topic of reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, TopicNotFoundError
from penstock.fleet.actions import Surroundings, routes
from penstock.fleet.address import Address
from penstock.fleet.page.messages import read_message
from penstock.fleet.page.server import PageServer
from penstock.fleet.reports.group_state import Group
from penstock.fleet.reports.reader import ReportReader
from penstock.fleet.visitors import Visitors
from penstock.fleet_member import REPORTS_TOPIC, CommandSettings
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

_log = logging.getLogger(__name__)

#: Seconds between two tries to read the topic.
_RETRY_DELAY_S = 1.0


class Dashboard(PageServer):
    """Serves the page of all groups until it is left. A context manager; it waits for brokers and reports, if need be.

    Args:
        bootstrap_servers: addresses of the brokers.
        address: where to listen. Who reaches it sees names of topics, groups, handlers and hosts.
        config: client settings by librdkafka's names.
        topic: the topic of reports.
        show_messages: whether the page shows keys, headers and values of messages, and stacks.
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
        cluster = (bootstrap_servers, config or {})
        super().__init__(
            address,
            ReportSource(*cluster, topic),
            topic,
            visitors=Visitors(is_loopback=address.is_loopback, public_url=public_url),
            read_message=partial(read_message, *cluster) if show_messages else None,
        )
        self._around = Surroundings(*cluster, commands or CommandSettings(), self.hub.listening)
        self._token = token

    def routes(self) -> list[BaseRoute]:
        """Return all that is answered."""
        return [*routes(self._around, self._token, self.visitors), *super().routes()]


class ReportSource:
    """All groups, from the topic of reports. It waits for a topic or a broker that is not there yet.

    Args:
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names.
        topic: name of the topic.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig, topic: str) -> None:
        self._made_of = (bootstrap_servers, config, topic)
        self._reading = ExitStack()
        self._reader: ReportReader | None = None
        self._last: Sequence[Group] = ()
        self.trouble: str | None = "nothing was read yet"
        self.ignored: Mapping[str, int] = {}

    def follow(self, timeout: float) -> None:
        """As `Source` says."""
        try:
            if self._reader is None:
                self._reader = self._reading.enter_context(ReportReader(*self._made_of))
            else:
                self._reader.follow(timeout)
        except PenstockError as error:
            # A broker or a right is gone, or the topic is not there yet.
            if str(error) != self.trouble:
                _log.log(logging.INFO if isinstance(error, TopicNotFoundError) else logging.WARNING, "%s", error)
            self.close()
            self.trouble = str(error)
            time.sleep(_RETRY_DELAY_S)
        else:
            self.trouble, self.ignored = self._reader.trouble, self._reader.states.ignored

    def groups(self) -> Sequence[Group]:
        """As `Source` says; what was known last, while nothing can be read."""
        if self._reader is not None:
            self._last = self._reader.groups()
        return self._last

    def close(self) -> None:
        """As `Source` says."""
        self._reader = None
        self._reading.close()
