"""The HTTP server of pages, probes and actions: uvicorn on a daemon thread, and what every answer has in common.

That is who may ask (`Visitors`), the threads that look things up (`DisposableThreads`), and what a failure is answered
with (`route`). Nobody waits for the server: its end takes two seconds at most, whatever clients do.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from penstock.clients.bounded_calls import Call
from penstock.clients.ration import once_in, rationed
from penstock.errors import ConfigurationError, PenstockError
from penstock.fleet.address import Address

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

_log = rationed(__name__)

#: What it needs beside the core.
INSTALL = "pip install 'penstock[web]'"
#: Seconds that the end waits for answers under way, and then for the thread.
_ANSWERS_S = 1
_JOIN_S = 2.0
#: Seconds between two lines of the log that say that an address cannot be answered.
_LOG_INTERVAL_S = 60.0
#: Of every answer; a page says more about what it may load.
HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Endpoint = Callable[["Request"], Awaitable["Response"]]
ResultT = TypeVar("ResultT")


class Visitors:
    """Judges requests. Never changes.

    Args:
        is_loopback: whether the server listens to this machine alone.
        public_url: the page's address at a reverse proxy, as browsers see it; None: there is no proxy. What the proxy
            says of who asks (`X-Forwarded-For`) counts only where it is given.

    Raises:
        ConfigurationError: the address is no http(s) URL.
    """

    def __init__(self, *, is_loopback: bool, public_url: str | None = None) -> None:
        self._is_loopback = is_loopback
        # Scheme, host and port.
        self._public_origin: tuple[str, str] | None = None
        if public_url is None:
            return
        parts = urlsplit(public_url)
        if parts.scheme not in {"http", "https"} or not parts.netloc or parts.username is not None:
            raise ConfigurationError(
                f"--public-url {public_url!r} is no address of a page; write it as browsers see it: https://HOST/PATH/"
            )
        self._public_origin = (parts.scheme, parts.netloc.lower())

    def may_read(self, request: Request) -> bool:
        """Tell whether a request names an address of this server.

        A page of another site may have its own name resolve to the loopback address, and would then read what is here;
        but its requests name that site.
        """
        if not self._is_loopback or Address(request.url.hostname or "", 0).is_loopback:
            return True
        return self._public_origin is not None and _host(request) == self._public_origin[1]

    def is_own_page(self, request: Request) -> bool:
        """Tell whether a request was made by this page, or by no page at all."""
        if request.headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
            return False
        origin = request.headers.get("origin")
        if origin is None:
            return True
        parts = urlsplit(origin)
        made_by = (parts.scheme, parts.netloc.lower())
        return made_by[1] == _host(request) or made_by == self._public_origin

    def client(self, request: Request) -> str:
        """Return the address of who asks: behind a proxy, the one that the proxy itself saw."""
        seen = request.headers.get("x-forwarded-for", "") if self._public_origin is not None else ""
        direct = "somewhere" if request.client is None else request.client.host
        return seen.rpartition(",")[2].strip() or direct


def _host(request: Request) -> str:
    return request.headers.get("host", "").lower()


class TooManyError(PenstockError):
    """As many are at work as may be."""


class DisposableThreads:
    """Daemon threads, for the thread of an event loop: one for each piece of work, which no pool waits for at the end.

    Args:
        name: of the threads.
        what: that they are to bring, in errors.
        most: threads at a time, those included that were abandoned and still run.
        limit_s: seconds that the loop waits for one.
    """

    def __init__(self, name: str, what: str, most: int, limit_s: float) -> None:
        self._name = name
        self._what = what
        self._most = most
        self._limit_s = limit_s
        # The loop's thread's alone; the threads end the calls.
        self._calls: list[Call[Any]] = []

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Return what the work returns, or raise what it raises; `TooManyError`, or `TimeoutError` after the limit."""
        call = self.start(work)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call), self._limit_s)
        except TimeoutError:
            raise TimeoutError(f"{self._what} did not come within {self._limit_s:g} s; try again") from None

    def start(self, work: Callable[[], ResultT]) -> Call[ResultT]:
        """Have something done that nobody waits for; `TooManyError`."""
        self._calls = [call for call in self._calls if not call.done()]
        if len(self._calls) >= self._most:
            raise TooManyError(f"too many ask for {self._what}: {self._most} are under way; wait until one has ended")
        call = Call(self._name, work)
        # From now on nobody cancels it: who waits no longer leaves it to its thread.
        call.set_running_or_notify_cancel()
        self._calls.append(call)
        threading.Thread(target=call.run, name=self._name, daemon=True).start()
        return call


class RefusedError(Exception):
    """A request is answered with this status and sentence."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


def route(path: str, endpoint: Endpoint, visitors: Visitors, method: str = "GET") -> BaseRoute:
    """Return a route that these visitors alone may ask; what its endpoint raises is the answer.

    What changes something is asked for by a page of this address, not by one of another site in somebody's browser.
    """
    from starlette.routing import Route

    async def answer(request: Request) -> Response:
        try:
            _require_right(request, visitors, method)
            return await endpoint(request)
        except RefusedError as refused:
            status, said = refused.status, str(refused)
        except (TooManyError, TimeoutError) as error:
            status, said = 503, str(error)
        except PenstockError as error:
            status, said = 404, str(error)
        except Exception:  # noqa: BLE001 - a callback and the client library may raise anything; it costs an answer
            _log.exception("no answer to %s", path, extra=once_in(_LOG_INTERVAL_S, path))
            status, said = 500, "it failed; the log says why"
        return json_answer({"said": said}, status)

    return Route(path, answer, methods=[method])


def _require_right(request: Request, visitors: Visitors, method: str) -> None:
    if not visitors.may_read(request):
        raise RefusedError(403, "this address is for this machine alone")
    if method != "GET" and not visitors.is_own_page(request):
        raise RefusedError(
            403,
            "a page of another site asks for this; open the dashboard itself, and behind a proxy start it with "
            "--public-url",
        )


def json_answer(content: object, status: int = 200) -> Response:
    """Return an answer as JSON, which bytes are already."""
    from starlette.responses import Response

    if not isinstance(content, bytes):
        # Escaped further than JSON asks for: it is harmless also where somebody puts it into a page as it is.
        text = json.dumps(content).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        content = text.encode() + b"\n"
    return Response(content, status, {**HEADERS, "Content-Type": "application/json"})


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
            # `Visitors` says whether a proxy's word on who asks counts; uvicorn would believe anybody on this machine.
            proxy_headers=False,
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
