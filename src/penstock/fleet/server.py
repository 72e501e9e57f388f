"""The HTTP server of pages, probes and actions: uvicorn on a daemon thread, and the rules common to all answers.

The rules are access (`Visitors`), the threads of blocking work (`DisposableThreads`) and the answers to failures
(`route`). The process never waits for the server: stopping it takes at most two seconds, whatever clients do.
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

#: The command that installs its packages.
INSTALL = "pip install 'penstock[web]'"
#: Seconds that stopping waits for answers in progress, and then for the thread.
_ANSWERS_S = 1
_JOIN_S = 2.0
#: Seconds between two log lines about failures of one path.
_LOG_INTERVAL_S = 60.0
#: The headers of every answer; the page has a more detailed content policy.
HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}

Endpoint = Callable[["Request"], Awaitable["Response"]]
ResultT = TypeVar("ResultT")


class Visitors:
    """The access rules for requests. Immutable.

    Args:
        is_loopback: whether the server listens on a loopback address only.
        public_url: the page's address at a reverse proxy, as browsers see it; None if there is no proxy. Only with it
            the proxy's `X-Forwarded-For` is trusted.

    Raises:
        ConfigurationError: the address is no http(s) URL.
    """

    def __init__(self, *, is_loopback: bool, public_url: str | None = None) -> None:
        self._is_loopback = is_loopback
        # Scheme, host and port.
        self._public_origin: tuple[str, str] | None = None
        if public_url is None:
            return
        try:
            parts = urlsplit(public_url)
        except ValueError:  # it has one bracket
            parts = urlsplit("")
        if parts.scheme not in {"http", "https"} or not parts.netloc or parts.username is not None:
            raise ConfigurationError(
                f"--public-url {public_url!r} is no address of a page; write it as browsers see it: https://HOST/PATH/"
            )
        self._public_origin = _origin(parts.scheme, parts.netloc)

    def may_read(self, request: Request) -> bool:
        """Return whether a request names an address of this server.

        It prevents DNS rebinding: another site can let its own name resolve to the loopback address, so that its page
        reads this server. But those requests name that site.
        """
        if not self._is_loopback or Address(request.url.hostname or "", 0).is_loopback:
            return True
        origin = self._public_origin
        return origin is not None and _origin(origin[0], request.headers.get("host", "")) == origin

    def is_own_page(self, request: Request) -> bool:
        """Return whether a request comes from this page, or from a program that is no browser."""
        if request.headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
            return False
        origin = request.headers.get("origin")
        if origin is None:
            return True
        # Not urlsplit: it raises on half an IPv6 address.
        scheme, _, host = origin.lower().partition("://")
        return _origin(scheme, host) in {_origin(scheme, request.headers.get("host", "")), self._public_origin}

    def client(self, request: Request) -> str:
        """Return the client's address; behind a proxy the last one in `X-Forwarded-For`, which the proxy itself saw."""
        # A proxy appends to the client's header, or adds a second header below it, as HAProxy does.
        forwarded = request.headers.getlist("x-forwarded-for") if self._public_origin is not None else []
        direct = "an unknown address" if request.client is None else request.client.host
        return ",".join(forwarded).rpartition(",")[2].strip() or direct


def _origin(scheme: str, host: str) -> tuple[str, str]:
    """Return scheme and host of a page as browsers send them: without the scheme's own port."""
    return scheme, host.lower().removesuffix(_DEFAULT_PORTS.get(scheme, ":"))


class TooManyError(PenstockError):
    """The limit of work at a time is reached."""


