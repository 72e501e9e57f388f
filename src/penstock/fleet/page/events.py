"""Answers of the page: JSON, and a view's states as server-sent events for as long as the browser takes them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from penstock.fleet.page.hub import END, Hub, TooManyError, View
from penstock.fleet.server import HEADERS

if TYPE_CHECKING:
    from starlette.responses import Response

_log = logging.getLogger(__name__)

#: Seconds after which a browser that got nothing gets a sign of life, and that it may take what is sent to it.
_ALIVE_S = 15.0
_TAKES_S = 20.0
TOO_MANY = {"said": "too many look at the page; try again later"}

_Event = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Event]]
_Send = Callable[[_Event], Awaitable[None]]


def as_response(content: bytes, status: int = 200) -> Response:
    """Return an answer of what is JSON already."""
    from starlette.responses import Response

    return Response(content, status, {**HEADERS, "Content-Type": "application/json"})


def answer(said: Any, status: int = 200) -> Response:
    """Return an answer as JSON."""
    return as_response(json.dumps(said).encode(), status)


def stream(hub: Hub, view: View) -> Response:
    """Return the states of a view as server-sent events."""
    from starlette.responses import Response

    class Events(Response):
        """Sending waits for the browser, and no longer than it may."""

        async def __call__(self, scope: Any, receive: _Receive, send: _Send) -> None:
            try:
                subscription = hub.subscribe(view)
            except TooManyError:
                await answer(TOO_MANY, 503)(scope, receive, send)
                return
            gone = asyncio.ensure_future(_is_gone(receive))
            try:
                headers = {**HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
                raw = [(name.lower().encode(), text.encode()) for name, text in headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": raw})
                while not gone.done():
                    taking = asyncio.ensure_future(subscription.take(_ALIVE_S))
                    await asyncio.wait((taking, gone), return_when=asyncio.FIRST_COMPLETED)
                    if not taking.done():
                        taking.cancel()
                        break
                    taken = taking.result()
                    if END in taken:
                        break
                    await asyncio.wait_for(send(_body(taken)), _TAKES_S)
                await send({"type": "http.response.body", "body": b""})
            except TimeoutError:
                # The server closes a connection whose answer was not completed.
                _log.info("a browser took nothing for %g s: its connection is closed", _TAKES_S)
            finally:
                gone.cancel()
                hub.unsubscribe(subscription)

    return Events()


def _body(taken: MutableMapping[str, bytes]) -> _Event:
    """Return what was taken as events; a comment where there is nothing, as a sign of life."""
    events = [b"event: " + kind.encode() + b"\ndata: " + content + b"\n\n" for kind, content in taken.items()]
    return {"type": "http.response.body", "body": b"".join(events) or b": alive\n\n", "more_body": True}


async def _is_gone(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
