"""`penstock run --reload`: an app in a process of its own, which ends in order and restarts when a file changes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from penstock.errors import ConfigurationError

#: Files whose changes count: code and settings.
_SUFFIXES = (".py", ".toml")
#: Seconds that an app may take to end in order; its own `stop_timeout` is 25 unless it says otherwise.
_STOP_S = 30


def run_again_on_change(target: str, passed_on: Sequence[str] = (), folder: Path | None = None) -> int:
    """Run an app until Ctrl-C or SIGTERM, again after each change; `ConfigurationError` where watchfiles is missing.

    An app that ended by itself, as one that could not be imported does, is started at the next change. `passed_on`: the
    options of `penstock run` for each start.
    """
    try:
        from watchfiles import DefaultFilter, run_process
    except ImportError as error:
        raise ConfigurationError("--reload needs the extra reload: pip install 'penstock[reload]'") from error

    class CodeAndSettings(DefaultFilter):
        def __call__(self, change: object, path: str) -> bool:
            return path.endswith(_SUFFIXES) and super().__call__(change, path)  # type: ignore[arg-type] # as it is given

    typer.echo(f"penstock: {target} starts again when a file changes here; Ctrl-C stops it", err=True)
    run_process(
        folder or Path.cwd(),
        target=shlex.join([sys.executable, "-m", "penstock", "run", target, *passed_on]),
        target_type="command",
        watch_filter=CodeAndSettings(),
        callback=lambda changes: typer.echo(f"penstock: {len(changes)} changed, starting again", err=True),
        sigint_timeout=_STOP_S,
    )
    return 0
