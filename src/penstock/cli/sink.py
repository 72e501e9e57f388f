"""`penstock sink`: what the ledgers of sinks have of each query, and the ways to store again or to leave out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import DryRun, Partitions, Reading, load_app
from penstock.cli.output import Result, Table
from penstock.errors import ConfigurationError, PenstockError

if TYPE_CHECKING:
    from penstock.spark_sink.sinks.administration import Change, QueryLedger
    from penstock.spark_sink.sinks.sink import LedgerSink

#: Stands where a sink asks for a name that its ledger is not found by.
_ANY = "(any)"
_DRY = "a dry run: nothing was changed"

QueryName = Annotated[str, typer.Argument(metavar="NAME", help="The query, by the name that its ledger goes by.")]


@dataclass(frozen=True)
class Location(Reading):
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
        self.admin(f"the ledger in {self.ledger_topic} cannot be read")
        given = {"ledger_topic": self.ledger_topic, "config": self.settings}
        return {self.ledger_topic: spark_sink.KafkaSink(self.servers, name=_ANY, **given)}  # type: ignore[arg-type] # as named


def ls(where: Location) -> Result:
    """List the queries that a ledger knows, and what each has stored in each target."""
    rows = [_summary(query) for query in where.queries()]
    return Result([Table("queries", rows)], notes=[] if rows else ["the ledger has no query"])


def show(where: Location, *, name: QueryName) -> Result:
    """Print what a ledger has of a query, a row for each partition."""
    from penstock.spark_sink.sinks.administration import of_query

    rows = [
        {
            "target": ledger.target,
            "topic": topic,
            "partition": partition,
            "next_offset": entry.end,
            "planned_start": entry.start,
            "batch_id": entry.batch_id,
            "query_id": entry.query_id,
            "topic_id": entry.topic_id,
        }
        for ledger in of_query(where.queries(), name)
        for (topic, partition), entry in sorted(ledger.entries.items())
    ]
    return Result([Table("partitions", rows)], {"query": name})


def reset(
    where: Location,
    *,
    name: QueryName,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TOPIC:PARTITION@OFFSET,...",
            help="The next offset to be stored, of each partition named; for an end of the logs give --forget.",
        ),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the entries instead: the query begins where its options say.")
    ] = False,
    topic: Partitions = None,
    dry_run: DryRun = False,
) -> Result:
    """Have a query that is stopped store offsets again, or leave some out; the stored rows stay as they are."""
    from penstock.spark_sink.sinks import administration

    if forget == (to is not None):
        raise ConfigurationError("give --to, or --forget to remove the entries; one of them")
    found = administration.chosen(administration.of_query(where.queries(), name), topic or ())
    wanted = None
    if to is not None:
        parts = {part for ledger in found for part in ledger.entries}
        wanted = administration.positions(to, parts)
    made = administration.changes(found, wanted)
    if not dry_run:
        administration.write(found, made)
    rows = [
        {
            "target": change.target,
            "topic": change.part[0],
            "partition": change.part[1],
            "next_offset": change.before.end,
            "becomes": None if change.after is None else change.after.end,
            "stored_again": change.again,
            "left_out": change.left_out,
        }
        for change in made
    ]
    facts = {"query": name, "changed": not dry_run}
    return Result([Table("partitions", rows)], facts, notes=list(_notes(made, dry_run=dry_run)))


def rename(
    where: Location,
    *,
    name: Annotated[str, typer.Argument(metavar="OLD", help="The query, by the name that its ledger goes by.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The name that it is to go by.")],
    dry_run: DryRun = False,
) -> Result:
    """Give what a ledger has of a query that is stopped to another name."""
    from penstock.spark_sink.sinks import administration

    moved = administration.rename(where.queries(), name, new, dry_run=dry_run)
    rows = [
        {"target": ledger.target, "query": name, "becomes": new, "partitions": len(ledger.entries)} for ledger in moved
    ]
    notes = [_DRY if dry_run else "start the query by its new name, with the checkpoint that it has"]
    return Result([Table("targets", rows)], {"changed": not dry_run}, notes=notes)


def _notes(made: Sequence[Change], *, dry_run: bool) -> Iterator[str]:
    """Return what a change means, and what is to be done next."""
    again, left_out = sum(change.again for change in made), sum(change.left_out for change in made)
    forgotten = sum(change.after is None for change in made)
    if again:
        yield f"offsets stored again: {again}, if Kafka holds them; without a key their rows are there twice then"
    if left_out:
        yield f"offsets left out: {left_out}"
    if forgotten:
        yield f"entries removed: {forgotten}; the query begins there where its options say"
    if again or forgotten:
        yield (
            "start the query by start_sink or App.sink with a new checkpoint_location: a checkpoint knows nothing of "
            "this, and goes on where it is"
        )
    yield _DRY if dry_run else f"entries written: {len(made)}"


def _summary(ledger: QueryLedger) -> dict[str, Any]:
    last = ledger.last
    return {
        "query": ledger.query,
        "target": ledger.target,
        "topics": sorted({topic for topic, _ in ledger.entries}),
        "partitions": len(ledger.entries),
        "next_offsets": sum(entry.end for entry in ledger.entries.values()),
        "batch_id": None if last is None else last.batch_id,
        "query_id": None if last is None else last.query_id,
    }


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
