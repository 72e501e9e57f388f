"""`decode` on real Spark, and what its readers make of schemas and values, with a registry over HTTP."""

from __future__ import annotations

import base64
import datetime as dt
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext, Serializer
from google.protobuf import descriptor_pb2, descriptor_pool, timestamp_pb2
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from kafka_tools import NewTopic, Write
from penstock.errors import ConfigurationError, RegistryConnectionError
from penstock.spark_sink import decode
from penstock.spark_sink.source.decode import Decoding, decoder
from registries import AVRO, JSON, HttpRegistry, http_registry, mock_registry, order, serdes_of

SCHEMAS = {"avro": AVRO, "json": JSON}
BIG = 1 << 40


@pytest.fixture
def registry() -> Iterator[HttpRegistry]:
    with http_registry() as running:
        running.schemas = mock_registry()
        yield running


def written(serializer: Serializer, value: object, topic: str = "orders") -> tuple[bytes, list[tuple[str, bytes]]]:
    """Return a value as a serializer writes it, with its headers."""
    context = SerializationContext(topic, MessageField.VALUE, [])
    return serializer(value, context) or b"", context.headers


def avro(registry: HttpRegistry, schema: object, value: object, topic: str = "orders") -> bytes:
    """Register a schema, and return a value that was written with it."""
    return written(AvroSerializer(registry.schemas, json.dumps(schema)), value, topic)[0]


def record(*fields: tuple[str, object]) -> dict[str, object]:
    return {"type": "record", "name": "Order", "fields": [{"name": name, "type": kind} for name, kind in fields]}


def decoded(
    registry: HttpRegistry, schema: Schema, values: Sequence[bytes | None], message: str | None = None
) -> list[Any]:
    """Return an executor's decoded values, without Spark."""
    settings = (("url", registry.url), ("max.retries", 0))
    decoding = Decoding(settings, json.dumps(schema.to_dict()), message, MessageField.VALUE)
    headers = pa.array([None] * len(values), pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))
    columns = [pa.array(values, pa.binary()), headers]
    (result,) = decoder(decoding)(iter([pa.StructArray.from_arrays(columns, ["data", "headers"])]))
    return list(result.to_pylist())


def values(registry: HttpRegistry, schema: object, *data: bytes) -> list[Any]:
    """Return values as a reader's schema of Avro has them; each must be good."""
    rows = decoded(registry, Schema(json.dumps(schema), "AVRO"), data)
    assert [row["error"] for row in rows] == [None] * len(data)
    return [row["value"] for row in rows]


@pytest.mark.parametrize(
    "way",
    [
        "avro in headers",
        *(
            pytest.param(way, marks=pytest.mark.thorough)
            for way in ("avro", "json", "json in headers", "protobuf", "protobuf in headers")
        ),
    ],
)
def test_values_become_structs_nulls_stay_and_bad_ones_say_why(
    way: str, registry: HttpRegistry, read: Callable[..., DataFrame], write: Write, new_topic: NewTopic
) -> None:
    (kind, *in_headers), topic = way.split(), new_topic()
    serializer, _ = serdes_of(kind, registry.schemas, in_headers=bool(in_headers))  # type: ignore[arg-type] # it is set
    value, headers = written(serializer, order(kind, BIG), topic)
    write(topic, 0, [(b"k", value), (b"k", None)], headers=headers)
    write(topic, 0, [(b"k", b"\0\0\0\0\x63\0garbage"), (b"k", b"")])
    given: dict[str, Any] = {"subject": f"{topic}-value", "headers": "headers"}
    plain, column = (decode("value", {"url": registry.url}, **given, on_error=what) for what in ("null", "report"))

    frame = read(subscribe=topic, includeHeaders="true").select("offset", column.alias("order"), plain.alias("plain"))
    found = frame.orderBy("offset").collect()
    rows = [row.order for row in found]

    assert frame.select("order.value.*").dtypes == [("number", "bigint")]
    assert [row.value and row.value.number for row in rows] == [BIG, None, None, None]
    assert [row.plain for row in found] == [row.value for row in rows]
    assert [row.error is None for row in rows] == [True, True, False, False]
    assert rows[2].error == ("JSONDecodeError" if kind == "json" else "SchemaRegistryError 40400")


