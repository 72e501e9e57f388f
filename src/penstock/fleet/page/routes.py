"""The page's addresses: the page itself, its states as JSON, and one message on demand.

Everything that comes from Kafka goes to the browser as JSON and is shown there as text. The page loads its own script
and style sheet and nothing else: its content policy says so.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.fleet.disposable_threads import DisposableThreads, TooManyError
from penstock.fleet.page.hub import Hub, View
from penstock.fleet.server import HEADERS, Endpoint, guarded
from penstock.fleet.visitors import Visitors

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
_ASSETS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
#: Seconds that the answer to a single question may take, and messages that are read at a time.
_ANSWER_S = 10.0
_MOST_READ = 2
#: Characters of a topic's name, and the numbers after the last partition and the last offset, for the client library.
_TOPIC = re.compile(r"[\x01-\x7f]{1,249}")
_PARTITIONS = 1 << 31
_OFFSETS = 1 << 63

ReadMessage = Callable[[str, int, int], Any]


def page_routes(
    hub: Hub, *, visitors: Visitors, read_message: ReadMessage | None = None, actions: Sequence[BaseRoute] = ()
) -> list[BaseRoute]:
    """Return the routes of the page.

    Args:
        hub: what it shows; started and stopped elsewhere.
        visitors: whose requests are answered.
        read_message: returns a message by topic, partition and offset; None where that is not switched on.
        actions: routes below `/api/actions`, where the page may do something; they guard themselves.
    """
    from starlette.routing import Route

    def route(path: str, endpoint: Endpoint) -> BaseRoute:
        return Route(path, guarded(endpoint, visitors))

    page = _Page(hub, read_message)
    return [
        *(route(path, _asset(*of)) for path, of in _ASSETS.items()),
        route("/api/groups", page.state),
        route("/api/message", page.message),
        *(actions or [route("/api/actions", _no_actions)]),
    ]


def _answer(said: Any, status: int = 200) -> Response:
    """Return an answer as JSON, which bytes are already."""
    from starlette.responses import Response

    content = said if isinstance(said, bytes) else json.dumps(said).encode()
    return Response(content, status, {**HEADERS, "Content-Type": "application/json"})


async def _no_actions(_: Request) -> Response:
    return _answer({"enabled": False, "actions": []})


def _asset(name: str, media_type: str) -> Endpoint:
    content = (files("penstock.fleet.page") / "assets" / name).read_bytes()

    async def asset(_: Request) -> Response:
        from starlette.responses import Response

        return Response(content, headers={**_PAGE_HEADERS, "Content-Type": media_type})

    return asset


class _Page:
    """Answers questions about the hub's groups. On one loop."""

    def __init__(self, hub: Hub, read_message: ReadMessage | None) -> None:
        self._hub = hub
        self._read_message = read_message
        self._threads = DisposableThreads("penstock-page-message", _MOST_READ, _ANSWER_S)

    async def state(self, request: Request) -> Response:
        """Answer with the state of a view: the one after that which the browser has, where it says so."""
        asked = request.query_params
        try:
            view = View(asked.get("group"), asked.get("member") if "group" in asked else None)
            return _answer(await self._hub.state(view, float(asked.get("after", 0.0))))
        except ValueError:
            return _answer({"said": "after is a number, the `made` of the state before"}, 422)
        except TooManyError as error:
            return _answer({"said": str(error)}, 503)
        except TimeoutError:
            return _answer({"said": "the state did not come in time"}, 503)

    async def message(self, request: Request) -> Response:
        """Answer with a message, where that is switched on."""
        if self._read_message is None:
            return _answer({"said": "messages are hidden; start the page with --show-messages to see them"}, 403)
        place = _place(request.query_params)
        if place is None:
            said = f"name a topic, a partition below {_PARTITIONS} and an offset below {_OFFSETS}"
            return _answer({"said": said}, 422)
        if not self._hub.names(*place):
            said = "the page shows only messages that it names: what blocks, is parked or failed"
            return _answer({"said": said}, 404)
        return await self._read(partial(self._read_message, *place))

    async def _read(self, read: Callable[[], Any]) -> Response:
        try:
            return _answer(await self._threads.run(read))
        except TimeoutError:
            return _answer({"said": f"the message did not come within {_ANSWER_S:g} s"}, 503)
        except TooManyError:
            return _answer({"said": "other messages are being read; try again"}, 503)
        except PenstockError as error:
            return _answer({"said": str(error)}, 404)
        except Exception:  # noqa: BLE001 - the client may raise anything; it costs an answer
            _log.exception("a message could not be read")
            return _answer({"said": "the message could not be read; the log says why"}, 500)


def _place(asked: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Return the topic, the partition and the offset that a request names; None where there can be no such message."""
    try:
        topic, partition, offset = asked["topic"], int(asked["partition"]), int(asked["offset"])
    except (KeyError, ValueError):
        return None
    is_place = _TOPIC.fullmatch(topic) and 0 <= partition < _PARTITIONS and 0 <= offset < _OFFSETS
    return (topic, partition, offset) if is_place else None
