"""What the commands share: errors and log lines on standard error."""

from __future__ import annotations

import logging
import os

DEBUG_VARIABLE = "PENSTOCK_DEBUG"


def debugging() -> bool:
    """Tell whether stacks are to be shown."""
    return os.environ.get(DEBUG_VARIABLE, "") not in {"", "0"}


def print_error(text: str) -> None:
    """Print a sentence on standard error, red where it is a terminal."""
    from rich.console import Console
    from rich.text import Text

    # Soft wrap: a terminal breaks lines, a log file or a pipe keeps the sentence whole.
    Console(stderr=True).print(Text(f"penstock: {text}", style="red"), soft_wrap=True)


def log_to_stderr() -> None:
    """Show log lines, unless the user's program has set logging up already."""
    logging.basicConfig(
        level=logging.DEBUG if debugging() else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