@pytest.mark.thorough
def test_logical_types_of_avro_become_types_of_spark(spark: SparkSession, registry: HttpRegistry) -> None:
    now = dt.datetime(2026, 11, 26, 4, 30, 1, 250_000, dt.UTC)
    line = {"type": "record", "name": "Line", "fields": [{"name": "amount", "type": "int"}]}
    schema = record(
        ("total", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}),
        ("day", {"type": "int", "logicalType": "date"}),
        ("millis", {"type": "long", "logicalType": "timestamp-millis"}),
        ("micros", ["null", {"type": "long", "logicalType": "timestamp-micros"}]),
        ("local", {"type": "long", "logicalType": "local-timestamp-millis"}),
        ("id", {"type": "string", "logicalType": "uuid"}),
        ("kind", {"type": "enum", "name": "Kind", "symbols": ["NEW", "OLD"]}),
        ("lines", {"type": "array", "items": ["null", line]}),
        ("tags", {"type": "map", "values": "double"}),
        ("hash", {"type": "fixed", "name": "Hash", "size": 2}),
    )
    value = {
        "total": Decimal("-12.34"), "day": now.date(), "millis": now, "micros": None, "local": now.replace(tzinfo=None),
        "id": uuid.UUID(int=7), "kind": "OLD", "lines": [{"amount": 3}, None], "tags": {"a": 0.5}, "hash": b"\0\1",
    }  # fmt: skip
    data = avro(registry, schema, value)

    frame = spark.createDataFrame([(data,)], "value binary")
    frame = frame.select(decode("value", {"url": registry.url}, subject="orders-value").alias("order"))
    (row,) = frame.select("order.*").collect()

    assert [kind for _, kind in frame.select("order.*").dtypes] == [
        "decimal(9,2)", "date", "timestamp", "timestamp", "timestamp_ntz", "string", "string",
        "array<struct<amount:int>>", "map<string,double>", "binary",
    ]  # fmt: skip
    read_back = row.asDict(recursive=True) | {"millis": row.millis.astimezone(dt.UTC), "hash": bytes(row.hash)}
    assert read_back == value | {"id": str(uuid.UUID(int=7)), "millis": now}


def test_values_of_older_and_newer_schemas_are_read_as_the_readers(registry: HttpRegistry) -> None:
    millis = {"type": "long", "logicalType": "timestamp-millis"}
    cent = {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}
    fields = [
        {"name": "id", "type": "long"},
        {"name": "at", "type": millis},
        {"name": "salt", "type": "bytes", "default": "\xff"},
        {"name": "cent", "type": {**cent}, "default": "\x01"},
        {"name": "name", "type": ["null", "string"], "default": None, "aliases": ["title"]},
    ]
    reader = {"type": "record", "name": "Order", "fields": fields}
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    older = avro(registry, record(("id", "int"), ("at", "long")), {"id": 1, "at": int(at.timestamp() * 1000)})
    newer = {"id": 2, "at": at, "title": "n", "salt": b"s", "cent": b"\2", "extra": [1.5]}
    data = avro(
        registry,
        record(
            ("title", "string"), ("extra", {"type": "array", "items": "double"}), ("id", "long"), ("at", millis),
            ("salt", "bytes"), ("cent", cent),
        ),
        newer | {"cent": Decimal("0.02")},
        "others",
    )  # fmt: skip

    assert values(registry, reader, older, data) == [
        {"id": 1, "at": at, "salt": b"\xff", "cent": Decimal("0.01"), "name": None},
        {"id": 2, "at": at, "salt": b"s", "cent": Decimal("0.02"), "name": "n"},
    ]
    (row,) = decoded(registry, Schema(json.dumps(record(("missing", "long"))), "AVRO"), [older])
    assert "No default value for field missing" in row["error"]


