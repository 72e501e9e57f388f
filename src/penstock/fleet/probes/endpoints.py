"""The endpoints of one process: `/healthz`, `/readyz`, `/metrics` and its page, served on a thread of their own.

They only read, and the app never waits for them: the thread is a daemon, a collection of metrics runs on a disposable
thread, and the end waits two seconds at most. What fails here is logged and costs an answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from penstock.fleet.address import Address
from penstock.fleet.disposable_threads import DisposableThreads, TooManyError
from penstock.fleet.page.dashboard import PageServer
from penstock.fleet.page.messages import read_message
from penstock.fleet.page.routes import ReadMessage
from penstock.fleet.probes.health import Health, HealthLimits, Process, Verdict
from penstock.fleet.probes.metrics import PrometheusMetrics
from penstock.fleet.reports.group_state import Group, Member
from penstock.fleet.reports.report import Rates, decode_report, encode_report
from penstock.fleet.server import HEADERS, Endpoint, guarded
from penstock.fleet.visitors import Visitors
from penstock.fleet_member import Sender, sender_of
from penstock.running import RunningApp, run_until_signal

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from penstock.app import App

_log = logging.getLogger(__name__)

#: Seconds between two looks whether messages are done.
_PROGRESS_INTERVAL_S = 5.0
#: Seconds that a collection of metrics may take, and how many may be under way.
_COLLECT_S = 10.0
_MOST_COLLECTIONS = 4
#: Seconds that an app of this process says between two looks at it: for who judges whether it is silent.
_OWN_INTERVAL_S = 5.0


class OwnSource:
    """This process. Its state is taken when it is asked for, by the way a report takes.

    Args:
        sender: its name among the members of its group.
        process: the process.
    """

    def __init__(self, sender: Sender, process: Process) -> None:
        self._sender = sender
        self._process = process
        self._rates = Rates()
        self._sequence = 0
        self._begun = time.monotonic()
        self._stopping = threading.Event()
        self.trouble: str | None = None
        self.ignored: Mapping[str, int] = {}

    def follow(self, timeout: float) -> None:
        """As `Source` says."""
        self._stopping.wait(timeout)

    def groups(self) -> Sequence[Group]:
        """As `Source` says."""
        self.trouble = self._process.trouble()
        description = self._process.description()
        if description is None:
            return ()
        now, name = time.monotonic(), self._sender.group
        self._sequence += 1
        numbers = {"sequence": self._sequence, "interval_s": _OWN_INTERVAL_S, "uptime_s": round(now - self._begun, 3)}
        value = encode_report(self._sender, description, self._rates.of(description, now), numbers)
        return (Group(name, (Member(decode_report(self._sender.key, value), 0.0, is_silent=False),)),)

    def close(self) -> None:
        """As `Source` says."""
        self._stopping.set()


class Endpoints(PageServer):
    """Serves the state of one process by HTTP. A context manager.

    Args:
        process: the process.
        sender: its name among the members of its group.
        address: where to listen. Who reaches it sees names of topics, groups, handlers and hosts.
        metrics: returns what collects its metrics.
        read_message: returns a message by topic, partition and offset; None where the page hides messages.

    Raises:
        ConfigurationError: a package is missing, the address cannot be had, or the meter provider not be read.
    """

    def __init__(
        self,
        process: Process,
        sender: Sender,
        address: Address,
        metrics: Callable[[], PrometheusMetrics],
        *,
        read_message: ReadMessage | None = None,
    ) -> None:
        self._process = process
        super().__init__(
            address,
            OwnSource(sender, process),
            "this process",
            visitors=Visitors(is_loopback=address.is_loopback),
            read_message=read_message,
            background=[self._look],
        )
        self._collections = DisposableThreads("penstock-http-metrics", _MOST_COLLECTIONS, _COLLECT_S)
        try:
            self._metrics = metrics()
        except BaseException:
            self._server.stop()
            raise

    def __exit__(self, *raised: object) -> None:
        """End, within seconds, whatever clients do."""
        super().__exit__(*raised)
        self._metrics.close()

    async def _look(self) -> None:
        while True:
            try:
                self._process.look()
            except Exception:  # noqa: BLE001 - as in _run
                _log.exception("the statistics could not be read")
            await asyncio.sleep(_PROGRESS_INTERVAL_S)

    def _beside(self) -> Sequence[BaseRoute]:
        from starlette.routing import Route

        def route(path: str, endpoint: Endpoint) -> BaseRoute:
            return Route(path, guarded(endpoint, self._visitors))

        return [route("/healthz", self._healthz), route("/readyz", self._readyz), route("/metrics", self._metricsz)]

    async def _healthz(self, _: Request) -> Response:
        return _verdict(self._process.alive, "alive", "hung")

    async def _readyz(self, _: Request) -> Response:
        return _verdict(self._process.ready, "ready", "not ready")

    async def _metricsz(self, request: Request) -> Response:
        from starlette.responses import PlainTextResponse, Response

        try:
            collect = partial(self._metrics.text, request.headers.get("accept", ""))
            # A callback of the user's may hang.
            text, media_type = await self._collections.run(collect)
        except TimeoutError:
            return PlainTextResponse(f"the metrics did not come within {_COLLECT_S:g} s\n", 503, HEADERS)
        except TooManyError as error:
            return PlainTextResponse(f"collections of metrics hang: {error}\n", 503, HEADERS)
        except Exception:  # noqa: BLE001 - a callback may be anybody's
            _log.exception("the metrics could not be collected")
            return PlainTextResponse("the metrics could not be collected; the log says why\n", 500, HEADERS)
        return Response(text, headers={**HEADERS, "Content-Type": media_type})


def _verdict(judge: Callable[[], Verdict], well: str, unwell: str) -> Response:
    from starlette.responses import Response

    try:
        verdict = judge()
    except Exception:  # noqa: BLE001 - as in _run
        _log.exception("the process could not be judged")
        verdict = Verdict(well=False, reasons=("the state could not be read; the log says why",))
    body = json.dumps({"status": well if verdict.well else unwell, "reasons": verdict.reasons}) + "\n"
    return Response(body, 200 if verdict.well else 503, {**HEADERS, "Content-Type": "application/json"})


class AppEndpoints(Endpoints):
    """Serves the state of an app by HTTP. Made before the app starts; a context manager.

    Args:
        app: the app; it has not been started.
        address: as `Endpoints` has it.
        limits: what is too long.
        show_messages: whether the page shows keys, headers and values of messages that it names, and stacks.

    Raises:
        ConfigurationError: as `Endpoints`.
    """

    def __init__(
        self, app: App, address: Address, limits: HealthLimits | None = None, *, show_messages: bool = False
    ) -> None:
        self._health = Health(app.name, limits or HealthLimits())
        super().__init__(
            self._health,
            sender_of(app.name, app.config),
            address,
            lambda: PrometheusMetrics(app.report_to),
            read_message=partial(read_message, app.bootstrap_servers, app.config) if show_messages else None,
        )

    def watch(self, running: RunningApp) -> None:
        """Show this app from now on; until then the answer is that it starts."""
        self._health.running = running


def run_with_endpoints(
    app: App, address: Address, limits: HealthLimits | None = None, *, show_messages: bool = False
) -> None:
    """Run an app as `App.run` does, with its endpoints from before its start until after its end. Raises as that."""
    with AppEndpoints(app, address, limits, show_messages=show_messages) as endpoints:

        def start() -> RunningApp:
            running = app.start()
            endpoints.watch(running)
            return running

        run_until_signal(app.name, start)
