"""JSON Schema: values are validated against the reader's schema, whose properties are the column's fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import pyarrow as pa
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.common.json_schema import DEFAULT_SPEC
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.schema_registry.serde import SchemaId
from confluent_kafka.serialization import SerializationError
from jsonschema.exceptions import ValidationError  # type: ignore[import-untyped] # it has none
from jsonschema.validators import validator_for  # type: ignore[import-untyped] # it has none
from referencing import Resource

from penstock.spark_sink.source.decode.registry import Read, Reader, unsupported

_TYPES = {"boolean": pa.bool_(), "integer": pa.int64(), "number": pa.float64(), "string": pa.string()}


class JsonReader(Reader):
    """Reads JSON. A value needs no writer's schema, so none is asked for."""

    kind = "JSON"

    def __init__(self, client: SchemaRegistryClient, schema: Schema, _message: str | None) -> None:
        super().__init__(JSONDeserializer(None, None, client))
        parsed, others = self.parsed(schema)
        self._validator = validator_for(parsed)(parsed, registry=others)
        resolver = others.resolver_with_root(Resource.from_contents(parsed, default_specification=DEFAULT_SPEC))
        self.type = _type_of(parsed, resolver, "", ())

    def read(self, _written: SchemaId) -> Read:
        """Return what reads any value."""
        return self._value

    def _value(self, payload: BytesIO) -> object:
        value = json.loads(payload.read())
        try:
            self._validator.validate(value)
        except ValidationError as error:
            # Its message shows the value.
            rule = "/".join(map(str, error.absolute_schema_path))
            raise SerializationError(f"the value breaks the rule {rule} of the schema") from None
        return value


def _type_of(schema: Any, resolver: Any, place: str, within: tuple[str, ...]) -> pa.DataType:
    """Return the type of a part of a schema at `place`, which `within` names the references on the way to."""
    if not isinstance(schema, Mapping):
        raise unsupported(place, "takes any value")
    if (reference := schema.get("$ref")) is not None:
        if reference in within:
            raise unsupported(place, f"is {reference} within {reference}")
        found = resolver.lookup(reference)
        return _type_of(found.contents, found.resolver, place, (*within, reference))
    branches = next((schema[union] for union in ("oneOf", "anyOf", "allOf") if union in schema), ())
    others = [branch for branch in branches if branch.get("type") != "null"]
    if len(others) == 1:
        return _type_of(others[0], resolver, place, within)
    given = schema.get("type", "object" if "properties" in schema else None)
    kinds = [kind for kind in (given if isinstance(given, list) else [given]) if kind not in (None, "null")]
    if len(kinds) != 1:
        raise unsupported(place, "has not one type")
    if kinds[0] in _TYPES:
        return _TYPES[kinds[0]]
    return _nested(schema, resolver, place, within)


def _nested(schema: Mapping[str, Any], resolver: Any, place: str, within: tuple[str, ...]) -> pa.DataType:
    """Return the type of an array or an object."""
    if schema.get("type") != "array" and "properties" in schema:
        fields = schema["properties"].items()
        return pa.struct([(name, _type_of(part, resolver, f"{place}.{name}", within)) for name, part in fields])
    part = schema.get("items" if schema["type"] == "array" else "additionalProperties")
    if not isinstance(part, Mapping):
        raise unsupported(place, f"is an {schema['type']} of anything")
    if schema["type"] == "array":
        return pa.list_(_type_of(part, resolver, f"{place}[]", within))
    return pa.map_(pa.string(), _type_of(part, resolver, f"{place}{{}}", within))
