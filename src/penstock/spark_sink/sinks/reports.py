"""The reports of tasks to the driver: a few columns, named once for Spark and for Arrow."""

from __future__ import annotations

import pyarrow as pa

_TYPES = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "array<string>": pa.list_(pa.string()),
}


def report_schema(columns: str) -> pa.Schema:
    """Return the Arrow schema of a report, given its columns as Spark's DDL: `name type, ...`."""
    pairs = (column.split() for column in columns.split(","))
    return pa.schema([(name, _TYPES[kind]) for name, kind in pairs])
