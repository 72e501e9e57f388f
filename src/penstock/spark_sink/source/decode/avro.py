"""Avro: fastavro resolves the writer's schema into the reader's, whose types are the column's."""

from __future__ import annotations

from decimal import Decimal
from io import BytesIO
from typing import Any

import pyarrow as pa
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.schema_registry.serde import SchemaId
from fastavro import parse_schema, schemaless_reader

from penstock.spark_sink.source.decode.registry import Read, Reader, unsupported

_TYPES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "fixed": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
}
#: Logical types as Arrow makes them of the numbers that they are. Others stay what they are: a text, a number, bytes.
_LOGICAL = {
    ("int", "date"): pa.date32(),
    ("long", "timestamp-millis"): pa.timestamp("ms", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
}
#: Digits of Spark's decimals.
_DIGITS = 38


class AvroReader(Reader):
    """Reads Avro."""

    kind = "AVRO"

    def __init__(self, client: SchemaRegistryClient, schema: Schema, _message: str | None) -> None:
        super().__init__(AvroDeserializer(client))
        self._reader = self.parsed(schema)
        self._same = parse_schema(_plain(self._reader))
        self.type = _type_of(self._reader, "", {})

    def read(self, written: SchemaId) -> Read:
        """Return what reads the values of one writer's schema."""
        writer = parse_schema(_plain(self.fetched(written)))
        if writer == "bytes" or (isinstance(writer, dict) and writer["type"] == "bytes"):
            # confluent-kafka writes them without their length.
            return BytesIO.read
        # A value of the same schema is read in half the time without being resolved.
        reader = None if writer == self._same else self._reader
        return lambda payload: schemaless_reader(payload, writer, reader)


def _plain(schema: Any) -> Any:
    """Return a writer's schema without the logical types by which fastavro would make objects of numbers.

    It asks the writer's schema for them, while the column has those of the reader's. Decimals stay: their scale is the
    writer's.
    """
    if isinstance(schema, list):
        return [_plain(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: [{**field, "type": _plain(field["type"])} for field in part]
        if name == "fields"
        else _plain(part)
        if name in ("type", "items", "values")
        else part
        for name, part in schema.items()
        if (name != "logicalType" or part == "decimal") and not name.startswith("__")  # what fastavro has noted
    }


def _type_of(schema: Any, place: str, named: dict[str, Any], within: tuple[str, ...] = ()) -> pa.DataType:
    """Return the type of the part of a reader's schema that stands at `place`.

    `named` has the definitions met so far, `within` the names of the records around it.
    """
    if isinstance(schema, list):
        branches = [branch for branch in schema if branch not in ("null", {"type": "null"})]
        if len(branches) != 1:
            raise unsupported(place, "is a union of several types")
        return _type_of(branches[0], place, named, within)
    if isinstance(schema, str):
        schema = named.get(schema, {"type": schema})
    kind = schema["type"]
    if not isinstance(kind, str):
        return _type_of(kind, place, named, within)
    if "name" in schema:
        named[schema["name"]] = schema
    if kind == "array":
        return pa.list_(_type_of(schema["items"], f"{place}[]", named, within))
    if kind == "map":
        return pa.map_(pa.string(), _type_of(schema["values"], f"{place}{{}}", named, within))
    if kind in ("record", "error"):
        return _record(schema, place, named, within)
    return _simple(kind, schema, place)


def _record(schema: dict[str, Any], place: str, named: dict[str, Any], within: tuple[str, ...]) -> pa.DataType:
    if schema["name"] in within:
        raise unsupported(place, f"is {schema['name']} within {schema['name']}")
    fields = []
    for field in schema["fields"]:
        name = field["name"]
        kind = _type_of(field["type"], f"{place}.{name}".lstrip("."), named, (*within, schema["name"]))
        if isinstance(field.get("default"), str):
            # fastavro hands it over as it stands in the schema, where bytes are text.
            field["default"] = _default(field["default"], kind)
        fields.append(pa.field(name, kind))
    return pa.struct(fields)


def _simple(kind: str, schema: dict[str, Any], place: str) -> pa.DataType:
    logical = str(schema.get("logicalType"))
    if logical == "decimal":
        if schema["precision"] > _DIGITS:
            raise unsupported(place, f"is a decimal of {schema['precision']} digits")
        return pa.decimal128(schema["precision"], schema.get("scale", 0))
    if kind not in _TYPES:
        raise unsupported(place, f"is of the type {kind}")
    return _LOGICAL.get((kind, logical), _TYPES[kind])


def _default(text: str, kind: pa.DataType) -> object:
    if pa.types.is_binary(kind):
        return text.encode("latin-1")
    if pa.types.is_decimal(kind):
        return Decimal(int.from_bytes(text.encode("latin-1"), "big", signed=True)).scaleb(-kind.scale)
    return text
