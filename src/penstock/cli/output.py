"""What commands print: what was found as tables and sentences, or as one JSON object; errors on standard error.

A command returns a `Result`, which is data. How a value looks in a table says the name of its field: `age_s` is an age,
`at_ms` a time of the epoch; JSON has the plain value.
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

DEBUG_VARIABLE = "PENSTOCK_DEBUG"

#: Stands for what is not known.
NONE = "-"
#: Characters of a line that nobody looks at in a window.
_NO_LIMIT = 100_000
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


@dataclass(frozen=True, slots=True)
class Table:
    """A list of what was found, by the name that it has in JSON.

    Args:
        name: the key of the list in JSON.
        rows: mappings or dataclasses, all with the same fields.
        columns: the fields that the printed table shows; all when left out. JSON has all fields.
        blocks: print each row as a block, a line for each field that has a value, below the first; as a terminal shows
            a table that is too wide for it.
        limit: print so many rows at most, and say how many there are.
    """

    name: str
    rows: Sequence[Any]
    columns: Sequence[str] = ()
    blocks: bool = False
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a command found or did.

    Args:
        tables: what is printed as tables, and a list each in JSON.
        facts: the other fields of the JSON object.
        lines: what is printed of the facts, before the tables.
        notes: sentences below the tables, in JSON too.
        failure: what is raised once all of this is printed.
        code: the exit code once all of this is printed.
        clear: whether a terminal is cleared first.
    """

    tables: Sequence[Table] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()
    notes: Sequence[str] = ()
    failure: Exception | None = None
    code: int = 0
    clear: bool = False


def show(result: Result, *, as_json: bool) -> None:
    """Print what a command found, then raise its failure, or leave with its code."""
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
    """Return what JSON has for a value that it does not know."""
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
    """Return a value as a table shows it; what a terminal might obey is escaped."""
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
    """Print rows in columns that fit the terminal; nothing where there is no row.

    Into a pipe or a file each row is one line, however long. Returns False where a terminal is too narrow for the
    longest words of all columns side by side: then nothing is printed.
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
    """Print a sentence on standard error, red where it is a terminal; as JSON, with its class and the exit code."""
    from rich.console import Console
    from rich.text import Text

    if as_json:
        error = {"kind": kind, "text": text, "exit_code": exit_code}
        typer.echo(json.dumps({"error": error}), err=True)
        return
    # Soft wrap: a terminal breaks lines, a log file or a pipe keeps the sentence whole.
    Console(stderr=True).print(Text(f"penstock: {text}", style="red"), soft_wrap=True)


def debugging() -> bool:
    """Tell whether stacks are to be shown."""
    return os.environ.get(DEBUG_VARIABLE, "") not in {"", "0"}


def log_to_stderr() -> None:
    """Show log lines, unless the user's program has set logging up already."""
    logging.basicConfig(
        level=logging.DEBUG if debugging() else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def age_text(seconds: float) -> str:
    """Return an age in its two largest units."""
    whole = int(seconds)
    if whole < _MINUTE_S:
        return f"{seconds:.1f} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"


def time_text(milliseconds: int) -> str:
    """Return a time of the epoch in UTC, to the second; "-" for what is none."""
    if milliseconds < 0:
        return NONE
    try:
        return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # a producer may claim any time
        return NONE


def content_text(value: str | bytes | None) -> str:
    """Return bytes as text where they are text, else as hexadecimal digits; what a terminal might obey is escaped."""
    if value is None:
        return "(null)"
    if isinstance(value, str):
        return printable(value)
    try:
        return printable(value.decode())
    except UnicodeDecodeError:
        return f"0x{value.hex()}"


def printable(text: str) -> str:
    """Return the text with what a terminal might obey escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 member", "2 members"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
