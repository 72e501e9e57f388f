"""The frame of the command line: the list of commands, and the handling of errors.

Commands import the library inside their functions, so that `penstock --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from penstock.cli import dlq, offsets, sink, topics, tx
from penstock.cli.audit import audit
from penstock.cli.broker import broker
from penstock.cli.check import check
from penstock.cli.coordinator import coordinator
from penstock.cli.dashboard import dashboard
from penstock.cli.demo import demo
from penstock.cli.doctor import doctor
from penstock.cli.explain import explain
from penstock.cli.lag import lag
from penstock.cli.new import new
from penstock.cli.options import as_command
from penstock.cli.output import DEBUG_VARIABLE, debugging, print_error
from penstock.cli.run import run
from penstock.cli.status import status
from penstock.errors import BrokerConnectionError, ConfigurationError, PenstockError, WorkersBlockedError
from penstock.settings.sources import PROFILE_VARIABLE
from penstock.supervisor.exit_codes import EXIT_CONNECTION, EXIT_FAILED, EXIT_RESTART, EXIT_USAGE

_TRANSACTION = "018f4e9c-5c1e-7abc-8def-0123456789ab"

#: Each command and its example, which begins with the command's name.
_COMMANDS: tuple[tuple[Callable[..., Any], str], ...] = (
    (demo, "demo --no-spark"),
    (new, "new order-worker"),
    (run, "run orders:app"),
    (check, "check orders:app"),
    (topics.create, "topics create orders:app --dry-run"),
    (explain, "explain"),
    (status, "status sms --watch"),
    (dashboard, "dashboard --bootstrap-servers 127.0.0.1:9092"),
    (lag, "lag sms"),
    (audit, "audit --follow"),
    (coordinator, "coordinator --bootstrap-servers 127.0.0.1:9092"),
    (broker, "broker --port 9092"),
    (doctor, "doctor --bootstrap-servers 127.0.0.1:9092"),
    (offsets.ls, "offsets ls sms"),
    (offsets.reset, "offsets reset sms --to 2026-01-31T08:00:00Z --topic orders --dry-run"),
    (offsets.skip, "offsets skip sms orders:3@1204"),
    (dlq.ls, "dlq ls dlq.orders"),
    (dlq.show, "dlq show dlq.orders:0@17 --payload"),
    (dlq.replay, "dlq replay dlq.orders --where exception=TimeoutError --dry-run"),
    (tx.ls, "tx ls --older-than 3600"),
    (tx.show, f"tx show {_TRANSACTION} --payload"),
    (tx.commit, f"tx commit {_TRANSACTION} --reason 'the order is in the books'"),
    (tx.rollback, f"tx rollback {_TRANSACTION} --reason 'the order was cancelled'"),
    (tx.discard, f"tx discard {_TRANSACTION}"),
    (tx.resume, f"tx resume {_TRANSACTION}"),
    (tx.create_tables, "tx create-tables --sql sqlite:///shop.db --dry-run"),
    (sink.ls, "sink ls --sql sqlite:///shop.db"),
    (sink.show, "sink show orders --kafka --bootstrap-servers 127.0.0.1:9092"),
    (sink.reset, "sink reset orders --sql sqlite:///shop.db --to orders:0@4711 --dry-run"),
    (sink.rename, "sink rename orders orders-2 --delta /data/orders"),
)
#: The help of each group of commands; its example is that of its first command.
_GROUPS = {
    "topics": "Create the topics that an app needs.",
    "offsets": "Show and change a group's offsets, or skip one message.",
    "dlq": "Show dead letters, and send them back to work.",
    "tx": "Show pending transactions, decide them, and bring discarded ones back.",
    "sink": "Show the ledgers of Spark sinks, and change them: store offsets again, or leave some out.",
}


def frame() -> typer.Typer:
    """Return the command line with all commands. Each help text ends with an example."""
    app = typer.Typer(
        name="penstock",
        help="Ordered, concurrent consumption of Kafka with transactional messages and Spark sinks.",
        epilog="Exit codes of all commands: 0 success, 1 failed, 2 wrong use, 3 no broker, 4 start it again. "
        "Example: penstock demo",
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # main() prints errors as sentences
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    groups: dict[str, typer.Typer] = {}
    for function, example in _COMMANDS:
        first, second, *_ = (*example.split(), "")
        epilog = f"Example: penstock {example}"
        if first in _GROUPS and first not in groups:
            groups[first] = typer.Typer(name=first, help=_GROUPS[first], epilog=epilog, no_args_is_help=True)
        parent, name = (groups[first], second) if first in groups else (app, first)
        parent.command(name, epilog=epilog)(as_command(function))
    for group in groups.values():
        app.add_typer(group)
    return app


def main() -> None:
    """Run the command line and exit the process: 0 success, 1 failed, 2 wrong use, 3 no broker, 4 start it again."""
    as_json = "--json" in sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Characters that the terminal or the file cannot have must not end a command.
            stream.reconfigure(errors="backslashreplace")
    try:
        # Typer prints an error of usage in a frame and exits; with JSON it must raise the error.
        code = frame()(prog_name="penstock", standalone_mode=not as_json)
    except Exception as error:
        if debugging():
            raise
        code = _exit_code(error)
        print_error(_sentence(error), kind=type(error).__name__, exit_code=code, as_json=as_json)
    sys.exit(code or 0)


def _exit_code(error: Exception) -> int:
    if isinstance(error, ConfigurationError) or _is_usage(error):
        return EXIT_USAGE
    if isinstance(error, BrokerConnectionError):
        return EXIT_CONNECTION
    if isinstance(error, WorkersBlockedError):
        return EXIT_RESTART
    return EXIT_FAILED


def _sentence(error: Any) -> str:
    """Return the text of an error; an unexpected one gets its class and the option that shows its stack."""
    if isinstance(error, PenstockError):
        return str(error)
    if _is_usage(error):
        return f"{error.format_message().removesuffix('.')}; see --help"
    return f"unexpected {type(error).__name__}: {error}; run it again with `penstock --debug` to see its stack"


def _is_usage(error: Exception) -> bool:
    """Return whether it is typer's error of usage, whose class has no public name."""
    return hasattr(error, "format_message")


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"penstock {version('penstock')}")
        raise typer.Exit


def _options(
    debug: Annotated[
        bool, typer.Option("--debug", help=f"Show the stack of an error, and log more (also {DEBUG_VARIABLE}=1).")
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(help=rf"Use the table \[profiles.NAME] of penstock.toml as well (also {PROFILE_VARIABLE}=NAME)."),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # Variables, because child processes need them too.
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"
    if profile is not None:
        os.environ[PROFILE_VARIABLE] = profile
