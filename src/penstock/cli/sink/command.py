"""`penstock sink`: what the ledgers of sinks have of each query, and the ways to store again or to leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import AsJson, print_json, print_table, printable
from penstock.cli.sink.location import Location, located
from penstock.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock.spark_sink.sinks.administration import Change, QueryLedger

QueryName = Annotated[str, typer.Argument(metavar="NAME", help="The query, by the name that its ledger goes by.")]
Topics = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="TOPIC[:PARTITIONS]",
        help="Only this topic, or these partitions of it: orders:0,4-7. Repeatable. Left out: all.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be, and change nothing.")]


def sink() -> typer.Typer:
    """Return the commands for the ledgers of sinks. Each help text ends with an example."""
    app = typer.Typer(
        name="sink",
        help="Look at what Spark sinks have stored of their topics, by their ledgers; store again, or leave out.",
        epilog="Example: penstock sink ls --sql sqlite:///shop.db",
        no_args_is_help=True,
    )
    commands: tuple[tuple[Callable[..., None], str], ...] = (
        (ls, "ls --sql sqlite:///shop.db"),
        (show, "show orders --kafka --bootstrap-servers 127.0.0.1:9092"),
        (reset, "reset orders --sql sqlite:///shop.db --to orders:0=4711 --dry-run"),
        (rename, "rename orders orders-2 --delta /data/orders"),
    )
    for command, example in commands:
        app.command(epilog=f"Example: penstock sink {example}")(located(command))
    return app


def ls(where: Location, *, as_json: AsJson = False) -> None:
    """List the queries that a ledger knows, and what each has stored in each target.

    Exit codes: 0 done, 1 failed, 2 wrong use, 3 no broker.
    """
    found = [_summary(query) for query in where.queries()]
    if as_json:
        print_json(found)
        return
    _print(("query", "target", "topics", "partitions", "next offsets, sum", "last batch", "Spark query id"), found)
    if not found:
        typer.echo("the ledger has no query")


def show(where: Location, *, name: QueryName, as_json: AsJson = False) -> None:
    """Print what a ledger has of a query, a row for each partition.

    Exit codes: 0 done, 1 failed or unknown, 2 wrong use, 3 no broker.
    """
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
    if as_json:
        print_json({"query": name, "partitions": rows})
        return
    head = ("target", "topic", "partition", "next offset", "planned start", "batch", "Spark query id", "topic id")
    _print(head, rows)


def reset(
    where: Location,
    *,
    name: QueryName,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="earliest|latest|OFFSET|TOPIC:PARTITION=OFFSET,...",
            help="The next offset to be stored. earliest and latest ask the brokers.",
        ),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the entries instead: the query begins where its options say.")
    ] = False,
    topic: Topics = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Have a query that is stopped store offsets again, or leave some out; the stored rows stay as they are.

    Exit codes: 0 done, 1 failed or unknown, 2 wrong use, 3 no broker.
    """
    from penstock.spark_sink.sinks import administration

    if forget == (to is not None):
        raise ConfigurationError("give --to, or --forget to remove the entries; one of them")
    found = administration.chosen(administration.of_query(where.queries(), name), topic or ())
    wanted = None
    if to is not None:
        parts = {part for ledger in found for part in ledger.entries}
        wanted = administration.positions(to, parts, where.bootstrap_servers, where.client_settings)
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
    if as_json:
        print_json({"query": name, "changed": not dry_run, "partitions": rows})
        return
    _print(("target", "topic", "partition", "next offset", "becomes", "stored again", "left out"), rows)
    for line in _lines(made, dry_run=dry_run):
        typer.echo(line)


def rename(
    where: Location,
    *,
    name: Annotated[str, typer.Argument(metavar="OLD", help="The query, by the name that its ledger goes by.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The name that it is to go by.")],
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Give what a ledger has of a query that is stopped to another name.

    Exit codes: 0 done, 1 failed, unknown, or the new name has entries, 2 wrong use, 3 no broker.
    """
    from penstock.spark_sink.sinks import administration

    moved = administration.rename(where.queries(), name, new, dry_run=dry_run)
    if as_json:
        targets = [{"target": ledger.target, "partitions": len(ledger.entries)} for ledger in moved]
        print_json({"query": name, "becomes": new, "changed": not dry_run, "targets": targets})
        return
    for ledger in moved:
        typer.echo(
            f"entries of {printable(name)} in {printable(ledger.target)}, now of {printable(new)}: "
            f"{len(ledger.entries)}"
        )
    typer.echo(_DRY if dry_run else "start the query by its new name, with the checkpoint that it has")


_DRY = "a dry run: nothing was changed"


def _lines(made: Sequence[Change], *, dry_run: bool) -> Iterator[str]:
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


def _print(head: tuple[str, ...], rows: Iterable[dict[str, Any]]) -> None:
    print_table(head, [[_text(value) for value in row.values()] for row in rows])


def _text(value: Any) -> str:
    if isinstance(value, list):
        return printable(", ".join(value))
    return "-" if value is None else printable(str(value))
