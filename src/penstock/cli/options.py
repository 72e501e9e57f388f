"""Options that commands share, as one parameter each: the connection to a cluster, and the app to load.

Other users of a machine can read a command line, so secrets can be given in a file or in the environment.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from penstock.cli.output import Result, debugging, show
from penstock.errors import ConfigurationError
from penstock.supervisor.stopping import until_signal

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.clients.factory import AdminClient

#: The variable with settings for all commands: a JSON object, or lines of NAME=VALUE.
CONFIG_VARIABLE = "PENSTOCK_CONFIG"
SERVERS_VARIABLE = "PENSTOCK_BOOTSTRAP_SERVERS"

ClientSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="NAME=VALUE",
        help="A setting of the Kafka clients by librdkafka's name; repeatable. Others on this machine can read the "
        f"command line: give secrets by --config-file or {CONFIG_VARIABLE}.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config-file",
        help=f"File with settings of the Kafka clients: lines of NAME=VALUE, or a JSON object. The variable "
        f"{CONFIG_VARIABLE} can have the same text. The file overrides the variable, --config overrides both.",
    ),
]

#: The largest count that an option takes: the Kafka client has no larger ones.
MOST_COUNT = (1 << 31) - 1
#: The default in seconds: a command that does one thing and ends does not wait long for brokers.
CONNECT_TIMEOUT_S = 4.0
ConnectTimeout = Annotated[
    float,
    typer.Option(
        min=0.1,
        max=3600,
        envvar="PENSTOCK_CONNECT_TIMEOUT",
        help="Seconds within which a broker must answer the first request. Raise it for a slow network.",
    ),
]
GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="The group: the name of an App.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what the command would do, and change nothing.")]
Partitions = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="TOPIC[:PARTITIONS]",
        help="Only this topic, or these partitions of it: orders:0,4-7. Repeatable. Default: all.",
    ),
]


@dataclass(frozen=True)
class Cluster:
    """The connection of a command to a cluster."""

    bootstrap_servers: Annotated[
        str | None,
        typer.Option(
            "--bootstrap-servers",
            help=f"Addresses of the brokers, HOST:PORT, separated by commas (also {SERVERS_VARIABLE}).",
        ),
    ] = None
    config: ClientSettings = None
    config_file: ConfigFile = None

    @functools.cached_property
    def named_servers(self) -> str | None:
        """The addresses of the brokers from the command line, the environment or a file; None if there are none."""
        from penstock.settings import outside

        found: str | None = self.bootstrap_servers or outside().get("bootstrap_servers")
        return found

    @property
    def servers(self) -> str:
        """The addresses of the brokers; `ConfigurationError` if there are none."""
        if self.named_servers is None:
            raise ConfigurationError(
                f"--bootstrap-servers is missing: give the brokers by it, {SERVERS_VARIABLE} or penstock.toml"
            )
        return self.named_servers

    @functools.cached_property
    def settings(self) -> dict[str, str]:
        """The settings of the Kafka clients: those of `penstock.settings`, overridden by the command line.

        `ConfigurationError` if one is not NAME=VALUE or a file cannot be read; it never contains a secret.
        """
        from penstock.settings import outside
        from penstock.settings.text import client_value

        found = {name: client_value(value) for name, value in outside().get("config", {}).items()}
        return found | _on_command_line(self.config, self.config_file)


@dataclass(frozen=True)
class Reading(Cluster):
    """The connection of a command that does one thing and ends: it does not wait long for brokers."""

    connect_timeout: ConnectTimeout = CONNECT_TIMEOUT_S

    def admin(self, what: str) -> AdminClient:
        """Return a client that has reached a broker; otherwise `BrokerConnectionError` with `what` as its beginning."""
        from penstock import clients
        from penstock.clients.topics import partition_counts
        from penstock.errors import BrokerConnectionError

        admin = clients.admin(self.servers, self.settings)
        try:
            partition_counts(admin, self.connect_timeout)
        except BrokerConnectionError as error:
            raise BrokerConnectionError(f"{what}: {error}") from error
        return admin


@dataclass(frozen=True)
class AppOptions:
    """The app that a command loads, and the options that the command line overrides."""

    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The module, and the name of the App in it.")]
    servers: Annotated[
        str | None,
        typer.Option("--bootstrap-servers", help="Addresses of the brokers, instead of the app's own."),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="Overrides an option of the App's code; repeatable."),
    ] = None
    config: ClientSettings = None
    config_file: ConfigFile = None

    @contextmanager
    def applied(self, *more: str) -> Iterator[None]:
        """Apply the command line's options to an app loaded in the block, or by a process started in it.

        `more`: further options in the form of `--set`.
        """
        from penstock.settings import on_command_line as settings_on_command_line

        values: dict[str, Any] = {}
        for setting in (*(self.settings or ()), *more):
            name, equals, value = setting.partition("=")
            if not equals or not name:
                raise ConfigurationError(f"--set takes OPTION=VALUE, but is {name!r}; write --set workers=32")
            if name == "config":
                raise ConfigurationError("--set cannot set config; give client settings by --config or --config-file")
            values[name] = value
        if self.servers is not None:
            values["bootstrap_servers"] = self.servers
        if found := _on_command_line(self.config, self.config_file):
            values["config"] = found
        with settings_on_command_line(values):
            yield

    def load(self) -> App:
        """Import the app with the command line's options. Raises the errors of `load_app`."""
        with self.applied():
            return load_app(self.target)


