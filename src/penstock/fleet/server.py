"""The HTTP server of endpoints and pages: uvicorn on a daemon thread, and what every answer has in common.

Nobody waits for it: its end takes two seconds at most, whatever clients do, and what fails in it is logged.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigurationError
from penstock.fleet.address import Address
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
#: Milliseconds after which the kernel drops a client that takes nothing of what was sent.
_TAKES_NOTHING_MS = 30_000
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


class HttpServer:
    """Serves routes at an address. The address is taken at once; `start` and `stop` are for one thread.

    Args:
        address: where to listen.

    Raises:
        ConfigurationError: a package is missing, or the address cannot be had.
    """

    def __init__(self, address: Address) -> None:
        try:
            import starlette  # noqa: F401 - whether it is there
            import uvicorn  # noqa: F401 - the same
        except ImportError as error:
            raise ConfigurationError(f"endpoints need starlette and uvicorn: {INSTALL}") from error
        self._listener = address.listen()
        with suppress(OSError):
            self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TAKES_NOTHING_MS)
        host, port = self._listener.getsockname()[:2]
        #: Where it listens: with the port that was free, where any was asked for.
        self.address = Address(str(host), int(port))
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def start(self, routes: Sequence[BaseRoute]) -> None:
        """Serve these routes; returns at once."""
        import uvicorn
        from starlette.applications import Starlette

        self._server = uvicorn.Server(
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
        self._thread = threading.Thread(target=self._run, name="penstock-http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, within seconds."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(_JOIN_S)
        # The thread that still runs is a daemon: it holds nothing up.
        with suppress(OSError):
            self._listener.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except Exception:  # noqa: BLE001 - who serves must not end who is served
            _log.exception("the server at http://%s ended; all else runs on", self.address)
