"""Spark's half of penstock: a committed-only Kafka source without jars, and exactly-once SQL sinks.

Nothing of Spark, Arrow or SQLAlchemy is imported until one of the names below is used, so that a program
which only consumes or sends needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock.spark_sink.query import start_sink
    from penstock.spark_sink.source import register
    from penstock.spark_sink.sql_sink import SqlSink

#: Public name -> the module that defines it.
_HOMES = {
    "SqlSink": "penstock.spark_sink.sql_sink",
    "register": "penstock.spark_sink.source",
    "start_sink": "penstock.spark_sink.query",
}

#: Third-party package -> the extra of penstock that brings it.
_EXTRAS = {"pyspark": "spark", "pyarrow": "spark", "sqlalchemy": "sql", "psycopg": "sql"}


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


__all__ = ["SqlSink", "register", "start_sink"]
