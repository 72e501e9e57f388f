"""`PageServer` serves the page of a source: its files, its states as JSON, and single messages on demand.

`Dashboard` is the page of all groups, with actions.

Everything from Kafka reaches the browser as JSON, and the page shows it as text. The page loads only its own script and
style sheet; its content security policy enforces that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Self

from penstock.clients.reading import read_record
from penstock.fleet.actions.dispatch import ActionContext
from penstock.fleet.actions.endpoints import routes
from penstock.fleet.address import Address
from penstock.fleet.commands.command import ACTIONS
from penstock.fleet.page.hub import Hub, Source
from penstock.fleet.reports.reader import ReportReader
from penstock.fleet.server import (
    HEADERS,
    DisposableThreads,
    Endpoint,
    RefusedError,
    Visitors,
    json_answer,
    require_packages,
    route,
    serving,
)
from penstock.fleet_member import REPORTS_TOPIC, CommandSettings
from penstock.message import readable_headers, timestamp_of
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

_log = logging.getLogger(__name__)

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_PAGE_HEADERS: Mapping[str, str] = {**HEADERS, "Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"}
_MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
#: The answer timeout in seconds; the limits of browsers that wait for a state, and of messages being read, at a time.
_ANSWER_S = 12.0
_MOST_BROWSERS = 64
_MOST_READ = 2
#: A topic name that the client library accepts, and its limits of partitions and offsets.
_TOPIC = re.compile(r"[\x01-\x7f]{1,249}")
_PARTITIONS = 1 << 31
_OFFSETS = 1 << 63
#: The timeout in seconds for reading one message.
_READ_BUDGET_S = 6.0
#: The characters shown of a key or a header, and of a value; the number of headers shown.
_MOST_KEY = 500
_MOST_VALUE = 4_000
_MOST_HEADERS = 50

ReadMessage = Callable[[str, int, int], Any]
Stacks = Callable[[], Mapping[str, Sequence[str]]]


class PageServer:
    """Serves the page of a source until it is left. A context manager.

    Args:
        address: the listening address. Anyone who can reach it sees the names of topics, groups, handlers and hosts.
        open_source: returns the source of the groups.
        of: the name of the source on the page.
        visitors: the access rules; left out, those that fit `address`.
        read_message: returns a message by topic, partition and offset; None if the page hides messages.
        actions: the actions that the page offers.
        stacks: returns the stacks of blocking calls by worker; None if the page hides them.

    Raises:
        ConfigurationError: a package is missing, or the address cannot be used.
    """

    def __init__(
        self,
        address: Address,
        open_source: Callable[[], AbstractContextManager[Source]],
        of: str,
        *,
        visitors: Visitors | None = None,
        read_message: ReadMessage | None = None,
        actions: Sequence[str] = (),
        stacks: Stacks | None = None,
    ) -> None:
        self.visitors = visitors or Visitors(is_loopback=address.is_loopback)
        shown = {"messages": read_message is not None, "stacks": stacks is not None, "actions": list(actions)}
        self.hub = Hub(open_source, of, shown)
        self._read_message = read_message
        self._stacks = stacks
        self._states = DisposableThreads("penstock-page-state", "the state", _MOST_BROWSERS, _ANSWER_S)
        self._messages = DisposableThreads("penstock-page-message", "the message", _MOST_READ, _ANSWER_S)
        require_packages()
        self._running = ExitStack()
        self._listener = self._running.enter_context(address.listen())
        #: The listening address, with the actual port.
        self.address = Address(*self._listener.getsockname()[:2])

    def __enter__(self) -> Self:
        """Serve."""
        # The hub is left first, which ends the waits of browsers. The server then has no answer to wait for.
        self._running.enter_context(serving(self._listener, self.routes()))
        self._running.enter_context(self.hub)
        _log.info("the page is at http://%s", self.address)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop within seconds, whatever browsers and brokers do."""
        self._running.close()

    def routes(self) -> list[BaseRoute]:
        """Return all routes; a subclass puts further ones before them."""
        answers: dict[str, Endpoint] = {"/api/groups": self._state, "/api/message": self._message}
        answers |= {"/api/stacks": self._blocking}
        answers |= {f"/{name}": _asset(name) for name in _MEDIA_TYPES}
        answers["/"] = answers.pop("/index.html")
        return [route(path, answer, self.visitors) for path, answer in answers.items()]

    async def _state(self, request: Request) -> Response:
        """Answer with the state of a view: a newer one than the browser has, if the request names that."""
        query = request.query_params
        try:
            after = float(query.get("after", 0.0))
        except ValueError:
            raise RefusedError(422, "after must be a number, the `made` of the previous state") from None
        state = partial(self.hub.state, query.get("group"), query.get("member"), after)
        return json_answer(await self._states.run(state))

    async def _message(self, request: Request) -> Response:
        """Answer with a message, if that is switched on."""
        if self._read_message is None:
            raise RefusedError(403, "messages are hidden; start the page with --show-messages to see them")
        place = _place(request.query_params)
        if not self.hub.names(*place):
            raise RefusedError(404, "the page shows only messages that it names: what blocks, is parked or failed")
        return json_answer(await self._messages.run(partial(self._read_message, *place)))

    async def _blocking(self, request: Request) -> Response:
        """Answer with the stacks of blocking calls, if the page shows them and no proxy passes the request on."""
        if self._stacks is None or "x-forwarded-for" in request.headers or "forwarded" in request.headers:
            raise RefusedError(403, "stacks are hidden; a process shows them at a loopback address, without a proxy")
        return json_answer(await self._states.run(self._stacks))


