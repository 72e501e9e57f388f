"""The HTTP server of pages and endpoints: uvicorn on a daemon thread, and what every answer has in common.

Nobody waits for it: its end takes two seconds at most, whatever clients do, and what fails in it is logged.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.errors import ConfigurationError
from penstock.fleet.visitors import Visitors

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

_log = logging.getLogger(__name__)

#: What it needs beside the core.
INSTALL = "pip install 'penstock[web]'"
#: Seconds that the end waits for answers under way, and then for the thread.
_ANSWERS_S = 1
_JOIN_S = 2.0
#: Of every answer; a page says more about what it may load.
HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Endpoint = Callable[["Request"], Awaitable["Response"]]


def route(path: str, endpoint: Endpoint, visitors: Visitors) -> BaseRoute:
    """Return a route whose endpoint is asked by these visitors alone: others name another site's address."""
    from starlette.routing import Route

    async def answer(request: Request) -> Response:
        from starlette.responses import PlainTextResponse

        if not visitors.may_read(request):
            return PlainTextResponse("this address is for this machine alone\n", 403, HEADERS)
        return await endpoint(request)

    return Route(path, answer)


def json_answer(content: object, status: int = 200) -> Response:
    """Return an answer as JSON, which bytes are already."""
    from starlette.responses import Response

    body = content if isinstance(content, bytes) else json.dumps(content).encode() + b"\n"
    return Response(body, status, {**HEADERS, "Content-Type": "application/json"})


def require_packages() -> None:
    """Raise `ConfigurationError` where what serves is not installed."""
    try:
        import starlette  # noqa: F401 - whether it is there
        import uvicorn  # noqa: F401 - the same
    except ImportError as error:
        raise ConfigurationError(f"endpoints need starlette and uvicorn: {INSTALL}") from error


@contextmanager
def serving(listener: socket.socket, routes: Sequence[BaseRoute]) -> Iterator[None]:
    """Serve these routes at a listening socket until the block is left; that takes seconds at most."""
    import uvicorn
    from starlette.applications import Starlette

    server = uvicorn.Server(
        uvicorn.Config(
            Starlette(routes=routes),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            loop="asyncio",
            server_header=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=_ANSWERS_S,
        )
    )

    def run() -> None:
        try:
            server.run(sockets=[listener])
        except Exception:  # noqa: BLE001 - who serves must not end who is served
            _log.exception("the page and the endpoints of this process have ended; all else runs on")

    thread = threading.Thread(target=run, name="penstock-http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        # A thread that still runs then is a daemon: it holds nothing up.
        thread.join(_JOIN_S)