def as_command(function: Callable[..., Any]) -> Callable[..., None]:
    """Return the command for typer.

    A parameter whose type is one of the classes above becomes one option per field. If the function returns or yields
    `Result`, the command prints it and has the option `--json`.
    """
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    bundles: dict[str, Any] = {
        parameter.name: parameter.annotation
        for parameter in parameters
        if dataclasses.is_dataclass(parameter.annotation)
    }
    prints = "Result" in str(function.__annotations__.get("return"))
    options = [parameter for parameter in parameters if parameter.name not in bundles]
    for bundle in bundles.values():
        hints = get_type_hints(bundle, include_extras=True)
        fields = inspect.signature(bundle).parameters.values()
        options += [field.replace(annotation=hints[field.name]) for field in fields]
    if prints:
        as_json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
        options.append(inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=as_json))

    @functools.wraps(function)
    def run(*, as_json: bool = False, **arguments: Any) -> None:
        for name, bundle in bundles.items():
            arguments[name] = bundle(**{field.name: arguments.pop(field.name) for field in dataclasses.fields(bundle)})
        returned = function(**arguments)
        if isinstance(returned, Result):
            show(returned, as_json=as_json)
        elif prints:
            with until_signal():
                for result in returned:
                    show(result, as_json=as_json)

    keywords = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined] # typer reads the options from it
    return run


def _on_command_line(config: list[str] | None, file: Path | None) -> dict[str, str]:
    """Return the Kafka client settings of the command line: those of the file, overridden by `--config`."""
    from penstock.settings.text import client_settings_text, name_and_value

    found: dict[str, str] = {}
    if file is not None:
        try:
            found = client_settings_text(file.read_text(encoding="utf-8"), f"--config-file {file}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--config-file {file} cannot be read: {type(error).__name__}") from error
    return found | dict(name_and_value(text, "--config", number) for number, text in enumerate(config or (), 1))


def load_app(target: str) -> App:
    """Import the app `target` (`module:name`), with the current folder on the import path.

    `ConfigurationError`: there is no such module or name, the module failed, or the object is no `penstock.App`.
    """
    from penstock.app import App

    module_name, _, name = target.partition(":")
    if not module_name or not name or module_name.startswith("."):
        raise ConfigurationError(f"{target!r} does not name an app; write MODULE:APP, as in orders:app")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
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
    place = _line_of_user(error)
    if isinstance(error, ConfigurationError):
        return ConfigurationError(f"{error}{place}")
    return ConfigurationError(
        f"module {module_name} could not be imported: {type(error).__name__}: {error}{place}; correct it, or see the "
        "stack with penstock --debug"
    )


def _line_of_user(error: Exception) -> str:
    """Return the user's line that failed, not a line of penstock or the standard library below it; empty if unknown."""
    library, penstock = Path(sysconfig.get_path("stdlib")), Path(__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        is_library = library in file.parents and not {"site-packages", "dist-packages"} & set(file.parts)
        if not (is_library or penstock in file.parents or frame.filename.startswith("<")):
            return f" ({file.name}, line {frame.lineno})"
    return ""  # for example an error of syntax, whose text has the line