class Dashboard(PageServer):
    """Serves the page of all groups by their reports to a topic. It waits for brokers and reports if they are absent.

    Args:
        bootstrap_servers: addresses of the brokers.
        address: the listening address. Anyone who can reach it sees the names of topics, groups, handlers and hosts.
        config: client settings by librdkafka's names.
        topic: the topic of reports.
        show_messages: whether the page shows keys, headers and values of messages that it names.
        token: the token that requests for actions must have; None: there are no actions.
        commands: the topics of commands and of their audit.
        public_url: the page's address at a reverse proxy, as browsers see it.

    Raises:
        ConfigurationError: a package is missing, the address cannot be used, or `public_url` is no http(s) URL.
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
            partial(ReportReader, *cluster, topic),
            topic,
            visitors=Visitors(is_loopback=address.is_loopback, public_url=public_url),
            read_message=partial(read_message, *cluster) if show_messages else None,
            actions=() if token is None else tuple(ACTIONS),
        )
        self._context = ActionContext(*cluster, commands or CommandSettings(), self.hub.listening)
        self._token = token

    def routes(self) -> list[BaseRoute]:
        """Return all routes, those of actions first."""
        return [*routes(self._context, self._token, self.visitors), *super().routes()]


def _asset(name: str) -> Endpoint:
    content = (files("penstock.fleet.page") / "assets" / name).read_bytes()

    async def asset(_: Request) -> Response:
        from starlette.responses import Response

        return Response(content, headers={**_PAGE_HEADERS, "Content-Type": _MEDIA_TYPES[name]})

    return asset


def _place(query: Mapping[str, str]) -> tuple[str, int, int]:
    """Return the topic, the partition and the offset in a request."""
    try:
        topic, partition, offset = query["topic"], int(query["partition"]), int(query["offset"])
    except (KeyError, ValueError):
        topic, partition, offset = "", -1, -1
    if not _TOPIC.fullmatch(topic) or not 0 <= partition < _PARTITIONS or not 0 <= offset < _OFFSETS:
        raise RefusedError(422, f"name a topic, a partition below {_PARTITIONS} and an offset below {_OFFSETS}")
    return topic, partition, offset


def read_message(bootstrap_servers: str, config: ClientConfig, topic: str, partition: int, offset: int) -> Any:
    """Return a message as JSON. Raises the errors of `read_record`."""
    return _message_json(read_record(bootstrap_servers, config, (topic, partition), offset, _READ_BUDGET_S))


def _message_json(message: Any) -> dict[str, Any]:
    value = message.value()
    return {
        "key": _text(message.key(), _MOST_KEY),
        "value": _text(value, _MOST_VALUE),
        "bytes": 0 if value is None else len(value),
        "timestamp": timestamp_of(message),
        "headers": [[name, _text(content, _MOST_KEY)] for name, content in readable_headers(message)[:_MOST_HEADERS]],
    }


def _text(content: bytes | str | None, most: int) -> str | None:
    if content is None:
        return None
    text = content if isinstance(content, str) else content[: 4 * most].decode(errors="backslashreplace")
    return text[:most] + ("…" if len(text) > most else "")
