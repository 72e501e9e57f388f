"""The command line, `penstock`: one module per command, assembled in `frame.py`. It needs the extra `cli`."""

import sys

from penstock.supervisor.exit_codes import EXIT_USAGE

__all__ = ["main"]


def main() -> None:
    """Run the command line, or name the extra to install if its packages are missing."""
    try:
        from penstock.cli import frame
    except ModuleNotFoundError as error:
        if error.name not in {"rich", "typer"}:
            raise
        sys.stderr.write("penstock: the command line needs more packages; run: pip install 'penstock[cli]'\n")
        sys.exit(EXIT_USAGE)
    frame.main()
