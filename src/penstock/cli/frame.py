"""The frame of the command line: its commands, and what becomes of an error.

Commands import what they run inside their functions, so that `penstock --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from penstock.cli.broker import broker
from penstock.cli.check.command import check
from penstock.cli.coordinator import coordinator
from penstock.cli.dashboard import dashboard
from penstock.cli.demo import demo
from penstock.cli.dlq.command import dlq
from penstock.cli.doctor import doctor
from penstock.cli.new.command import new
from penstock.cli.offsets.command import offsets
from penstock.cli.offsets.lag import lag
from penstock.cli.options.connection import servers_from_settings
from penstock.cli.output import DEBUG_VARIABLE, debugging, print_error
from penstock.cli.run.command import run
from penstock.cli.sink.command import sink
from penstock.cli.status.audit import audit
from penstock.cli.status.command import status
from penstock.cli.status.explain import explain
from penstock.cli.tx.command import tx
from penstock.errors import BrokerConnectionError, ConfigurationError, PenstockError, WorkersBlockedError
from penstock.settings.sources import PROFILE_VARIABLE
from penstock.supervisor.exit_codes import EXIT_CONNECTION, EXIT_FAILED, EXIT_RESTART, EXIT_USAGE

_COMMANDS: tuple[tuple[Callable[..., Any], str], ...] = (
    (demo, "penstock demo --no-spark"),
    (new, "penstock new order-worker"),
    (run, "penstock run orders:app"),
    (check, "penstock check orders:app"),
    (explain, "penstock explain"),
    (status, "penstock status sms --watch"),
    (dashboard, "penstock dashboard --bootstrap-servers 127.0.0.1:9092"),
    (lag, "penstock lag sms"),
    (audit, "penstock audit --follow"),
    (coordinator, "penstock coordinator --bootstrap-servers 127.0.0.1:9092"),
    (broker, "penstock broker --port 9092"),
    (doctor, "penstock doctor --bootstrap-servers 127.0.0.1:9092"),
)


def frame() -> typer.Typer:
    """Return the command line with all its commands. Each help text ends with an example."""
    app = typer.Typer(
        name="penstock",
        help="Ordered, concurrent consumption of Kafka with transactional messages and Spark sinks.",
        epilog="Exit codes: 0 all went well, 1 failed, 2 wrong use, 3 no broker, 4 start it again. "
        "Example: penstock demo",
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # errors are printed as sentences, by main()
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for command, example in _COMMANDS:
        app.command(epilog=f"Example: {example}")(command)
    app.add_typer(offsets())
    app.add_typer(dlq())
    app.add_typer(tx())
    app.add_typer(sink())
    return app


def main() -> None:
    """Run the command line and leave the process: 0 all went well, 1 failed, 2 wrong use, 3 no broker, 4 restart it."""
    try:
        frame()(prog_name="penstock")
    except Exception as error:
        if debugging():
            raise
        print_error(sentence(error))
        sys.exit(exit_code(error))


def exit_code(error: Exception) -> int:
    """Return the exit code an error stands for."""
    if isinstance(error, ConfigurationError):
        return EXIT_USAGE
    if isinstance(error, BrokerConnectionError):
        return EXIT_CONNECTION
    if isinstance(error, WorkersBlockedError):
        return EXIT_RESTART
    return EXIT_FAILED


def sentence(error: Exception) -> str:
    """Return what an error says; one that is not ours gets its kind, and where to learn more."""
    if isinstance(error, PenstockError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error}; run it again with `penstock --debug` to see where"


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"penstock {version('penstock')}")
        raise typer.Exit


def _options(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help=f"Show the stack of an error, and log more (also {DEBUG_VARIABLE}=1).")
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(help=rf"Take the table \[profiles.NAME] of penstock.toml, too (also {PROFILE_VARIABLE}=NAME)."),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    # Both are seen by the processes we start, too.
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"
    if profile is not None:
        os.environ[PROFILE_VARIABLE] = profile
    context.default_map = _defaults(context.command)


def _defaults(command: Any) -> dict[str, Any]:
    """Return, for each command, what it takes from settings where the command line says nothing; read when asked."""
    return {
        name: _defaults(subcommand) if hasattr(subcommand, "commands") else {"bootstrap_servers": servers_from_settings}
        for name, subcommand in command.commands.items()
    }
