"""`penstock coordinator`: the other half of transactional messages, as a process of its own."""

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
    from penstock.fleet import PrometheusMetrics
    from penstock.transactions import Coordinator, FileStore, SqlStore

_POLL_S = 0.2


@dataclass(frozen=True)
class Terms:
    """What a `Coordinator` takes by these names."""

    transaction_timeout: Annotated[
        float, typer.Option(help="Seconds after which an undecided transaction is checked.")
    ] = 6.0
    check_interval: Annotated[float, typer.Option(help="Seconds between two checks of one transaction.")] = 30.0
    check_max: Annotated[
        int, typer.Option(help="Answered checks after which the discard policy decides about a transaction.")
    ] = 15
    check_backoff: Annotated[
        float, typer.Option(help="Factor by which the interval grows from check to check, to an hour at most.")
    ] = 1.0
    discard: Annotated[
        Literal["topic", "commit", "rollback"],
        typer.Option(help="What becomes of a transaction then: moved to PREFIX.discarded, published, rolled back."),
    ] = "topic"
    publish_timeout: Annotated[
        float, typer.Option(help="The most seconds that a Kafka transaction may stand still on slow brokers.")
    ] = 30.0
    partitions: Annotated[
        int, typer.Option(help="Partitions of half, op and done, if they have to be created: so many share the work.")
    ] = 2
    target_latency: Annotated[
        float, typer.Option(help="Seconds that a Kafka transaction may take: groups grow and shrink to it.")
    ] = 0.02
    instance: Annotated[
        str | None,
        typer.Option(help="Name that no other running coordinator has, the same after a restart: it goes on at once."),
    ] = None
    session_timeout: Annotated[
        float,
        typer.Option(help="Seconds after which one that fell silent loses its partitions; a broker's least is 6."),
    ] = 10.0


def coordinator(
    cluster: Cluster,
    terms: Terms,
    *,
    sql: Sql = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="A file store instead, by its folder; no other process may have it meanwhile."),
    ] = None,
    prefix: Annotated[str, typer.Option(help="First part of the names of its topics; producers take the same.")] = (
        "penstock"
    ),
    report: Annotated[
        bool,
        typer.Option("--report", help="Report how it does to the topic of reports, as PREFIX.coordinator."),
    ] = False,
    commands: Annotated[
        bool,
        typer.Option("--commands", help="Settle and resume transactions as the topic penstock.commands asks."),
    ] = False,
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve a page, /healthz, /readyz and /metrics there."),
    ] = None,
) -> None:
    """Publish what producers committed, settle what they left undecided; until SIGTERM or Ctrl-C.

    Any number may run: they share the work, save on a file store. For a discard policy that is a function, run a
    `penstock.Coordinator` in a program of yours.

    With --http, /healthz fails where it has ended, and /readyz as long as it has taken no partition over.
    """
    from penstock.transactions import Coordinator

    log_to_stderr()
    servers, settings = cluster.servers, cluster.settings
    given: dict[str, Any] = {}
    metrics = None
    if http is not None:
        from penstock.fleet import PrometheusMetrics

        # It makes the telemetry that the coordinator is to take.
        metrics = PrometheusMetrics(lambda made: given.setdefault("telemetry", made))
    kafka: dict[str, Any] = {"bootstrap_servers": servers, "prefix": prefix, "config": settings}
    store = _store(kafka, sql, file)
    with (
        until_signal(),
        Coordinator(
            **(kafka if store is None else {"store": store}),
            **asdict(terms),
            commands=commands,
            **given,
        ) as running,
        ExitStack() as services,
    ):
        name = repr(prefix) if store is None else store.label
        typer.echo(f"The coordinator of {name} runs at {servers}; Ctrl-C stops it.")
        if report:
            from penstock.fleet.reports.reporter import coordinator_reporter

            reporter = coordinator_reporter(f"{prefix}.coordinator", running, servers, settings)
            services.callback(reporter.stop)
            reporter.start()
        if http is not None and metrics is not None:
            services.enter_context(_endpoints(running, http, metrics, settings))
        while not running.wait(_POLL_S):
            pass  # leaving the block raises what ended it


def _endpoints(
    running: Coordinator, http: str, metrics: PrometheusMetrics, settings: dict[str, str]
) -> AbstractContextManager[object]:
    from penstock.fleet import Address, CoordinatorHealth, Endpoints
    from penstock.fleet_member import sender_of

    sender = replace(sender_of(running.group, settings), member=running.member)
    return Endpoints(CoordinatorHealth(running), sender, Address.parse(http), lambda: metrics)


def _store(kafka: dict[str, Any], sql: str | None, file: Path | None) -> SqlStore | FileStore | None:
    """Return the store that `--sql` or `--file` names; None: it is in Kafka."""
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
