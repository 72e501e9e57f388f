"""What the commands share: tables and ages on standard output, errors and log lines on standard error."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

DEBUG_VARIABLE = "PENSTOCK_DEBUG"

#: Characters of a line that nobody looks at in a window.
_NO_LIMIT = 100_000

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


#: The option of every command that prints what it found.
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(found: Any) -> None:
    """Print what was found as one line of JSON; control characters are escaped in it."""
    typer.echo(json.dumps(found))


def debugging() -> bool:
    """Tell whether stacks are to be shown."""
    return os.environ.get(DEBUG_VARIABLE, "") not in {"", "0"}


def print_error(text: str) -> None:
    """Print a sentence on standard error, red where it is a terminal."""
    from rich.console import Console
    from rich.text import Text

    # Soft wrap: a terminal breaks lines, a log file or a pipe keeps the sentence whole.
    Console(stderr=True).print(Text(f"penstock: {text}", style="red"), soft_wrap=True)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns that fit the terminal; nothing where there is no row.

    Into a pipe or a file each row is one line, however long. On a terminal that is too narrow for the longest words of
    all columns side by side, a row is a block of lines, `head  value`.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=_NO_LIMIT)
    longest = [
        max(len(word) for row in (head, *rows) for word in (row[column].split() or [""])) for column in range(len(head))
    ]
    if console.is_terminal and sum(longest) + 2 * len(head) > console.width:
        width = max(map(len, head))
        for row in rows:
            for name, value in zip(head, row, strict=True):
                console.print(Text(f"{name:<{width}}  {value}"), soft_wrap=True)
            console.print()
        return
    table = Table(*head, box=None)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


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


def printable(text: str) -> str:
    """Return the text with what a terminal might obey escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def log_to_stderr() -> None:
    """Show log lines, unless the user's program has set logging up already."""
    logging.basicConfig(
        level=logging.DEBUG if debugging() else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
