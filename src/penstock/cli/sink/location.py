"""Where commands find the ledgers of sinks: the options that say so, the same for each of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options.app_options import load_app
from penstock.cli.options.connection import SERVERS_OPTION, ClientSettings, ConfigFile, client_settings
from penstock.errors import ConfigurationError, PenstockError

if TYPE_CHECKING:
    from penstock.spark_sink.sinks.administration import QueryLedger
    from penstock.spark_sink.sinks.sink import LedgerSink

#: Stands where a sink asks for a name that its ledger is not found by.
_ANY = "(any)"


@dataclass(frozen=True, slots=True)
class Location:
    """The ledger that a command is about: of a SQL database, of Kafka, or of a table of Delta or Iceberg."""

    sql: Annotated[
        str | None,
        typer.Option(
            "--sql",
            envvar="PENSTOCK_SINK_SQL",
            help="The ledger in a database: sqlite:///FILE, postgresql://USER@HOST/NAME or mysql://USER@HOST/NAME. "
            "Others on this machine can read a command line: give a password by the variable.",
        ),
    ] = None
    schema: Annotated[str | None, typer.Option("--schema", help="With --sql: the schema of table and ledger.")] = None
    ledger_table: Annotated[str, typer.Option("--ledger-table", help="With --sql: the table of the ledger.")] = (
        "penstock_ledger"
    )
    kafka: Annotated[
        bool, typer.Option("--kafka", help="The ledger of KafkaSink, and of HandlerSink with a name, by its brokers.")
    ] = False
    ledger_topic: Annotated[str, typer.Option("--ledger-topic", help="With --kafka: the topic of the ledger.")] = (
        "penstock.spark-ledger"
    )
    delta: Annotated[
        str | None,
        typer.Option("--delta", help="The ledger of a Delta table, by its folder or address; access from variables."),
    ] = None
    iceberg: Annotated[
        str | None, typer.Option("--iceberg", help="The ledger of an Iceberg table, by its name: db.orders.")
    ] = None
    catalog: Annotated[
        str, typer.Option("--catalog", help="With --iceberg: a catalogue by its name in pyiceberg's configuration.")
    ] = "default"
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            metavar="MODULE:APP",
            help="What the sinks of an app have, each of its own query; of HandlerSink see --kafka.",
        ),
    ] = None
    target: Annotated[str | None, typer.Option("--target", help="Only what fills this table.")] = None
    bootstrap_servers: Annotated[str | None, SERVERS_OPTION] = None
    config: ClientSettings = None
    config_file: ConfigFile = None

    @property
    def client_settings(self) -> dict[str, str]:
        """The settings of the Kafka clients."""
        return client_settings(self.config, self.config_file)

    def queries(self) -> list[QueryLedger]:
        """Return what the ledger has of each query and target; raises as sinks do."""
        from penstock.spark_sink.sinks.administration import queries

        named = (self.sql, self.kafka, self.delta, self.iceberg, self.app)
        if sum(map(bool, named)) != 1:
            raise ConfigurationError(
                "name one ledger: by --sql URL, --kafka, --delta PATH, --iceberg TABLE or --app MODULE:APP"
            )
        found = queries(self._ledgers()) if self.app is None else list(_of_app(self.app))
        return [ledger for ledger in found if self.target in {None, ledger.target}]

    def _ledgers(self) -> Mapping[str, LedgerSink]:
        from penstock import spark_sink

        if self.delta is not None:
            return {self.delta: spark_sink.DeltaSink(self.delta, name=_ANY)}
        if self.iceberg is not None:
            return {self.iceberg: spark_sink.IcebergSink(self.iceberg, self.catalog, name=_ANY)}
        if self.sql is not None:
            sink = spark_sink.SqlSink(self.sql, _ANY, schema=self.schema, ledger_table=self.ledger_table)
            _require_file(self.sql)
            return {target: replace(sink, table=target) for target in sink.targets()}
        if self.bootstrap_servers is None:
            raise ConfigurationError("--bootstrap-servers is missing: the ledger of --kafka is a topic")
        settings = self.client_settings
        kafka = spark_sink.KafkaSink(self.bootstrap_servers, name=_ANY, ledger_topic=self.ledger_topic, config=settings)
        return {self.ledger_topic: kafka}


def _of_app(target: str) -> Iterator[QueryLedger]:
    """Yield what each sink of an app has of its query; those without `write_ledger` are left out."""
    from penstock.spark_sink.sinks.administration import queries

    for spec in load_app(target).sinks:
        sink: Any = spec.function
        if hasattr(sink, "write_ledger"):
            places = (getattr(sink, name, None) for name in ("table", "path", "ledger_topic"))
            query = getattr(sink, "name", None) or spec.name
            yield from (ledger for ledger in queries({next(filter(None, places), "-"): sink}) if ledger.query == query)


def _require_file(url: str) -> None:
    """Raise `PenstockError` for a file of SQLite that is not there: SQLite would make it."""
    from penstock.database_url import parse_database_url

    parsed = parse_database_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        raise PenstockError(f"there is no file {parsed.database}; correct --sql")


def located(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose first parameter is a `Location`, the options of one in its place."""
    options = inspect.signature(Location, eval_str=True).parameters

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(Location(**{name: given.pop(name) for name in options}), **given)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *options.values())]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # what typer reads options from
    return run