class DisposableThreads:
    """Runs each piece of blocking work on a daemon thread of its own. For the thread of an event loop.

    A thread pool would wait for its threads at the end of the process; these are abandoned.

    Args:
        name: name of the threads.
        what: the subject of the work, for errors.
        most: the limit of threads at a time, including abandoned ones that still run.
        limit_s: seconds that the event loop waits for a result.
    """

    def __init__(self, name: str, what: str, most: int, limit_s: float) -> None:
        self._name = name
        self._what = what
        self._most = most
        self._limit_s = limit_s
        # Only the event loop's thread uses the list; the threads complete the calls.
        self._calls: list[Call[Any]] = []

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run the work; return its result or raise its exception. `TooManyError`, or `TimeoutError` after the limit."""
        call = self.start(work)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call), self._limit_s)
        except TimeoutError:
            raise TimeoutError(f"{self._what} did not arrive within {self._limit_s:g} s; try again") from None

    def start(self, work: Callable[[], ResultT]) -> Call[ResultT]:
        """Start the work without waiting for its end; `TooManyError`."""
        self._calls = [call for call in self._calls if not call.done()]
        if len(self._calls) >= self._most:
            raise TooManyError(f"too many ask for {self._what}: {self._most} are under way; wait until one has ended")
        call = Call(self._name, work)
        # `wait_for` can no longer cancel it: after a timeout its thread goes on.
        call.set_running_or_notify_cancel()
        self._calls.append(call)
        threading.Thread(target=call.run, name=self._name, daemon=True).start()
        return call


class RefusedError(Exception):
    """The answer to a refused request: an HTTP status and a sentence."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


def route(path: str, endpoint: Endpoint, visitors: Visitors, method: str = "GET") -> BaseRoute:
    """Return a route with these access rules; an exception of its endpoint becomes the answer.

    Requests that are no GET must not come from a page of another site in the user's browser.
    """
    from starlette.routing import Route

    async def answer(request: Request) -> Response:
        try:
            _require_access(request, visitors, method)
            return await endpoint(request)
        except RefusedError as refused:
            status, said = refused.status, str(refused)
        except (TooManyError, TimeoutError) as error:
            status, said = 503, str(error)
        except PenstockError as error:
            status, said = 404, str(error)
        except Exception:  # noqa: BLE001 - a callback and the client library may raise anything; it costs an answer
            _log.exception("no answer to %s", path, extra=once_in(_LOG_INTERVAL_S, path))
            status, said = 500, "it failed; the log has the reason"
        return json_answer({"said": said}, status)

    return Route(path, answer, methods=[method])


def _require_access(request: Request, visitors: Visitors, method: str) -> None:
    if not visitors.may_read(request):
        raise RefusedError(403, "this address is only for this machine")
    if method != "GET" and not visitors.is_own_page(request):
        raise RefusedError(
            403,
            "a page of another site asks for this; open the dashboard itself, and behind a proxy start it with "
            "--public-url",
        )


def json_answer(content: object, status: int = 200) -> Response:
    """Return an answer in JSON; bytes are JSON already."""
    from starlette.responses import Response

    if not isinstance(content, bytes):
        # More escapes than JSON requires: the text stays harmless if it is put into HTML unchanged.
        text = json.dumps(content).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        content = text.encode() + b"\n"
    return Response(content, status, {**HEADERS, "Content-Type": "application/json"})


def require_packages() -> None:
    """Raise `ConfigurationError` if the packages of the server are not installed."""
    try:
        import starlette  # noqa: F401 - only tests whether it is installed
        import uvicorn  # noqa: F401 - the same
    except ImportError as error:
        raise ConfigurationError(f"endpoints need starlette and uvicorn: {INSTALL}") from error


@contextmanager
def serving(listener: socket.socket, routes: Sequence[BaseRoute]) -> Iterator[None]:
    """Serve these routes on a listening socket until the block is left; leaving takes at most two seconds."""
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
            # `Visitors` decides on a proxy's headers; uvicorn would trust every process of this machine.
            proxy_headers=False,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=_ANSWERS_S,
        )
    )

    def run() -> None:
        try:
            server.run(sockets=[listener])
        except Exception:  # noqa: BLE001 - the server must never end the app
            _log.exception("the page and the endpoints of this process have ended; the rest of it goes on")

    thread = threading.Thread(target=run, name="penstock-http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        # If the thread still runs then: it is a daemon, so it does not keep the process alive.
        thread.join(_JOIN_S)
