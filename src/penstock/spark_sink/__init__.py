"""Spark's half of penstock: a committed-only Kafka source without jars, and exactly-once SQL sinks.

Nothing of Spark, Arrow or SQLAlchemy is imported until one of the names below is used, so that a program
which only consumes or sends needs none of them.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock.spark_sink.errors import DataLossError, SchemaMismatchError, SessionStoppedError
    from penstock.spark_sink.ledger.rules import LedgerEntry
    from penstock.spark_sink.progress.listener import ProgressListener
    from penstock.spark_sink.progress.statistics import SinkPartition, SinkState, SinkStatistics
    from penstock.spark_sink.queries.query import start_sink
    from penstock.spark_sink.queries.sink_specs import RowsFunction, SinkFunction, SinkSpec
    from penstock.spark_sink.sinks.delta_sink import DeltaSink
    from penstock.spark_sink.sinks.handlers.report import BatchReport, TaskReport
    from penstock.spark_sink.sinks.handlers.sink import HandlerSink
    from penstock.spark_sink.sinks.iceberg_sink import IcebergSink
    from penstock.spark_sink.sinks.kafka_sink import KafkaSink
    from penstock.spark_sink.sinks.sql.dead_letters import DeadLetters
    from penstock.spark_sink.sinks.sql.rows import Rejected
    from penstock.spark_sink.sinks.sql.sink import SqlSink
    from penstock.spark_sink.source.decode.decode import decode
    from penstock.spark_sink.source.plan import Offsets, TopicPartition
    from penstock.spark_sink.source.source import register

#: Module of this package -> the public names that it defines.
_HOMES = {
    "errors": ("DataLossError", "SchemaMismatchError", "SessionStoppedError"),
    "ledger.rules": ("LedgerEntry",),
    "progress.listener": ("ProgressListener",),
    "progress.statistics": ("SinkPartition", "SinkState", "SinkStatistics"),
    "queries.query": ("start_sink",),
    "queries.sink_specs": ("RowsFunction", "SinkFunction", "SinkSpec"),
    "sinks.delta_sink": ("DeltaSink",),
    "sinks.handlers.report": ("BatchReport", "TaskReport"),
    "sinks.handlers.sink": ("HandlerSink",),
    "sinks.iceberg_sink": ("IcebergSink",),
    "sinks.kafka_sink": ("KafkaSink",),
    "sinks.sql.dead_letters": ("DeadLetters",),
    "sinks.sql.rows": ("Rejected",),
    "sinks.sql.sink": ("SqlSink",),
    "source.decode.decode": ("decode",),
    "source.plan": ("Offsets", "TopicPartition"),
    "source.source": ("register",),
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}

#: Third-party package -> the extra of penstock that brings it.
_EXTRAS = {
    "pyspark": "spark",
    "pyarrow": "spark",
    "sqlalchemy": "sql",
    "psycopg": "sql",
    "deltalake": "delta",
    "pyiceberg": "iceberg",
    "pymysql": "mysql",
    **dict.fromkeys(("attrs", "authlib", "cachetools", "certifi", "fastavro", "google", "httpx"), "schema-registry"),
    **dict.fromkeys(("httpx2", "jsonschema", "referencing"), "schema-registry"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used; a missing package is answered with the extra to install."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        if package not in _EXTRAS:
            raise
        raise _unusable(name, package, error) from error


def _unusable(name: str, package: str, error: ImportError) -> ConfigurationError:
    """Return the error for a package that is missing, or of a version without what is needed."""
    command = f"pip install 'penstock[{_EXTRAS[package]}]'"
    what = f"penstock.spark_sink.{name} needs the package {package}"
    if importlib.util.find_spec(package) is None:
        return ConfigurationError(f"{what}, which is not installed; install it with: {command}")
    version = getattr(importlib.import_module(package), "__version__", "the one installed")
    return ConfigurationError(
        f"{what} in another version: {version} lacks {_lacking(error)}; install the one it is made for with: {command}"
    )


def _lacking(error: ImportError) -> str:
    """Return what an import did not find: a module, or a name in one."""
    name = getattr(error, "name_from", None)  # there from Python 3.12 on
    return str(error.name) if name is None else f"{error.name}.{name}"


__all__ = [
    "BatchReport",
    "DataLossError",
    "DeadLetters",
    "DeltaSink",
    "HandlerSink",
    "IcebergSink",
    "KafkaSink",
    "LedgerEntry",
    "Offsets",
    "ProgressListener",
    "Rejected",
    "RowsFunction",
    "SchemaMismatchError",
    "SessionStoppedError",
    "SinkFunction",
    "SinkPartition",
    "SinkSpec",
    "SinkState",
    "SinkStatistics",
    "SqlSink",
    "TaskReport",
    "TopicPartition",
    "decode",
    "register",
    "start_sink",
]
