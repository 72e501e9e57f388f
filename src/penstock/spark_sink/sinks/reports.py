"""What tasks report or pass on: a few columns, named once for Spark and for Arrow."""

from __future__ import annotations

import pyarrow as pa

_TYPES = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "array<struct<key:string,value:binary>>": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}


def report_schema(columns: str) -> pa.Schema:
    """Return the Arrow schema of columns, given as Spark's DDL: `name type, ...`."""
    pairs = (column.split() for column in columns.split(", "))
    return pa.schema([(name, _TYPES[kind]) for name, kind in pairs])
