"""`penstock coordinator`: the coordinator of transactional messages, as its own process."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.options import Cluster
from penstock.cli.output import log_to_stderr
from penstock.cli.tx_store import Sql, require_one_store
from penstock.errors import ConfigurationError
from penstock.supervisor.stopping import until_signal

if TYPE_CHECKING:
    from penstock.fleet import Address, PrometheusMetrics
    from penstock.transactions import Coordinator, FileStore, SqlStore

_POLL_S = 0.2


@dataclass(frozen=True)
class CoordinatorOptions:
    """The options of a `Coordinator`, by its names."""

    transaction_timeout: Annotated[
        float, typer.Option(help="Seconds after which an undecided transaction is checked.")
    ] = 6.0
    check_interval: Annotated[float, typer.Option(help="Seconds between two checks of one transaction.")] = 30.0
    check_max: Annotated[
        int, typer.Option(help="Answered checks after which the discard policy decides about a transaction.")
    ] = 15
    check_backoff: Annotated[
        float, typer.Option(help="Factor by which the interval grows with each check, up to an hour.")
    ] = 1.0
    discard: Annotated[
        Literal["topic", "commit", "rollback"],
        typer.Option(
            help="The discard policy: move the transaction to the topic PREFIX.discarded, publish it or roll it back."
        ),
    ] = "topic"
    publish_timeout: Annotated[
        float, typer.Option(help="Seconds that a Kafka transaction may wait for slow brokers.")
    ] = 30.0
    partitions: Annotated[
        int,
        typer.Option(
            help="Partitions of the topics half, op and done, if they are created; each has one coordinator at a time."
        ),
    ] = 2
    target_latency: Annotated[
        float, typer.Option(help="Target duration of a Kafka transaction in seconds; its size adapts to it.")
    ] = 0.02
    instance: Annotated[
        str | None,
        typer.Option(
            help="Unique name of this coordinator. With the same name after a restart, it gets its partitions at once."
        ),
    ] = None
    session_timeout: Annotated[
        float,
        typer.Option(help="Seconds after which a silent coordinator loses its partitions; brokers accept 6 or more."),
    ] = 10.0


def coordinator(
    cluster: Cluster,
    options: CoordinatorOptions,
    *,
    sql: Sql = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="Folder of a file store. No other process may use it at the same time."),
    ] = None,
    prefix: Annotated[str, typer.Option(help="First part of the topic names; producers use the same prefix.")] = (
        "penstock"
    ),
    report: Annotated[
        bool,
        typer.Option("--report", help="Report its state to the topic of reports, as group PREFIX.coordinator."),
    ] = False,
    commands: Annotated[
        bool,
        typer.Option("--commands", help="Execute commands from the topic penstock.commands: settle and resume."),
    ] = False,
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve a page, /healthz, /readyz and /metrics at this address."),
    ] = None,
) -> None:
    """Publish committed transactions, and settle undecided ones, until SIGTERM or Ctrl-C.

    Any number of coordinators may run and share the work, except on a file store. If your discard policy is a function,
    run a `penstock.Coordinator` in your own program instead.

    With --http, /healthz fails when the coordinator has ended, and /readyz while it has no partition.
    """
    from penstock.transactions import Coordinator

    log_to_stderr()
    servers, settings = cluster.servers, cluster.settings
    telemetry: dict[str, Any] = {}
    metrics = address = None
    if http is not None:
        from penstock.fleet import Address, PrometheusMetrics

        address = Address.parse(http)

        # It creates the telemetry for the coordinator.
        metrics = PrometheusMetrics(lambda created: telemetry.setdefault("telemetry", created))
    kafka: dict[str, Any] = {"bootstrap_servers": servers, "prefix": prefix, "config": settings}
    store = _store(kafka, sql, file)
    with (
        until_signal(),
        Coordinator(
            **(kafka if store is None else {"store": store}),
            **asdict(options),
            commands=commands,
            **telemetry,
        ) as running,
        ExitStack() as services,
    ):
        name = repr(prefix) if store is None else store.label
        typer.echo(f"The coordinator of {name} runs at {servers}; Ctrl-C stops it.")
        if report:
            from penstock.fleet.reports.reporter import coordinator_reporter

            reporter = coordinator_reporter(running, servers, settings)
            services.callback(reporter.stop)
            reporter.start()
        if address is not None and metrics is not None:
            services.enter_context(_endpoints(running, address, metrics, settings))
        while not running.wait(_POLL_S):
            pass  # leaving the block raises the error that ended it


def _endpoints(
    running: Coordinator, address: Address, metrics: PrometheusMetrics, settings: dict[str, str]
) -> AbstractContextManager[object]:
    from penstock.fleet import CoordinatorHealth, Endpoints
    from penstock.fleet_member import sender_of

    sender = replace(sender_of(running.group, settings), member=running.member)
    return Endpoints(CoordinatorHealth(running), sender, address, lambda: metrics)


def _store(kafka: dict[str, Any], sql: str | None, file: Path | None) -> SqlStore | FileStore | None:
    """Return the store that `--sql` or `--file` names; None for a store in Kafka."""
    require_one_store(sql, file)
    if file is not None:
        from penstock.transactions import FileStore

        return FileStore(file, **kafka)
    if sql is None:
        return None
    try:
        from penstock.transactions import SqlStore
    except ImportError as error:
        raise ConfigurationError("--sql needs the extra sql: pip install 'penstock[sql]'") from error
    return SqlStore(sql, **kafka)
