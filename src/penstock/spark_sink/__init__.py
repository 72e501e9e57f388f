"""Spark's half of penstock: a committed-only Kafka source without jars, and exactly-once SQL sinks.

Nothing of Spark, Arrow or SQLAlchemy is imported until one of the names below is used, so that a program
which only consumes or sends needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock.spark_sink.dead_letters import DeadLetters
    from penstock.spark_sink.delta_sink import DeltaSink
    from penstock.spark_sink.kafka_sink import KafkaSink
    from penstock.spark_sink.parquet_sink import ParquetSink
    from penstock.spark_sink.progress_listener import ProgressListener
    from penstock.spark_sink.query import start_sink
    from penstock.spark_sink.source import register
    from penstock.spark_sink.sql_sink import SqlSink

#: Public name -> the module that defines it.
_HOMES = {
    "DeadLetters": "penstock.spark_sink.dead_letters",
    "DeltaSink": "penstock.spark_sink.delta_sink",
    "HandlerSink": "penstock.handler_sink.sink",
    "KafkaSink": "penstock.spark_sink.kafka_sink",
    "ParquetSink": "penstock.spark_sink.parquet_sink",
    "ProgressListener": "penstock.spark_sink.progress_listener",
    "SqlSink": "penstock.spark_sink.sql_sink",
    "register": "penstock.spark_sink.source",
    "start_sink": "penstock.spark_sink.query",
}

#: Third-party package -> the extra of penstock that brings it.
_EXTRAS = {"pyspark": "spark", "pyarrow": "spark", "sqlalchemy": "sql", "psycopg": "sql", "deltalake": "delta"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used; a missing package is answered with the extra to install."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _EXTRAS:
            raise
        raise ConfigurationError(
            f"penstock.spark_sink.{name} needs the package {package}, which is not installed; "
            f"install it with: pip install 'penstock[{_EXTRAS[package]}]'"
        ) from error


__all__ = [
    "DeadLetters",
    "DeltaSink",
    "HandlerSink",
    "KafkaSink",
    "ParquetSink",
    "ProgressListener",
    "SqlSink",
    "register",
    "start_sink",
]
