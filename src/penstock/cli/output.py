"""What the commands share: tables and ages on standard output, errors and log lines on standard error."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

DEBUG_VARIABLE = "PENSTOCK_DEBUG"

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


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
    """Print rows in columns, the first column never broken; nothing where there is no row."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(*head, box=None)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


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
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def log_to_stderr() -> None:
    """Show log lines, unless the user's program has set logging up already."""
    logging.basicConfig(
        level=logging.DEBUG if debugging() else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
