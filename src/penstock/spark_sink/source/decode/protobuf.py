"""Protobuf: a value is parsed as the reader's message, where the writer's schema says that it is that message."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pyarrow as pa
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.schema_registry.serde import SchemaId
from confluent_kafka.serialization import SerializationError
from google.protobuf.descriptor import Descriptor, FieldDescriptor  # type: ignore[import-untyped] # it has none
from google.protobuf.empty_pb2 import Empty  # type: ignore[import-untyped] # it has none
from google.protobuf.message import Message  # type: ignore[import-untyped] # it has none
from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped] # it has none

from penstock.spark_sink.source.decode.registry import Read, Reader, unsupported

_TYPES = {
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
    """Reads one message of Protobuf: `message` of the reader's schema, or its first."""

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
        return self._value

    def _value(self, payload: BytesIO) -> object:
        return _fields(self._message.FromString(payload.read()))


def _is_repeated(field: FieldDescriptor) -> bool:
    # Protobuf 7 has the first, older ones the second alone.
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _struct(message: Descriptor, place: str, within: tuple[str, ...]) -> pa.DataType:
    if message.full_name in within:
        raise unsupported(place, f"is {message.full_name} within {message.full_name}")
    around = (*within, message.full_name)
    return pa.struct([(field.name, _type_of(field, f"{place}.{field.name}", around)) for field in message.fields])


def _type_of(field: FieldDescriptor, place: str, within: tuple[str, ...]) -> pa.DataType:
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return pa.map_(_type_of(key, place, within), _type_of(value, place, within))
    if field.message_type is None:
        kind = pa.binary() if field.type == FieldDescriptor.TYPE_BYTES else _TYPES[field.cpp_type]
    elif field.message_type.full_name == _TIMESTAMP:
        kind = pa.timestamp("us", "UTC")
    else:
        kind = _struct(field.message_type, place, within)
    return pa.list_(kind) if _is_repeated(field) else kind


def _fields(message: Message) -> dict[str, object]:
    """Return a message's fields; those that know whether they were set, and were not, are left out."""
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
