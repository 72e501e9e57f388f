"""`penstock run`: an app from the user's module."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.app_options import AppServers, Settings, Target, app_settings
from penstock.cli.connection import ClientSettings, ConfigFile
from penstock.cli.output import debugging, log_to_stderr
from penstock.errors import ConfigurationError, DevBrokerError
from penstock.supervisor.lifeline import end_with_parent

if TYPE_CHECKING:
    from penstock.app import App

_MAX_RESTARTS = 10
_HANDLER_LIMIT_S = 300.0


def run(  # noqa: PLR0917 - typer reads options from parameters; nobody calls this by position
    target: Target,
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
    servers: AppServers = None,
    settings: Settings = None,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
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
) -> None:
    """Run an app until SIGTERM or Ctrl-C: it finishes what it holds, commits and leaves.

    A second signal leaves within two seconds.

    With --processes, those that die are started again after 0.5 to 30 seconds, and all end with this one. What a new
    start cannot mend ends the run: wrong use at once, with code 2; too many restarts in a row with code 1, or 3 where
    no broker ever answered.

    With --http, a browser sees there what it does, and probes and Prometheus read it: /healthz fails when it hangs,
    /readyz while it has no partition, does not get on or stops.

    Sinks run in the Spark session that the module makes, or else in one of the app's own, which spark-defaults.conf (in
    SPARK_CONF_DIR) and PYSPARK_SUBMIT_ARGS configure.

    Exit codes: 0 ended in order, 1 failed or left work undone, 2 wrong use, 3 no broker.
    """
    switched_on = ["report=true"] if report else []
    with app_settings(servers, [*(settings or ()), *switched_on], config, config_file):
        if reload:
            if processes is not None:
                raise ConfigurationError("--reload runs one process; leave --processes out")
            from penstock.cli.reload import run_again_on_change

            raise typer.Exit(run_again_on_change(target))
        if processes is not None:
            from penstock.supervisor.processes import run_processes

            log_to_stderr()
            passed_on = [] if http is None else [f"--http={http}", f"--handler-limit={handler_limit}"]
            passed_on += ["--show-messages"] if show_messages and http is not None else []
            raise typer.Exit(run_processes([target, *passed_on], processes, max_restarts))
        _run(target, http, handler_limit, show_messages=show_messages)


def _run(target: str, http: str | None, handler_limit: float, *, show_messages: bool) -> None:
    end_with_parent()
    app = load_app(target)
    log_to_stderr()
    if app.sinks:
        find_java_for_spark()
    if http is None:
        app.run()
        return
    from penstock.dashboard import Address, HealthLimits, run_with_endpoints

    address = Address.parse(http).of_this_process()
    run_with_endpoints(app, address, HealthLimits(handler=handler_limit), show_messages=show_messages)


def find_java_for_spark() -> None:
    """Let Spark start where only `penstock[dev-broker]` brings a Java; `ConfigurationError` where nothing does."""
    if os.environ.get("JAVA_HOME") or shutil.which("java") is not None:
        return
    from penstock.devbroker import spark_environment

    try:
        os.environ.update(spark_environment())
    except DevBrokerError as error:
        raise ConfigurationError(f"the app has sinks, which need Java for Spark: {error}") from error


def load_app(target: str) -> App:
    """Import the app that `target` (`module:name`) names, with the current folder on the import path.

    `ConfigurationError`: no such module or name, the module failed, or what it names is no `penstock.App`.
    """
    from penstock.app import App

    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ConfigurationError(f"{target!r} does not name an app; write MODULE:APP, as in orders:app")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        if debugging():
            raise
        raise _import_failed(module_name, error) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"module {module_name} has no {name!r}; correct the name after the colon")
        found = getattr(found, part)
    if not isinstance(found, App):
        raise ConfigurationError(
            f"{target} is a {type(found).__name__}, not a penstock.App; name the variable that holds the app"
        )
    return found


def _import_failed(module_name: str, error: Exception) -> ConfigurationError:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
        return ConfigurationError(
            f"no module {error.name} in {Path.cwd()} or among the installed packages; "
            "go to the folder that holds it, or correct the name"
        )
    place = traceback.extract_tb(error.__traceback__)[-1]
    return ConfigurationError(
        f"module {module_name} could not be imported: {type(error).__name__}: {error} "
        f"({Path(place.filename).name}, line {place.lineno}); correct it, or see the stack with penstock --debug"
    )
