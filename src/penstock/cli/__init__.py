"""The command line, `penstock`: one module a command, put together in `frame.py`."""

from penstock.cli.frame import main

__all__ = ["main"]
