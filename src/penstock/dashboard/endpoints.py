"""The endpoints of one process: `/healthz`, `/readyz` and `/metrics`, served on a thread of their own.

They only read, and the app never waits for them: the thread is a daemon, a collection of metrics runs on a disposable
thread, and the end waits two seconds at most. What fails here is logged and costs an answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from penstock.dashboard.address import Address
from penstock.dashboard.health import Health, HealthLimits, Verdict
from penstock.dashboard.metrics import INSTALL, PrometheusMetrics
from penstock.errors import ConfigurationError
from penstock.running import RunningApp, run_until_signal

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from penstock.app import App

_log = logging.getLogger(__name__)

#: Seconds between two looks whether messages are done.
_LOOK_S = 5.0
#: Seconds that a collection of metrics may take.
_COLLECT_S = 10.0
#: Seconds that the end waits for answers under way, and then for the thread.
_ANSWERS_S = 1
_END_S = 2.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'",
    "X-Content-Type-Options": "nosniff",
}


class Endpoints:
    """Serves the state of one app by HTTP. Made before the app starts; a context manager.

    Args:
        app: the app; it has not been started.
        address: where to listen. Who reaches it sees names of topics, groups, handlers and hosts.
        limits: what is too long.

    Raises:
        ConfigurationError: a package is missing, the address cannot be had, or the app's meter provider not be read.
    """

    def __init__(self, app: App, address: Address, limits: HealthLimits | None = None) -> None:
        try:
            import uvicorn
        except ImportError as error:
            raise ConfigurationError(f"endpoints need starlette and uvicorn: {INSTALL}") from error
        self._health = Health(limits or HealthLimits())
        self._is_loopback = address.is_loopback
        self._listener = address.listen()
        host, port = self._listener.getsockname()[:2]
        #: Where it listens: with the port that was free, where any was asked for.
        self.address = Address(str(host), int(port))
        try:
            self._metrics = PrometheusMetrics(app)
            self._server = uvicorn.Server(
                uvicorn.Config(
                    self._application(),
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
        except BaseException:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._run, name="penstock-http", daemon=True)

    def watch(self, running: RunningApp) -> None:
        """Tell of this app from now on; until then the answer is that it starts."""
        self._health.running = running

    def __enter__(self) -> Self:
        """Serve."""
        self._thread.start()
        _log.info("/healthz, /readyz and /metrics are at http://%s", self.address)
        return self

    def __exit__(self, *_: object) -> None:
        """End, within seconds, whatever clients do."""
        self._server.should_exit = True
        self._thread.join(_END_S)
        # The thread that still runs is a daemon: it holds nothing up.
        with suppress(OSError):
            self._listener.close()
        self._metrics.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # noqa: BLE001 - see the module's second paragraph
            _log.exception("the endpoints at http://%s ended; the app runs on", self.address)

    async def _serve(self) -> None:
        looking = asyncio.create_task(self._look())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            looking.cancel()

    async def _look(self) -> None:
        while True:
            try:
                self._health.look()
            except Exception:  # noqa: BLE001 - as in _run
                _log.exception("the app's statistics could not be read")
            await asyncio.sleep(_LOOK_S)

    def _application(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/healthz", self._guarded(self._healthz)),
                Route("/readyz", self._guarded(self._readyz)),
                Route("/metrics", self._guarded(self._metricsz)),
            ]
        )

    def _guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that answers pages of other sites nothing, where only this machine is meant.

        A page may have its own name resolve to the loopback address, and then reads what is there; but it says so.
        """

        async def guarded(request: Request) -> Response:
            from starlette.responses import PlainTextResponse

            host = request.url.hostname or ""
            if self._is_loopback and not Address(host, 0).is_loopback:
                return PlainTextResponse("this address is for this machine alone\n", 403, _HEADERS)
            return await answer(request)

        return guarded

    async def _healthz(self, _: Request) -> Response:
        return _verdict(self._health.alive, "alive", "hung")

    async def _readyz(self, _: Request) -> Response:
        return _verdict(self._health.ready, "ready", "not ready")

    async def _metricsz(self, request: Request) -> Response:
        from starlette.responses import PlainTextResponse, Response

        loop = asyncio.get_running_loop()
        collected: asyncio.Future[tuple[bytes, str]] = loop.create_future()
        accept = request.headers.get("accept", "")
        # A callback of the user's may hang; a thread of a pool would then keep the process from ending.
        threading.Thread(
            target=_collect, args=(self._metrics, accept, collected), name="penstock-http-metrics", daemon=True
        ).start()
        try:
            text, media_type = await asyncio.wait_for(collected, _COLLECT_S)
        except TimeoutError:
            return PlainTextResponse(f"the metrics did not come within {_COLLECT_S:g} s\n", 503, _HEADERS)
        except Exception:  # noqa: BLE001 - a callback may be anybody's
            _log.exception("the metrics could not be collected")
            return PlainTextResponse("the metrics could not be collected; the log says why\n", 500, _HEADERS)
        return Response(text, headers={**_HEADERS, "Content-Type": media_type})


def _collect(metrics: PrometheusMetrics, accept: str, collected: asyncio.Future[tuple[bytes, str]]) -> None:
    def settle(settled: Callable[[], None]) -> None:
        # The loop may have ended meanwhile.
        with suppress(RuntimeError):
            collected.get_loop().call_soon_threadsafe(lambda: None if collected.done() else settled())

    try:
        found = metrics.text(accept)
    except Exception as error:  # noqa: BLE001 - it is the answer's to log
        failure = error
        settle(lambda: collected.set_exception(failure))
    else:
        settle(lambda: collected.set_result(found))


def _verdict(judge: Callable[[], Verdict], well: str, unwell: str) -> Response:
    from starlette.responses import Response

    try:
        verdict = judge()
    except Exception:  # noqa: BLE001 - as in _run
        _log.exception("the app could not be judged")
        verdict = Verdict(well=False, reasons=("the app's state could not be read; the log says why",))
    body = json.dumps({"status": well if verdict.well else unwell, "reasons": verdict.reasons}) + "\n"
    return Response(body, 200 if verdict.well else 503, {**_HEADERS, "Content-Type": "application/json"})


def run_with_endpoints(app: App, address: Address, limits: HealthLimits | None = None) -> None:
    """Run an app as `App.run` does, with its endpoints from before its start until after its end. Raises as that."""
    with Endpoints(app, address, limits) as endpoints:

        def start() -> RunningApp:
            running = app.start()
            endpoints.watch(running)
            return running

        run_until_signal(app.name, start)
