"""The renderer of commands: tables and sentences, or one JSON object; errors on standard error.

A command returns a `Result`, which is data. The name of a field decides how a table shows its value: `age_s` is an age,
`at_ms` a time since the epoch. JSON has the plain value.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import typer

from penstock.places import age_text, printable

DEBUG_VARIABLE = "PENSTOCK_DEBUG"

#: The text of an unknown value.
NONE = "-"
#: The line length in characters if the output is no terminal.
_NO_LIMIT = 100_000


@dataclass(frozen=True, slots=True)
class Table:
    """A list of a result.

    Args:
        name: the key of the list in JSON.
        rows: mappings or dataclasses, all with the same fields.
        columns: the fields of the printed table; all if empty. JSON has all fields.
        blocks: print each row as a block with one line per field that has a value. A table that is too wide for the
            terminal is printed like that too.
        limit: the number of rows to print; the number of the others is printed below.
    """

    name: str
    rows: Sequence[Any]
    columns: Sequence[str] = ()
    blocks: bool = False
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a command.

    Args:
        tables: the tables; in JSON each is a list.
        facts: the other fields of the JSON object.
        lines: the facts as printed before the tables.
        notes: sentences below the tables, and a list in JSON.
        failure: the error to raise after printing.
        code: the exit code after printing.
        clear: whether to clear the terminal first.
    """

    tables: Sequence[Table] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()
    notes: Sequence[str] = ()
    failure: Exception | None = None
    code: int = 0
    clear: bool = False


def show(result: Result, *, as_json: bool) -> None:
    """Print a result, then raise its failure, or exit with its code."""
    if as_json:
        typer.echo(json.dumps(_as_json(result), default=_plain))
    else:
        _print(result)
    if result.failure is not None:
        raise result.failure
    if result.code:
        raise typer.Exit(result.code)


def _as_json(result: Result) -> dict[str, Any]:
    lists = {table.name: [_fields(row) for row in table.rows] for table in result.tables}
    return {**result.facts, **lists, **({"notes": list(result.notes)} if result.notes else {})}


def _plain(value: Any) -> Any:
    """Return a JSON value for a type that JSON lacks."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, Enum):
        return value.value
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _fields(row: Any) -> dict[str, Any]:
    return dict(row) if isinstance(row, Mapping) else {it.name: getattr(row, it.name) for it in dataclasses.fields(row)}


def _print(result: Result) -> None:
    from rich.console import Console

    if result.clear:
        Console().clear()
    for line in result.lines:
        typer.echo(printable(line))
    for table in result.tables:
        rows = [_fields(row) for row in table.rows][: table.limit]
        columns = table.columns or tuple(rows[0] if rows else ())
        cells = [[_text(name, row[name]) for name in columns] for row in rows]
        if table.blocks or not _print_table([_head(name) for name in columns], cells):
            for row in rows:
                typer.echo("\n".join(_block({name: row[name] for name in columns})))
        if len(rows) < len(table.rows):
            typer.echo(f"{len(table.rows) - len(rows)} more are not shown; see them with --limit {len(table.rows)}")
    for note in result.notes:
        typer.echo(printable(note))


def _head(name: str) -> str:
    return name.removesuffix("_s").removesuffix("_ms").replace("_", " ")


def _text(name: str, value: Any) -> str:
    """Return the text of a value in a table, with control characters escaped."""
    if value is None or value in ((), []):
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(_text("", item) for item in value)
    if name.endswith("_ms"):
        return time_text(value)
    if name.endswith("_s"):
        return age_text(value)
    return printable(str(value.value if isinstance(value, Enum) else value))


def _block(row: Mapping[str, Any]) -> Iterator[str]:
    (first, title), *others = row.items()
    yield _text(first, title)
    for name, value in others:
        if value is None or value in ((), []):
            continue
        lines = [_text("", item) for item in value] if isinstance(value, list | tuple) else [_text(name, value)]
        yield from (f"  {'' if number else _head(name):<11} {line}" for number, line in enumerate(lines))


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Print rows as a table that fits the terminal; without rows print nothing.

    In a pipe or a file each row is one line of any length. Returns False, and prints nothing, if the terminal is too
    narrow for the longest words of all columns side by side.
    """
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    if not rows:
        return True
    console = Console()
    longest = [
        max(len(word) for text in column for word in text.split() or [""]) for column in zip(head, *rows, strict=True)
    ]
    if not console.is_terminal:
        console = Console(width=_NO_LIMIT)
    elif sum(longest) + 2 * len(head) > console.width:
        return False
    table = RichTable(*head, box=None)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    return True


def print_error(text: str, *, kind: str = "", exit_code: int = 0, as_json: bool = False) -> None:
    """Print an error on standard error, red on a terminal; as JSON with its class and the exit code."""
    from rich.console import Console
    from rich.text import Text

    if as_json:
        error = {"kind": kind, "text": text, "exit_code": exit_code}
        typer.echo(json.dumps({"error": error}), err=True)
        return
    # Soft wrap: the terminal breaks the line; in a log file or a pipe it stays one line.
    Console(stderr=True).print(Text(f"penstock: {text}", style="red"), soft_wrap=True)


def debugging() -> bool:
    """Return whether to show the stacks of errors."""
    return os.environ.get(DEBUG_VARIABLE, "") not in {"", "0"}


def log_to_stderr() -> None:
    """Print log lines on standard error, unless the user's program configured logging."""
    logging.basicConfig(
        level=logging.DEBUG if debugging() else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def time_text(milliseconds: int) -> str:
    """Return a time since the epoch in UTC, to the second; "-" if it is no valid time."""
    if milliseconds < 0:
        return NONE
    try:
        return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # a producer may claim any time
        return NONE


def content_text(value: str | bytes | None) -> str:
    """Return bytes as text, or as hexadecimal digits if they are no UTF-8; control characters are escaped."""
    if value is None:
        return "(null)"
    if isinstance(value, str):
        return printable(value)
    try:
        return printable(value.decode())
    except UnicodeDecodeError:
        return f"0x{value.hex()}"