def test_json_is_validated_and_its_messages_do_not_show_the_value(registry: HttpRegistry) -> None:
    line = {"type": "object", "properties": {"amount": {"type": "number"}}}
    schema = {
        "type": "object",
        "$defs": {"Line": line},
        "properties": {
            "id": {"type": "integer"},
            "note": {"anyOf": [{"type": "null"}, {"type": "string"}]},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/Line"}},
            "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
    }
    write = JSONSerializer(json.dumps({"type": "object"}), registry.schemas)
    good = {"id": 3.0, "lines": [{"amount": 2, "more": 1}], "counts": {"a": 1}, "unknown": True}
    data = [written(write, value)[0] for value in (good, {"id": "secret"}, {"id": 1 << 70})]

    first, second, third = decoded(registry, Schema(json.dumps(schema), "JSON"), data)

    assert first["value"] == {"id": 3, "note": None, "lines": [{"amount": 2.0}], "counts": [("a", 1)]}
    assert second["error"] == "SerializationError: the value breaks the rule properties/id/type of the schema"
    assert third["error"].startswith("a field does not fit its type")


def proto(*, newer: bool) -> Any:
    """Return the file of two messages; the newer schema has another field in each."""
    field = descriptor_pb2.FieldDescriptorProto
    fields = [
        field(name="id", number=1, type="TYPE_UINT64"),
        field(name="at", number=2, type="TYPE_MESSAGE", type_name=".google.protobuf.Timestamp"),
        field(name="state", number=3, type="TYPE_ENUM", type_name=".p.State"),
        field(name="lines", number=4, type="TYPE_MESSAGE", type_name=".p.Line", label="LABEL_REPEATED"),
        *[field(name="note", number=5, type="TYPE_STRING")] * newer,
    ]
    line = descriptor_pb2.DescriptorProto(name="Line", field=[field(name="data", number=1, type="TYPE_BYTES")])
    state = descriptor_pb2.EnumDescriptorProto(name="State")
    state.value.add(name="NEW", number=0)
    file = descriptor_pb2.FileDescriptorProto(name=f"p{newer}.proto", package="p", syntax="proto3", enum_type=[state])
    file.dependency.append("google/protobuf/timestamp.proto")
    file.message_type.extend([line, descriptor_pb2.DescriptorProto(name="Order", field=fields)])
    return file


@pytest.mark.parametrize("newer", [False, True])
def test_protobuf_is_read_by_message_whichever_schema_is_newer(newer: bool, registry: HttpRegistry) -> None:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(proto(newer=newer))
    make, line = (GetMessageClass(pool.FindMessageTypeByName(name)) for name in ("p.Order", "p.Line"))
    text = base64_of(proto(newer=not newer))
    message = make(id=2**64 - 1, state=5, lines=[line(data=b"x")], at={"seconds": 1, "nanos": 2000})
    data = written(ProtobufSerializer(make, registry.schemas), message)[0]
    other = written(ProtobufSerializer(line, registry.schemas), line(data=b"y"))[0]

    first, second = decoded(registry, Schema(text, "PROTOBUF"), [data, other], "Order")

    assert first["value"] == {
        "id": Decimal(2**64 - 1), "at": dt.datetime(1970, 1, 1, 0, 0, 1, 2, dt.UTC), "state": "5",
        "lines": [{"data": b"x"}], **({} if newer else {"note": ""}),
    }  # fmt: skip
    assert second["error"] == "SerializationError: it is a message p.Line, not p.Order"


def base64_of(file: Any) -> str:
    return base64.b64encode(file.SerializeToString()).decode()


def test_a_registry_that_is_away_ends_the_batch_and_an_unknown_id_is_a_bad_value(registry: HttpRegistry) -> None:
    schema = record(("number", "long"), ("unique", ["null", "string"]))
    data = avro(registry, schema, {"number": BIG, "unique": None})
    reader = Schema(json.dumps(schema), "AVRO")
    registry.status = 503

    with pytest.raises(RegistryConnectionError, match="see that the schema registry is up"):
        decoded(registry, reader, [data])
    with pytest.raises(RegistryConnectionError):
        decode("value", {"url": registry.url, "max.retries": 0}, subject="orders-value")
    registry.status = 200
    registry.asked.clear()
    for _ in range(2):  # two tasks of a process
        rows = decoded(registry, reader, [data, b"\0\0\0\0\x63" + data[5:]] * 3)

    assert [row["error"] for row in rows] == [None, "SchemaRegistryError 40400"] * 3
    assert registry.asked == ["/schemas/ids/1", "/schemas/ids/99", "/schemas/ids/99"], "each once for a process or task"


def test_references_of_schemas_are_followed_on_both_sides(registry: HttpRegistry) -> None:
    assert registry.schemas is not None
    line = {"type": "record", "name": "p.Line", "fields": [{"name": "amount", "type": "int"}]}
    registry.schemas.register_schema("line", Schema(json.dumps(line), "AVRO"))
    text = json.dumps(record(("lines", {"type": "array", "items": "p.Line"})))
    schema = Schema(text, "AVRO", [SchemaReference("p.Line", "line", 1)])
    data = written(AvroSerializer(registry.schemas, schema), {"lines": [{"amount": 4}]})[0]

    (row,) = decoded(registry, schema, [data])

    assert row == {"value": {"lines": [{"amount": 4}]}, "error": None}


PROTO = descriptor_pb2.FileDescriptorProto(
    name="r.proto",
    syntax="proto3",
    message_type=[
        descriptor_pb2.DescriptorProto(
            name="Node",
            field=[descriptor_pb2.FieldDescriptorProto(name="next", number=1, type="TYPE_MESSAGE", type_name=".Node")],
        )
    ],
)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "from subject= or from schema="),
        ({"schema": AVRO, "subject": "s"}, "from subject= or from schema="),
        ({"schema": AVRO, "format": "xml"}, "format must be"),
        ({"schema": AVRO, "on_error": "skip"}, "on_error must be 'null' or 'report', but is 'skip'"),
        ({"schema": "{"}, "the reader's schema cannot be used: JSONDecodeError"),
        ({"subject": "unknown"}, "the subject unknown cannot be used: SchemaRegistryError 40400"),
        ({"schema": json.dumps(record(("next", ["null", "Order"])))}, "next is of the type Order, for which"),
        ({"schema": json.dumps(record(("either", ["int", "string"])))}, "either is a union of several types"),
        ({"schema": json.dumps({"$ref": "#/$defs/N", "$defs": {"N": {"properties": {"n": {"$ref": "#/$defs/N"}}}}}),
          "format": "json"}, r"n is #/\$defs/N within #/\$defs/N"),
        ({"schema": json.dumps({"properties": {"any": {"type": "object"}}}), "format": "json"}, "any is an object of"),
        ({"schema": base64_of(PROTO), "format": "protobuf"}, r"next is Node within Node"),
        ({"schema": base64_of(PROTO), "format": "protobuf", "message": "Order"}, "has no message Order"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_column_is_refused_when_the_query_is_built(
    options: dict[str, Any], said: str, registry: HttpRegistry
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        decode("value", {"url": registry.url}, **options)


def test_credentials_never_show() -> None:
    secret = "hunter2"  # noqa: S105 - it is looked for
    settings = {"url": "http://127.0.0.1:1", "basic.auth.user.info": f"me:{secret}"}

    with pytest.raises(ConfigurationError, match=r"refused its settings: Unrecognized properties: no\.such") as refused:
        decode("value", settings | {"no.such": secret}, schema=AVRO)
    with pytest.raises(ConfigurationError, match=r"must be in the form of") as malformed:
        decode("value", settings | {"basic.auth.user.info": secret}, schema=AVRO)
    with pytest.raises(ConfigurationError, match=r"Invalid url \*\*\*") as address:
        decode("value", {"url": f"me:{secret}@registry/,http://127.0.0.1:1"}, schema=AVRO)
    decoding = Decoding(tuple(settings.items()), AVRO, None, MessageField.VALUE)

    assert secret not in f"{refused.value!r} {malformed.value!r} {address.value!r} {decoding!r}"
    assert refused.value.__cause__ is None


@pytest.fixture(scope="module")
def three_readers() -> Iterator[dict[str, tuple[HttpRegistry, Schema]]]:
    """A registry whose schema 1 is of orders, for each format."""
    with http_registry() as avro_one, http_registry() as json_one, http_registry() as proto_one:
        running = dict(zip(("avro", "json", "protobuf"), (avro_one, json_one, proto_one), strict=True))
        schemas = {}
        for kind, one in running.items():
            one.schemas = mock_registry()
            written(serdes_of(kind, one.schemas)[0], order(kind, 1))
            schemas[kind] = (one, one.schemas.get_schema(1))
        yield schemas


@given(
    st.sampled_from(["avro", "json", "protobuf"]),
    st.lists(st.tuples(st.booleans(), st.binary(max_size=40)), max_size=20),
)
def test_no_bytes_end_the_batch(
    three_readers: dict[str, tuple[HttpRegistry, Schema]], kind: str, data: list[tuple[bool, bytes]]
) -> None:
    values = [b"\0\0\0\0\1" + one if prefixed else one for prefixed, one in data]

    rows = decoded(*three_readers[kind], values)

    assert len(rows) == len(values)
    assert all((row["value"] is None) != (row["error"] is None) for row in rows)
