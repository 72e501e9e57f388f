"""`PageServer`: serves the page of a source: its own files, its states as JSON, and one message on demand.

Everything that comes from Kafka goes to the browser as JSON and is shown there as text. The page loads its own script
and style sheet and nothing else: its content policy says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Self

from penstock.clients.ration import once_in, rationed
from penstock.errors import PenstockError
from penstock.fleet.address import Address
from penstock.fleet.disposable_threads import DisposableThreads, TooManyError
from penstock.fleet.page.hub import Hub, Source
from penstock.fleet.server import HEADERS, json_answer, require_packages, route, serving
from penstock.fleet.visitors import Visitors

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

_log = rationed(__name__)

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
#: Seconds between two lines of the log about answers that fail.
_LOG_INTERVAL_S = 60.0
#: Seconds that an answer may take, browsers that wait for a state at a time, and messages that are read at a time.
_ANSWER_S = 12.0
_MOST_BROWSERS = 64
_MOST_READ = 2
#: Characters of a topic's name, and the numbers after the last partition and the last offset, for the client library.
_TOPIC = re.compile(r"[\x01-\x7f]{1,249}")
_PARTITIONS = 1 << 31
_OFFSETS = 1 << 63

ReadMessage = Callable[[str, int, int], Any]


class PageServer:
    """Serves the page of a source until it is left. A context manager.

    Args:
        address: where to listen. Who reaches it sees names of topics, groups, handlers and hosts.
        source: where groups come from.
        of: what the page calls it.
        visitors: whose requests are answered; those that `address` lets in when left out.
        read_message: returns a message by topic, partition and offset; None where the page hides messages.

    Raises:
        ConfigurationError: a package is missing, or the address cannot be had.
    """

    def __init__(
        self,
        address: Address,
        source: Source,
        of: str,
        *,
        visitors: Visitors | None = None,
        read_message: ReadMessage | None = None,
    ) -> None:
        self.visitors = visitors or Visitors(is_loopback=address.is_loopback)
        self.hub = Hub(source, of, shows_messages=read_message is not None)
        self._read_message = read_message
        self._states = DisposableThreads("penstock-page-state", _MOST_BROWSERS, _ANSWER_S)
        self._messages = DisposableThreads("penstock-page-message", _MOST_READ, _ANSWER_S)
        require_packages()
        self._running = ExitStack()
        self._listener = self._running.enter_context(address.listen())
        #: Where it listens: with the port that was free, where any was asked for.
        self.address = Address(*self._listener.getsockname()[:2])

    def __enter__(self) -> Self:
        """Serve."""
        # Browsers that wait for a state end first: the server waits for them.
        self._running.enter_context(serving(self._listener, self.routes()))
        self._running.enter_context(self.hub)
        _log.info("the page is at http://%s", self.address)
        return self

    def __exit__(self, *_: object) -> None:
        """End, within seconds, whatever browsers and brokers do."""
        self._running.close()

    def routes(self) -> list[BaseRoute]:
        """Return all that is answered; who serves more puts it before this."""
        return [
            route("/", _asset("index.html"), self.visitors),
            *(route(f"/{name}", _asset(name), self.visitors) for name in _MEDIA_TYPES if name != "index.html"),
            route("/api/groups", self._state, self.visitors),
            route("/api/message", self._message, self.visitors),
            route("/api/actions", _no_actions, self.visitors),
        ]

    async def _state(self, request: Request) -> Response:
        """Answer with the state of a view: the one after that which the browser has, where it says so."""
        asked = request.query_params
        try:
            after = float(asked.get("after", 0.0))
        except ValueError:
            return json_answer({"said": "after is a number, the `made` of the state before"}, 422)
        return await _answered(
            self._states, partial(self.hub.state, asked.get("group"), asked.get("member"), after), "the state"
        )

    async def _message(self, request: Request) -> Response:
        """Answer with a message, where that is switched on."""
        if self._read_message is None:
            return json_answer({"said": "messages are hidden; start the page with --show-messages to see them"}, 403)
        place = _place(request.query_params)
        if place is None:
            said = f"name a topic, a partition below {_PARTITIONS} and an offset below {_OFFSETS}"
            return json_answer({"said": said}, 422)
        if not self.hub.names(*place):
            said = "the page shows only messages that it names: what blocks, is parked or failed"
            return json_answer({"said": said}, 404)
        return await _answered(self._messages, partial(self._read_message, *place), "the message")


async def _no_actions(_: Request) -> Response:
    return json_answer({"enabled": False, "actions": []})


async def _answered(threads: DisposableThreads, work: Callable[[], Any], what: str) -> Response:
    """Return what a thread finds out, or the answer that says why it does not."""
    try:
        return json_answer(await threads.run(work))
    except TimeoutError:
        return json_answer({"said": f"{what} did not come in time; try again"}, 503)
    except TooManyError as error:
        return json_answer({"said": f"too many ask for {what}: {error}"}, 503)
    except PenstockError as error:
        return json_answer({"said": str(error)}, 404)
    except Exception:  # noqa: BLE001 - the client library may raise anything; it costs an answer
        _log.exception("%s could not be read", what, extra=once_in(_LOG_INTERVAL_S, what))
        return json_answer({"said": f"{what} could not be read; the log says why"}, 500)


def _asset(name: str) -> Callable[[Request], Any]:
    content = (files("penstock.fleet.page") / "assets" / name).read_bytes()

    async def asset(_: Request) -> Response:
        from starlette.responses import Response

        return Response(content, headers={**_PAGE_HEADERS, "Content-Type": _MEDIA_TYPES[name]})

    return asset


def _place(asked: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Return the topic, the partition and the offset that a request names; None where there can be no such message."""
    try:
        topic, partition, offset = asked["topic"], int(asked["partition"]), int(asked["offset"])
    except (KeyError, ValueError):
        return None
    is_place = _TOPIC.fullmatch(topic) and 0 <= partition < _PARTITIONS and 0 <= offset < _OFFSETS
    return (topic, partition, offset) if is_place else None
