"""`penstock run`: an app from the user's module, in one process or several, or again after each change of a file."""

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
#: With --reload: files whose changes count, and seconds that an app may take to end in order; its own `stop_timeout` is
#: 25 unless it says otherwise.
_SUFFIXES = (".py", ".toml")
_RELOAD_STOP_S = 30


def run(
    app: AppOptions,
    *,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Run it in so many processes, and start one that dies again. Each finds its number, "
            "from 1 on, in PENSTOCK_PROCESS.",
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="With --processes: how often in a row one process is started again.")
    ] = _MAX_RESTARTS,
    reload: Annotated[
        bool, typer.Option("--reload", help="For development: start it again when a file below this folder changes.")
    ] = False,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve a page, /healthz, /readyz and /metrics there, as on 127.0.0.1:8400; with --processes, each "
            "process on the next port.",
        ),
    ] = None,
    handler_limit: Annotated[
        float, typer.Option(help="With --http: seconds in a handler after which /healthz says that it hangs.")
    ] = _HANDLER_LIMIT_S,
    show_messages: Annotated[
        bool, typer.Option("--show-messages", help="With --http: the page shows keys, headers and values of messages.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Report how it does to a topic, for `penstock status`: --set report=true.")
    ] = False,
    commands: Annotated[
        bool,
        typer.Option("--commands", help="Do what the topic penstock.commands asks: --set commands=true."),
    ] = False,
) -> None:
    """Run an app until SIGTERM or Ctrl-C: it finishes what it holds, commits and leaves.

    A second signal leaves within two seconds.

    With --processes, those that die are started again after 0.5 to 30 seconds, and all end with this one. What a new
    start cannot fix ends the run: wrong use at once, with code 2; too many restarts in a row with code 1, or 3 where
    no broker ever answered. One that asks for it by code 4 is started again at once.

    With --http, a browser sees there what it does, and probes and Prometheus read it: /healthz fails when it hangs,
    /readyz while it has no partition, does not get on or stops.

    Sinks run in the Spark session that the module makes, or else in one of the app's own, which spark-defaults.conf (in
    SPARK_CONF_DIR) and PYSPARK_SUBMIT_ARGS configure.

    Ends with 1 where it left work undone, and with 4 where half of its workers are in handlers that do not return:
    start it again then.
    """
    switched_on = [*(["report=true"] if report else ()), *(["commands=true"] if commands else ())]
    with app.applied(*switched_on):
        passed_on = [] if http is None else [f"--http={http}", f"--handler-limit={handler_limit}"]
        passed_on += ["--show-messages"] if show_messages and http is not None else []
        if reload:
            if processes is not None:
                raise ConfigurationError("--reload runs one process; leave --processes out")
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
        sigint_timeout=_RELOAD_STOP_S,
    )
    return 0


def find_java_for_spark() -> None:
    """Let Spark start where only `penstock[dev-broker]` brings a Java; `ConfigurationError` where nothing does."""
    if os.environ.get("JAVA_HOME") or shutil.which("java") is not None:
        return
    from penstock.devbroker import spark_environment

    try:
        os.environ.update(spark_environment())
    except DevBrokerError as error:
        raise ConfigurationError(f"the app has sinks, which need Java for Spark: {error}") from error
