"""The endpoints of one process: `/healthz`, `/readyz`, `/metrics` and its page, on their own thread.

They only read, and the app never waits for them: the thread is a daemon, metrics are collected on a disposable thread,
and stopping takes at most two seconds. A failure is logged and affects only the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from penstock.clients.ration import once_in, rationed
from penstock.fleet.address import Address
from penstock.fleet.page.server import PageServer, ReadMessage, Stacks, read_message
from penstock.fleet.probes.health import CoordinatorHealth, Health, HealthLimits
from penstock.fleet.probes.metrics import PrometheusMetrics
from penstock.fleet.reports.group_state import Group, Member
from penstock.fleet.reports.report import ReportMaker, decode_report
from penstock.fleet.server import HEADERS, DisposableThreads, json_answer, route
from penstock.fleet_member import Sender, sender_of
from penstock.running import RunningApp, run_until_signal

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from penstock.app import App

_log = rationed(__name__)

#: Seconds between two log lines about a failed probe.
_LOG_INTERVAL_S = 60.0
#: The timeout of a collection of metrics in seconds, and the limit of collections at a time.
_COLLECT_S = 10.0
_MOST_COLLECTIONS = 4
#: The number of reasons in one answer.
_MOST_REASONS = 10
#: The report interval in seconds that this process promises to its own page.
_OWN_INTERVAL_S = 5.0


class Endpoints(PageServer):
    """Serves the state of one process by HTTP. A context manager.

    Args:
        process: the process.
        sender: its name among the members of its group.
        address: the listening address. Anyone who can reach it sees the names of topics, groups, handlers and hosts.
        metrics: returns the collector of its metrics.
        read_message: returns a message by topic, partition and offset; None if the page hides messages.
        stacks: returns the stacks of blocking calls by worker. The page shows them if its address is a loopback one.

    Raises:
        ConfigurationError: a package is missing, the address cannot be used, or the meter provider cannot be read.
    """

    def __init__(
        self,
        process: Health | CoordinatorHealth,
        sender: Sender,
        address: Address,
        metrics: Callable[[], PrometheusMetrics],
        *,
        read_message: ReadMessage | None = None,
        stacks: Stacks | None = None,
    ) -> None:
        source = _OwnSource(sender, process)
        super().__init__(
            address,
            lambda: nullcontext(source),
            "this process",
            read_message=read_message,
            stacks=stacks if address.is_loopback else None,
        )
        self._process = process
        self._collections = DisposableThreads("penstock-http-metrics", "the metrics", _MOST_COLLECTIONS, _COLLECT_S)
        try:
            self._metrics = metrics()
        except BaseException:
            self._running.close()
            raise
        self._running.callback(self._metrics.close)

    def routes(self) -> list[BaseRoute]:
        """Return all routes, those of probes first."""
        probes = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metricsz}
        return [*(route(path, answer, self.visitors) for path, answer in probes.items()), *super().routes()]

    async def _healthz(self, _: Request) -> Response:
        return _verdict(self._process.alive, "alive", "hung")

    async def _readyz(self, _: Request) -> Response:
        return _verdict(self._process.ready, "ready", "not ready")

    async def _metricsz(self, request: Request) -> Response:
        from starlette.responses import Response

        # A callback of the user may hang.
        collect = partial(self._metrics.text, request.headers.get("accept", ""))
        text, media_type = await self._collections.run(collect)
        return Response(text, headers={**HEADERS, "Content-Type": media_type})


def _verdict(check: Callable[[], list[str]], healthy: str, unhealthy: str) -> Response:
    try:
        reasons = check()
    except Exception:  # noqa: BLE001 - the answer has a status and reasons, whatever failed
        _log.exception("the process could not be judged", extra=once_in(_LOG_INTERVAL_S, unhealthy))
        reasons = ["the state could not be read; the log has the reason"]
    verdict = {"status": unhealthy if reasons else healthy, "reasons": reasons[:_MOST_REASONS]}
    return json_answer(verdict, 503 if reasons else 200)


class _OwnSource:
    """The source of a process's own page: it makes a report on request, and decodes it like a reader."""

    def __init__(self, sender: Sender, process: Health | CoordinatorHealth) -> None:
        self._sender = sender
        self._process = process
        self._reports = ReportMaker(sender, time.monotonic())
        self.ignored: Mapping[str, int] = {}
        # Also while the app starts or stops, which is its banner.
        self.is_stale = False

    @property
    def trouble(self) -> str | None:
        """See `Source`."""
        return self._process.trouble()

    def follow(self, timeout: float) -> None:
        """See `Source`."""
        time.sleep(timeout)

    def groups(self) -> Sequence[Group]:
        """See `Source`."""
        description = self._process.description()
        if description is None:
            return ()
        value = self._reports.next_report(description, _OWN_INTERVAL_S, time.monotonic())
        member = Member(decode_report(self._sender.key, value), 0.0, is_silent=False)
        return (Group(self._sender.group, (member,)),)


class AppEndpoints(Endpoints):
    """Serves the state of an app by HTTP. Create it before the app starts. A context manager.

    Args:
        app: the app, not started.
        address: the listening address, as for `Endpoints`.
        limits: the time limits of the probes.
        show_messages: whether the page shows keys, headers and values of messages that it names.

    Raises:
        ConfigurationError: as `Endpoints` raises it.
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
            stacks=self._health.stacks,
        )

    def watch(self, running: RunningApp) -> None:
        """Show this app from now on; before, the answer is that the app is starting."""
        self._health.running = running


def run_with_endpoints(
    app: App, address: Address, limits: HealthLimits | None = None, *, show_messages: bool = False
) -> None:
    """Run an app like `App.run`, with endpoints from before its start until after its end. Raises the same errors."""
    with AppEndpoints(app, address, limits, show_messages=show_messages) as endpoints:

        def start() -> RunningApp:
            running = app.start()
            endpoints.watch(running)
            return running

        run_until_signal(app.name, start)
