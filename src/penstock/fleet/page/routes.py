"""The page's addresses: the page itself, its states as server-sent events and as JSON, and one message on demand.

Everything that comes from Kafka goes to the browser as JSON and is shown there as text. The page loads its own script
and style sheet and nothing else: its content policy says so.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.fleet.page.events import TOO_MANY, answer, as_response, stream
from penstock.fleet.page.hub import Hub, TooManyError, View
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
#: Seconds that the answer to a single question may take.
_ANSWER_S = 10.0
#: Messages that are read at a time.
_MOST_READ = 2

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
        route("/events", page.events),
        route("/api/groups", page.state),
        route("/api/message", page.message),
        *(actions or [route("/api/actions", _no_actions)]),
    ]


async def _no_actions(_: Request) -> Response:
    return answer({"enabled": False, "actions": []})


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
        self._reading = 0

    async def events(self, request: Request) -> Response:
        """Answer with the states of a view, for as long as the browser is there."""
        return stream(self._hub, _view(request))

    async def state(self, request: Request) -> Response:
        """Answer with the state of a view now."""
        try:
            subscription = self._hub.subscribe(_view(request))
        except TooManyError:
            return answer(TOO_MANY, 503)
        try:
            for _ in range(2):
                if "state" in (taken := await subscription.take(_ANSWER_S)):
                    return as_response(taken["state"])
        finally:
            self._hub.unsubscribe(subscription)
        return answer({"said": "the state did not come in time"}, 503)

    async def message(self, request: Request) -> Response:
        """Answer with a message, where that is switched on."""
        if self._read_message is None:
            return answer({"said": "messages are hidden; start the page with --show-messages to see them"}, 403)
        try:
            asked = request.query_params
            place = (asked["topic"], int(asked["partition"]), int(asked["offset"]))
        except (KeyError, ValueError):
            return answer({"said": "name topic, partition and offset"}, 422)
        if not self._hub.names(*place):
            return answer({"said": "the page shows only messages that it names: what blocks, is parked or failed"}, 404)
        if self._reading >= _MOST_READ:
            return answer({"said": "other messages are being read; try again"}, 503)
        return await self._read(partial(self._read_message, *place))

    async def _read(self, read: Callable[[], Any]) -> Response:
        self._reading += 1
        try:
            return answer(await _on_thread(read))
        except TimeoutError:
            return answer({"said": f"the message did not come within {_ANSWER_S:g} s"}, 503)
        except PenstockError as error:
            return answer({"said": str(error)}, 404)
        except Exception:  # noqa: BLE001 - the client may raise anything; it costs an answer
            _log.exception("a message could not be read")
            return answer({"said": "the message could not be read; the log says why"}, 500)
        finally:
            self._reading -= 1


def _view(request: Request) -> View:
    asked = request.query_params
    return View(asked.get("group"), asked.get("member") if "group" in asked else None)


async def _on_thread(work: Callable[[], Any]) -> Any:
    """Return what the work returns, done on a thread that is left behind where it hangs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(how: Callable[[], None]) -> None:
        # The loop may have ended meanwhile.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if done.done() else how())

    def run() -> None:
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            failure = error
            settle(lambda: done.set_exception(failure))
        else:
            settle(lambda: done.set_result(found))

    threading.Thread(target=run, name="penstock-page-message", daemon=True).start()
    return await asyncio.wait_for(done, _ANSWER_S)
