"""`penstock run`: an app from the user's module."""

from __future__ import annotations

import os
import shutil
from typing import Annotated

import typer

from penstock.cli.options.app_options import AppServers, Settings, Target, app_settings, load_app
from penstock.cli.options.connection import ClientSettings, ConfigFile
from penstock.cli.output import log_to_stderr
from penstock.errors import ConfigurationError, DevBrokerError
from penstock.supervisor.lifeline import end_with_parent

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
    commands: Annotated[
        bool,
        typer.Option("--commands", help="Do what it is told in the topic penstock.commands: --set commands=true."),
    ] = False,
) -> None:
    """Run an app until SIGTERM or Ctrl-C: it finishes what it holds, commits and leaves.

    A second signal leaves within two seconds.

    With --processes, those that die are started again after 0.5 to 30 seconds, and all end with this one. What a new
    start cannot mend ends the run: wrong use at once, with code 2; too many restarts in a row with code 1, or 3 where
    no broker ever answered. One that asks for it by code 4 is started again at once.

    With --http, a browser sees there what it does, and probes and Prometheus read it: /healthz fails when it hangs,
    /readyz while it has no partition, does not get on or stops.

    Sinks run in the Spark session that the module makes, or else in one of the app's own, which spark-defaults.conf (in
    SPARK_CONF_DIR) and PYSPARK_SUBMIT_ARGS configure.

    Exit codes: 0 ended in order, 1 failed or left work undone, 2 wrong use, 3 no broker, 4 to be started again: half of
    the workers are in handlers that do not return.
    """
    switched_on = [*(["report=true"] if report else ()), *(["commands=true"] if commands else ())]
    with app_settings(servers, [*(settings or ()), *switched_on], config, config_file):
        passed_on = [] if http is None else [f"--http={http}", f"--handler-limit={handler_limit}"]
        passed_on += ["--show-messages"] if show_messages and http is not None else []
        if reload:
            if processes is not None:
                raise ConfigurationError("--reload runs one process; leave --processes out")
            from penstock.cli.run.reload import run_again_on_change

            raise typer.Exit(run_again_on_change(target, passed_on))
        if processes is not None:
            from penstock.supervisor.processes import run_processes

            log_to_stderr()
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
    from penstock.fleet import Address, HealthLimits, run_with_endpoints

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
