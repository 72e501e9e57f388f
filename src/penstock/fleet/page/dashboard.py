"""The servers of pages: what each has, and the dashboard of all groups, which reads the topic of reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Self

from penstock.errors import PenstockError, TopicNotFoundError
from penstock.fleet.actions import Surroundings, routes
from penstock.fleet.address import Address
from penstock.fleet.page.hub import Hub, Source
from penstock.fleet.page.messages import read_message
from penstock.fleet.page.routes import ReadMessage, page_routes
from penstock.fleet.reports.group_state import Group
from penstock.fleet.reports.reader import ReportReader
from penstock.fleet.server import HttpServer
from penstock.fleet.visitors import Visitors
from penstock.fleet_member import REPORTS_TOPIC, CommandSettings
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

_log = logging.getLogger(__name__)

#: Seconds between two tries to read the topic.
_RETRY_DELAY_S = 2.0


class PageServer:
    """Serves the page of a source until it is left. A context manager.

    Args:
        address: where to listen. Who reaches it sees names of topics, groups, handlers and hosts.
        source: where groups come from.
        of: what the page calls it.
        visitors: whose requests are answered.
        read_message: returns a message by topic, partition and offset; None where the page hides messages.
        background: what runs on the server's loop, as long as it serves.

    Raises:
        ConfigurationError: a package is missing, or the address cannot be had.
    """

    def __init__(
        self,
        address: Address,
        source: Source,
        of: str,
        *,
        visitors: Visitors,
        read_message: ReadMessage | None = None,
        background: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        self._visitors = visitors
        self._read_message = read_message
        self._server = HttpServer(address, background)
        #: Where it listens: with the port that was free, where any was asked for.
        self.address = self._server.address
        self._hub = Hub(source, of=of, shows_messages=read_message is not None)

    def _actions(self) -> Sequence[BaseRoute]:
        """Return the routes of what may be done from the page."""
        return ()

    def _beside(self) -> Sequence[BaseRoute]:
        """Return the routes beside the page."""
        return ()

    def __enter__(self) -> Self:
        """Serve."""
        self._hub.__enter__()
        of_page = page_routes(
            self._hub, visitors=self._visitors, read_message=self._read_message, actions=self._actions()
        )
        self._server.start([*self._beside(), *of_page])
        _log.info("the page is at http://%s", self.address)
        return self

    def __exit__(self, *_: object) -> None:
        """End, within seconds, whatever browsers and brokers do."""
        # Those that wait for a state end first: the server waits for them.
        self._hub.__exit__()
        self._server.stop()


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
        reached = (bootstrap_servers, config or {})
        visitors = Visitors(is_loopback=address.is_loopback, public_url=public_url)
        reads = partial(read_message, *reached) if show_messages else None
        super().__init__(address, ReportSource(*reached, topic), topic, visitors=visitors, read_message=reads)
        self._around = Surroundings(*reached, commands or CommandSettings(), self._hub.listening)
        self._token = token

    def _actions(self) -> Sequence[BaseRoute]:
        return routes(self._around, self._token, self._visitors)


class ReportSource:
    """All groups, from the topic of reports. It waits for a topic or a broker that is not there yet.

    Args:
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names.
        topic: name of the topic.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig, topic: str) -> None:
        self._made_of = (bootstrap_servers, config, topic)
        self._reader: ReportReader | None = None
        self._reading = ExitStack()
        self._trouble: str | None = "nothing was read yet"
        self._last: Sequence[Group] = ()

    @property
    def trouble(self) -> str | None:
        """As `Source` says."""
        return self._trouble if self._reader is None else self._reader.trouble

    @property
    def ignored(self) -> Mapping[str, int]:
        """As `Source` says."""
        return {} if self._reader is None else self._reader.states.ignored

    def follow(self, timeout: float) -> None:
        """As `Source` says."""
        try:
            if self._reader is None:
                self._reader = self._reading.enter_context(ReportReader(*self._made_of))
                self._trouble = None
            else:
                self._reader.follow(timeout)
        except PenstockError as error:
            # A broker or a right is gone, or the topic is not there yet.
            if str(error) != self._trouble:
                _log.log(logging.INFO if isinstance(error, TopicNotFoundError) else logging.WARNING, "%s", error)
            self.close()
            self._trouble = str(error)
            time.sleep(min(timeout, _RETRY_DELAY_S))

    def groups(self) -> Sequence[Group]:
        """As `Source` says; what was known last, while nothing can be read."""
        if self._reader is not None:
            self._last = self._reader.groups()
        return self._last

    def close(self) -> None:
        """As `Source` says."""
        self._reader = None
        self._reading.close()
