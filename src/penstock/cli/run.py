"""`penstock run`: runs the user's app in one process or several, or restarts it after each change of a file."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import AppOptions, load_app
from penstock.cli.output import log_to_stderr
from penstock.errors import ConfigurationError, DevBrokerError

_MAX_RESTARTS = 10
_HANDLER_LIMIT_S = 300.0
#: With --reload: the files whose changes count, and the seconds that an app may take to stop. Its own `stop_timeout` is
#: 25 by default.
_SUFFIXES = (".py", ".toml")
_RELOAD_STOP_S = 30


def run(
    app: AppOptions,
    *,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000,
            help="Number of processes; a process that dies is restarted. Each has its number, from 1 on, in "
            "PENSTOCK_PROCESS.",
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="With --processes: limit of successive restarts of one process.")
    ] = _MAX_RESTARTS,
    reload: Annotated[
        bool, typer.Option("--reload", help="For development: restart when a file below the current folder changes.")
    ] = False,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve a page, /healthz, /readyz and /metrics at this address, for example 127.0.0.1:8400. With "
            "--processes, each further process uses the next port.",
        ),
    ] = None,
    handler_limit: Annotated[
        float, typer.Option(help="With --http: seconds in a handler after which /healthz fails.")
    ] = _HANDLER_LIMIT_S,
    show_messages: Annotated[
        bool, typer.Option("--show-messages", help="With --http: the page shows keys, headers and values of messages.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Report its state to a topic for `penstock status`, as --set report=true.")
    ] = False,
    commands: Annotated[
        bool,
        typer.Option("--commands", help="Execute commands from the topic penstock.commands, as --set commands=true."),
    ] = False,
) -> None:
    """Run an app until SIGTERM or Ctrl-C. Then it finishes its messages, commits and leaves the group.

    A second signal ends it within two seconds.

    With --processes, a process that dies is restarted after 0.5 to 30 seconds, at once if its exit code is 4. The run
    ends if a restart cannot help: at once after wrong use, with code 2; after too many successive restarts with code 1,
    or 3 if no broker ever answered. All processes end when this command ends.

    With --http, it serves a page for browsers, and endpoints for probes and Prometheus. /healthz fails when the app
    hangs. /readyz fails while it has no partition, makes no progress or stops.

    Sinks run in the Spark session that the module makes, or in the app's own session. That one is configured by
    spark-defaults.conf (in SPARK_CONF_DIR) and PYSPARK_SUBMIT_ARGS.

    Ends with 1 if it left work undone, and with 4 if half of its workers are blocked by handlers that do not return:
    then start it again.
    """
    switched_on = [*(["report=true"] if report else ()), *(["commands=true"] if commands else ())]
    with app.applied(*switched_on):
        passed_on = [] if http is None else [f"--http={http}", f"--handler-limit={handler_limit}"]
        passed_on += ["--show-messages"] if show_messages and http is not None else []
        if reload:
            if processes is not None:
                raise ConfigurationError("--reload runs one process; omit --processes")
            raise typer.Exit(run_again_on_change(app.target, passed_on))
        if processes is not None:
            from penstock.supervisor.processes import run_processes

            log_to_stderr()
            raise typer.Exit(run_processes([app.target, *passed_on], processes, max_restarts))
        _run(app.target, http, handler_limit, show_messages=show_messages)


def _run(target: str, http: str | None, handler_limit: float, *, show_messages: bool) -> None:
    app = load_app(target)
    log_to_stderr()
    if app.sinks:
        find_java_for_spark()
    if http is None:
        app.run()
        return
    from penstock.fleet import Address, HealthLimits, run_with_endpoints

    address = Address.parse(http).of_this_process()
    run_with_endpoints(app, address, HealthLimits(handler=handler_limit), show_messages=show_messages)


def run_again_on_change(target: str, passed_on: Sequence[str] = (), folder: Path | None = None) -> int:
    """Run an app until Ctrl-C or SIGTERM, and restart it after each change of a file.

    An app that ended by itself, for example because of an import error, is started at the next change. `passed_on`: the
    options of `penstock run` for each start. `ConfigurationError` if watchfiles is missing.
    """
    try:
        from watchfiles import DefaultFilter, run_process
    except ImportError as error:
        raise ConfigurationError("--reload needs the extra reload: pip install 'penstock[reload]'") from error

    class CodeAndSettings(DefaultFilter):
        def __call__(self, change: object, path: str) -> bool:
            return path.endswith(_SUFFIXES) and super().__call__(change, path)  # type: ignore[arg-type] # as it is given

    typer.echo(f"penstock: {target} starts again when a file changes here; Ctrl-C stops it", err=True)
    # -P: a file in the current folder must not shadow another module, as in `run_processes`.
    run_process(
        folder or Path.cwd(),
        target=shlex.join([sys.executable, "-P", "-m", "penstock", "run", target, *passed_on]),
        target_type="command",
        watch_filter=CodeAndSettings(),
        callback=lambda changes: typer.echo(f"penstock: {len(changes)} changed, starting again", err=True),
        sigint_timeout=_RELOAD_STOP_S,
    )
    return 0


def find_java_for_spark() -> None:
    """Set JAVA_HOME to the Java of `penstock[dev-broker]` if there is no other; `ConfigurationError` without a Java."""
    if os.environ.get("JAVA_HOME") or shutil.which("java") is not None:
        return
    from penstock.devbroker import spark_environment

    try:
        os.environ.update(spark_environment())
    except DevBrokerError as error:
        raise ConfigurationError(f"the app has sinks, which need Java for Spark: {error}") from error
