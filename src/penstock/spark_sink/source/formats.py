"""Readers for the formats of schema registries: Avro, JSON Schema and Protobuf.

A reader converts the reader's schema to an Arrow type, and values, whatever their writer's schema, to values of that
type. confluent-kafka fetches and parses schemas with their references; fastavro, jsonschema and protobuf read the
values.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from decimal import Decimal
from io import BytesIO
from typing import Any, ClassVar

import pyarrow as pa
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, dual_schema_id_deserializer
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.schema_registry.common.json_schema import DEFAULT_SPEC
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.schema_registry.serde import BaseDeserializer, SchemaId
from confluent_kafka.serialization import MessageField, SerializationContext, SerializationError
from fastavro import parse_schema, schemaless_reader
from google.protobuf.descriptor import Descriptor, FieldDescriptor  # type: ignore[import-untyped] # it has none
from google.protobuf.empty_pb2 import Empty  # type: ignore[import-untyped] # it has none
from google.protobuf.message import Message  # type: ignore[import-untyped] # it has none
from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped] # it has none
from jsonschema.exceptions import ValidationError  # type: ignore[import-untyped] # it has none
from jsonschema.validators import validator_for  # type: ignore[import-untyped] # it has none
from referencing import Resource

from penstock.consumer.handlers.serialization import classified
from penstock.errors import ConfigurationError, RegistryConnectionError

Read = Callable[[BytesIO], object]


def unsupported(place: str, what: str) -> ConfigurationError:
    """Return the error for a part of a reader's schema that has no type in Spark."""
    where = place.lstrip(".") or "the schema"
    return ConfigurationError(f"{where} {what}, for which Spark has no type; give decode a reader's schema= without it")


class Reader(ABC):
    """Reads values of one format with the reader's schema. One for each process; for one thread."""

    #: The registry's name of the format.
    kind: ClassVar[str]
    #: The form in which schemas are requested; None: the registry's own.
    fetched_as: ClassVar[str | None] = None
    #: The Arrow type of values.
    type: pa.DataType

    def __init__(self, deserializer: BaseDeserializer) -> None:
        # It resolves references of schemas and caches parsed ones. It offers both by private methods only.
        self._confluent: Any = deserializer
        #: Functions that read values, by the writer's schema id.
        self._reads: dict[object, Read] = {}
        #: Errors of schemas that cannot be read, by id. Cleared for each task, which asks again.
        self.failures: dict[object, Exception] = {}

    def value(self, data: bytes, headers: list[tuple[str, str | bytes | None]], field: MessageField) -> object:
        """Return a decoded value. Its schema id is in front of it or in a header.

        Raises `RegistryConnectionError` if the registry did not answer: the value may be valid. Any other error means
        that it cannot be read.
        """
        written = SchemaId(self.kind)
        payload = dual_schema_id_deserializer(data, SerializationContext("", field, headers), written)
        which = (written.id, written.guid, *(written.message_indexes or ()))
        if which in self.failures:
            raise self.failures[which].with_traceback(None)
        if which not in self._reads:
            try:
                self._reads[which] = self.read(written)
            except Exception as error:  # noqa: BLE001 - see below
                failure = classified("decoded", error)
                if not isinstance(failure, RegistryConnectionError):
                    self.failures[which] = error
                raise failure from None
        value = self._reads[which](payload)
        if payload.read(1):
            raise SerializationError("the value ends before its bytes do")
        return value

    def fetched(self, written: SchemaId) -> Any:
        """Return the parsed writer's schema of a value."""
        schema: Schema = self._confluent._get_writer_schema(written, None, self.fetched_as)  # noqa: SLF001 - see __init__
        if schema.schema_type != self.kind:
            raise SerializationError(f"its schema is of the type {schema.schema_type}, not {self.kind}")
        return self.parsed(schema)

    def parsed(self, schema: Schema) -> Any:
        """Return a parsed schema, with its references."""
        return self._confluent._get_parsed_schema(schema)  # noqa: SLF001 - see __init__

    @abstractmethod
    def read(self, written: SchemaId) -> Read:
        """Return what reads the values of one writer's schema."""


