"""`penstock sink`: shows and changes the ledgers of Spark sinks."""

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

#: A placeholder for a sink's required name, which does not affect its ledger.
_ANY = "of any sink"
_DRY = "a dry run: nothing was changed"

QueryName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the query in the ledger.")]


@dataclass(frozen=True)
class Location(Reading):
    """The ledger of a command: in a SQL database, in Kafka, or in a table of Delta or Iceberg."""

    sql: Annotated[
        str | None,
        typer.Option(
            "--sql",
            envvar="PENSTOCK_SINK_SQL",
            help="The ledger in a database: sqlite:///FILE, postgresql://USER@HOST/NAME or mysql://USER@HOST/NAME. "
            "Other users of this machine can read the command line: give a password by the variable.",
        ),
    ] = None
    schema: Annotated[str | None, typer.Option("--schema", help="With --sql: the schema of table and ledger.")] = None
    ledger_table: Annotated[str, typer.Option("--ledger-table", help="With --sql: the table of the ledger.")] = (
        "penstock_ledger"
    )
    kafka: Annotated[
        bool, typer.Option("--kafka", help="The ledger of a KafkaSink, or a named HandlerSink, on these brokers.")
    ] = False
    ledger_topic: Annotated[str, typer.Option("--ledger-topic", help="With --kafka: the topic of the ledger.")] = (
        "penstock.spark-ledger"
    )
    delta: Annotated[
        str | None,
        typer.Option(
            "--delta", help="The ledger of a Delta table, by its folder or URL; credentials come from variables."
        ),
    ] = None
    iceberg: Annotated[
        str | None, typer.Option("--iceberg", help="The ledger of an Iceberg table, by its name: db.orders.")
    ] = None
    catalog: Annotated[
        str, typer.Option("--catalog", help="With --iceberg: name of the catalogue in pyiceberg's configuration.")
    ] = "default"
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            metavar="MODULE:APP",
            help="The ledgers of an app's sinks, each for its own query. For a HandlerSink use --kafka.",
        ),
    ] = None
    target: Annotated[str | None, typer.Option("--target", help="Only entries of this target table.")] = None

    def queries(self) -> list[QueryLedger]:
        """Return the ledger of each query and target; raises the errors of the sinks."""
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

        if (table := self.delta or self.iceberg) is not None:
            lake = (
                spark_sink.DeltaSink(table, name=_ANY)
                if self.delta
                else spark_sink.IcebergSink(table, self.catalog, name=_ANY)
            )
            if not lake.exists():
                raise PenstockError(f"there is no table {table}; correct {'--delta' if self.delta else '--iceberg'}")
            return {table: lake}
        if self.sql is not None:
            sink = spark_sink.SqlSink(self.sql, _ANY, schema=self.schema, ledger_table=self.ledger_table)
            _require_file(self.sql)
            return {target: replace(sink, table=target) for target in sink.targets()}
        self.admin(f"the ledger in {self.ledger_topic} cannot be read")
        in_kafka = spark_sink.KafkaSink(self.servers, name=_ANY, ledger_topic=self.ledger_topic, config=self.settings)
        return {self.ledger_topic: in_kafka}


def ls(location: Location) -> Result:
    """List the queries in a ledger, with their progress for each target."""
    rows = [_summary(query) for query in location.queries()]
    return Result([Table("queries", rows)], notes=[] if rows else ["the ledger has no query"])


def show(location: Location, *, name: QueryName) -> Result:
    """Print the ledger of a query, one row per partition."""
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
        for ledger in of_query(location.queries(), name)
        for (topic, partition), entry in sorted(ledger.entries.items())
    ]
    return Result([Table("partitions", rows)], {"query": name})


def reset(
    location: Location,
    *,
    name: QueryName,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TOPIC:PARTITION@OFFSET,...",
            help="The next offset to store, for each partition named. For an end of the logs use --forget.",
        ),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the entries instead: the query begins as its options say.")
    ] = False,
    topic: Partitions = None,
    dry_run: DryRun = False,
) -> Result:
    """Change the next offsets of a stopped query: it stores offsets again, or leaves some out. Stored rows stay."""
    from penstock.spark_sink.sinks import administration

    if forget == (to is not None):
        raise ConfigurationError("give either --to, or --forget to remove the entries")
    found = administration.chosen(administration.of_query(location.queries(), name), topic or ())
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
    location: Location,
    *,
    name: Annotated[str, typer.Argument(metavar="OLD", help="Present name of the query in the ledger.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="New name of the query.")],
    dry_run: DryRun = False,
) -> Result:
    """Rename a stopped query in its ledger."""
    from penstock.spark_sink.sinks import administration

    moved = administration.rename(location.queries(), name, new, dry_run=dry_run)
    rows = [
        {"target": ledger.target, "query": name, "becomes": new, "partitions": len(ledger.entries)} for ledger in moved
    ]
    notes = [_DRY if dry_run else "start the query with its new name and its present checkpoint"]
    return Result([Table("targets", rows)], {"changed": not dry_run}, notes=notes)


def _notes(made: Sequence[Change], *, dry_run: bool) -> Iterator[str]:
    """Yield the consequences of changes, and the next step."""
    again, left_out = sum(change.again for change in made), sum(change.left_out for change in made)
    forgotten = sum(change.after is None for change in made)
    if again:
        yield f"offsets stored again: {again}, if Kafka still has them; a sink without a key stores their rows twice"
    if left_out:
        yield f"offsets left out: {left_out}"
    if forgotten:
        yield (
            f"entries removed: {forgotten}; the query begins at the positions in its options, but at the beginning of "
            "the log in a topic that still has other entries"
        )
    if again or forgotten:
        yield (
            "start the query by start_sink or App.sink with a new checkpoint_location: the old checkpoint goes on at "
            "its own position"
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
    """Yield the ledger of each sink of an app for its query; sinks without `write_ledger` have none."""
    from penstock.spark_sink.sinks.administration import queries

    for spec in load_app(target).sinks:
        sink: Any = spec.function
        if hasattr(sink, "write_ledger"):
            places = (getattr(sink, name, None) for name in ("table", "path", "ledger_topic"))
            query = getattr(sink, "name", None) or spec.name
            yield from (ledger for ledger in queries({next(filter(None, places), "-"): sink}) if ledger.query == query)


def _require_file(url: str) -> None:
    """Raise `PenstockError` if an SQLite file does not exist: SQLite would create it."""
    from penstock.database_url import parse_database_url

    parsed = parse_database_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        raise PenstockError(f"there is no file {parsed.database}; correct --sql")
