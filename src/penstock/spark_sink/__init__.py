"""penstock for Spark: a Kafka source without jars that reads committed messages, and exactly-once sinks.

Spark, Arrow and SQLAlchemy are imported on the first use of a name below, so that a program that only consumes or sends
does not need them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock.spark_sink.errors import DataLossError, SchemaMismatchError, SessionStoppedError
    from penstock.spark_sink.ledger.rules import LedgerEntry
    from penstock.spark_sink.progress import SinkPartition, SinkState, SinkStatistics
    from penstock.spark_sink.queries.sink_specs import QueryOptions, RowsFunction, SinkFunction, SinkOptions, SinkSpec
    from penstock.spark_sink.queries.start import start_sink
    from penstock.spark_sink.sinks.delta_sink import DeltaSink
    from penstock.spark_sink.sinks.handlers.results import BatchReport
    from penstock.spark_sink.sinks.handlers.sink import HandlerSink
    from penstock.spark_sink.sinks.iceberg_sink import IcebergSink
    from penstock.spark_sink.sinks.kafka_sink import KafkaSink
    from penstock.spark_sink.sinks.sql.dead_letters import DeadLetters, Rejected
    from penstock.spark_sink.sinks.sql.sink import SqlSink
    from penstock.spark_sink.source.decode import decode
    from penstock.spark_sink.source.plan import Offsets, TopicPartition
    from penstock.spark_sink.source.source import register

#: Public names by the module of this package that defines them.
_HOMES = {
    "errors": ("DataLossError", "SchemaMismatchError", "SessionStoppedError"),
    "ledger.rules": ("LedgerEntry",),
    "progress": ("SinkPartition", "SinkState", "SinkStatistics"),
    "queries.start": ("start_sink",),
    "queries.sink_specs": ("QueryOptions", "RowsFunction", "SinkFunction", "SinkOptions", "SinkSpec"),
    "sinks.delta_sink": ("DeltaSink",),
    "sinks.handlers.results": ("BatchReport",),
    "sinks.handlers.sink": ("HandlerSink",),
    "sinks.iceberg_sink": ("IcebergSink",),
    "sinks.kafka_sink": ("KafkaSink",),
    "sinks.sql.dead_letters": ("DeadLetters", "Rejected"),
    "sinks.sql.sink": ("SqlSink",),
    "source.decode": ("decode",),
    "source.plan": ("Offsets", "TopicPartition"),
    "source.source": ("register",),
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}

#: The extra of penstock that installs each third-party package.
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
    """Import a public name on first use. If a package is missing, the error names the extra to install."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        if package not in _EXTRAS:
            raise
        raise ConfigurationError(
            f"penstock.spark_sink.{name} needs the package {package}, which is not installed or of another version: "
            f"{error}; install it with: pip install 'penstock[{_EXTRAS[package]}]'"
        ) from error


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
    "QueryOptions",
    "Rejected",
    "RowsFunction",
    "SchemaMismatchError",
    "SessionStoppedError",
    "SinkFunction",
    "SinkOptions",
    "SinkPartition",
    "SinkSpec",
    "SinkState",
    "SinkStatistics",
    "SqlSink",
    "TopicPartition",
    "decode",
    "register",
    "start_sink",
]