#: Types of Avro with their logical types. Other logical types are read as their basic type.
_AVRO: Mapping[tuple[str, str | None], pa.DataType] = {
    ("boolean", None): pa.bool_(),
    ("int", None): pa.int32(),
    ("long", None): pa.int64(),
    ("float", None): pa.float32(),
    ("double", None): pa.float64(),
    ("bytes", None): pa.binary(),
    ("fixed", None): pa.binary(),
    ("string", None): pa.string(),
    ("enum", None): pa.string(),
    ("int", "date"): pa.date32(),
    ("long", "timestamp-millis"): pa.timestamp("ms", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("ms"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
}
#: Most digits of Spark's decimals.
_DIGITS = 38


class AvroReader(Reader):
    """fastavro resolves the writer's schema into the reader's."""

    kind = "AVRO"

    def __init__(self, client: SchemaRegistryClient, schema: Schema, _message: str | None) -> None:
        super().__init__(AvroDeserializer(client))
        self._reader = self.parsed(schema)
        self._same = _without_logical_types(self._reader)
        self.type = _of_avro(self._reader, "", {})

    def read(self, written: SchemaId) -> Read:
        """Return what reads the values of one writer's schema."""
        writer = _without_logical_types(self.fetched(written))
        if writer == "bytes" or (isinstance(writer, dict) and writer["type"] == "bytes"):
            # confluent-kafka writes plain bytes without their length.
            return BytesIO.read
        # Without schema resolution, a value of the same schema is read in half the time.
        reader = None if writer == self._same else self._reader
        return lambda payload: schemaless_reader(payload, writer, reader)


def _without_logical_types(schema: Any) -> Any:
    """Return a parsed writer's schema without logical types: fastavro would make objects of numbers that Arrow accepts.

    Decimals stay, because their scale is the writer's.
    """

    def plain(part: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in part.items() if not name.startswith("__")}  # fastavro's own notes
        return {name: value for name, value in kept.items() if name != "logicalType" or value == "decimal"}

    return parse_schema(json.loads(json.dumps(schema), object_hook=plain))


def _of_avro(schema: Any, place: str, named: dict[str, Any]) -> pa.DataType:
    """Return the type of the part of a reader's schema at `place`; `named` has the named types it may refer to."""
    while not isinstance(schema, dict) or not isinstance(schema["type"], str):
        if isinstance(schema, list):
            branches = [branch for branch in schema if branch not in ("null", {"type": "null"})]
            if len(branches) != 1:
                raise unsupported(place, "is a union of several types")
            schema = branches[0]
        else:
            schema = named.get(schema, {"type": schema}) if isinstance(schema, str) else schema["type"]
    # A record that contains itself has no type.
    named |= {schema["name"]: {"type": schema["name"]}} if "name" in schema else {}
    found = _known_of_avro(schema, place, named)
    named |= {schema["name"]: schema} if "name" in schema else {}
    return found


def _known_of_avro(schema: dict[str, Any], place: str, named: dict[str, Any]) -> pa.DataType:
    kind, logical = schema["type"], schema.get("logicalType")
    if kind == "array":
        return pa.list_(_of_avro(schema["items"], f"{place}[]", named))
    if kind == "map":
        return pa.map_(pa.string(), _of_avro(schema["values"], f"{place}{{}}", named))
    if kind in ("record", "error"):
        return pa.struct([_field_of_avro(field, f"{place}.{field['name']}", named) for field in schema["fields"]])
    if logical == "decimal" and schema["precision"] <= _DIGITS:
        return pa.decimal128(schema["precision"], schema.get("scale", 0))
    if logical == "decimal" or (kind, None) not in _AVRO:
        raise unsupported(
            place, f"is of the type {kind}" if logical is None else f"is {schema['precision']} digits long"
        )
    return _AVRO.get((kind, logical), _AVRO[kind, None])


def _field_of_avro(field: dict[str, Any], place: str, named: dict[str, Any]) -> pa.Field:
    kind = _of_avro(field["type"], place, named)
    if isinstance(field.get("default"), str) and not pa.types.is_string(kind):
        # In a schema, a default of type bytes is text, and fastavro returns it unchanged.
        raw = field["default"].encode("latin-1")
        number = Decimal(int.from_bytes(raw, "big", signed=True))
        field["default"] = raw if pa.types.is_binary(kind) else number.scaleb(-kind.scale)
    return pa.field(field["name"], kind)


_JSON = {"boolean": pa.bool_(), "integer": pa.int64(), "number": pa.float64(), "string": pa.string()}


class JsonReader(Reader):
    """Reads JSON. Values are validated against the reader's schema; the writer's is not fetched."""

    kind = "JSON"

    def __init__(self, client: SchemaRegistryClient, schema: Schema, _message: str | None) -> None:
        super().__init__(JSONDeserializer(None, None, client))
        parsed, others = self.parsed(schema)
        self._validator = validator_for(parsed)(parsed, registry=others)
        resolver = others.resolver_with_root(Resource.from_contents(parsed, default_specification=DEFAULT_SPEC))
        self.type = _of_json(parsed, resolver, "", ())

    def read(self, _written: SchemaId) -> Read:
        """Return what reads any value."""
        return self._value

    def _value(self, payload: BytesIO) -> object:
        value = json.loads(payload.read())
        try:
            self._validator.validate(value)
        except ValidationError as error:
            # The message of the error contains the value.
            rule = "/".join(map(str, error.absolute_schema_path))
            raise SerializationError(f"the value breaks the rule {rule} of the schema") from None
        return value


def _of_json(schema: Any, resolver: Any, place: str, within: tuple[str, ...]) -> pa.DataType:
    """Return the type of the part of a schema at `place`; `within` has the references on the path to it."""
    if not isinstance(schema, Mapping):
        raise unsupported(place, "takes any value")
    if (reference := schema.get("$ref")) is not None:
        if reference in within:
            raise unsupported(place, f"is {reference} within {reference}")
        found = resolver.lookup(reference)
        return _of_json(found.contents, found.resolver, place, (*within, reference))
    branches = next((schema[union] for union in ("oneOf", "anyOf", "allOf") if union in schema), ())
    others = [branch for branch in branches if branch.get("type") != "null"]
    if len(others) == 1:
        return _of_json(others[0], resolver, place, within)
    given = schema.get("type", "object" if "properties" in schema else None)
    kinds = [kind for kind in (given if isinstance(given, list) else [given]) if kind not in (None, "null")]
    if len(kinds) != 1:
        raise unsupported(place, "has not one type")
    if kinds[0] in _JSON:
        return _JSON[kinds[0]]
    if kinds[0] == "object" and "properties" in schema:
        fields = schema["properties"].items()
        return pa.struct([(name, _of_json(part, resolver, f"{place}.{name}", within)) for name, part in fields])
    part = schema.get("items" if kinds[0] == "array" else "additionalProperties")
    if not isinstance(part, Mapping):
        raise unsupported(place, f"is an {kinds[0]} of anything")
    if kinds[0] == "array":
        return pa.list_(_of_json(part, resolver, f"{place}[]", within))
    return pa.map_(pa.string(), _of_json(part, resolver, f"{place}{{}}", within))


_PROTOBUF = {
    FieldDescriptor.CPPTYPE_BOOL: pa.bool_(),
    FieldDescriptor.CPPTYPE_INT32: pa.int32(),
    FieldDescriptor.CPPTYPE_UINT32: pa.int64(),
    FieldDescriptor.CPPTYPE_INT64: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT64: pa.decimal128(20),
    FieldDescriptor.CPPTYPE_FLOAT: pa.float32(),
    FieldDescriptor.CPPTYPE_DOUBLE: pa.float64(),
    FieldDescriptor.CPPTYPE_ENUM: pa.string(),
    FieldDescriptor.CPPTYPE_STRING: pa.string(),
}
_TIMESTAMP = "google.protobuf.Timestamp"


class ProtobufReader(Reader):
    """Reads one message type: `message` of the reader's schema, or its first. The writer's must have the same name."""

    kind = "PROTOBUF"
    fetched_as = "serialized"

    def __init__(self, client: SchemaRegistryClient, schema: Schema, message: str | None) -> None:
        super().__init__(ProtobufDeserializer(Empty, {}, client))
        file, pool = self.parsed(schema)
        found = pool.FindFileByName(file.name).message_types_by_name
        name = next(iter(found), "") if message is None else message
        if name not in found:
            raise unsupported("", f"has no message {name}")
        self._message: Any = GetMessageClass(found[name])
        self.type = _struct(found[name], "", ())

    def read(self, written: SchemaId) -> Read:
        """Return what reads the values of one message of a writer's schema."""
        file, pool = self.fetched(written)
        descriptor = self._confluent._get_message_desc(pool, pool.FindFileByName(file.name), written.message_indexes)  # noqa: SLF001 - see Reader
        wanted = self._message.DESCRIPTOR.full_name
        if descriptor.full_name != wanted:
            raise SerializationError(f"it is a message {descriptor.full_name}, not {wanted}")
        return lambda payload: _fields(self._message.FromString(payload.read()))


def _is_repeated(field: FieldDescriptor) -> bool:
    # Protobuf 7 has `is_repeated`, older versions `label`.
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _struct(message: Descriptor, place: str, within: tuple[str, ...]) -> pa.DataType:
    if message.full_name in within:
        raise unsupported(place, f"is {message.full_name} within {message.full_name}")
    around = (*within, message.full_name)
    return pa.struct([(field.name, _of_protobuf(field, f"{place}.{field.name}", around)) for field in message.fields])


def _of_protobuf(field: FieldDescriptor, place: str, within: tuple[str, ...]) -> pa.DataType:
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return pa.map_(_of_protobuf(key, place, within), _of_protobuf(value, place, within))
    if field.message_type is None:
        kind = pa.binary() if field.type == FieldDescriptor.TYPE_BYTES else _PROTOBUF[field.cpp_type]
    elif field.message_type.full_name == _TIMESTAMP:
        kind = pa.timestamp("us", "UTC")
    else:
        kind = _struct(field.message_type, place, within)
    return pa.list_(kind) if _is_repeated(field) else kind


def _fields(message: Message) -> dict[str, object]:
    """Return a message's fields, without optional ones that are not set."""
    return {
        field.name: _part(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _part(field: FieldDescriptor, value: Any) -> object:
    if _is_map(field):
        kind = field.message_type.fields_by_name["value"]
        return [(key, _single(kind, item)) for key, item in value.items()]
    return [_single(field, item) for item in value] if _is_repeated(field) else _single(field, value)


def _single(field: FieldDescriptor, value: Any) -> object:
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return str(value) if known is None else known.name
    if field.message_type is None:
        return value
    if field.message_type.full_name == _TIMESTAMP:
        return value.seconds * 1_000_000 + value.nanos // 1_000
    return _fields(value)
