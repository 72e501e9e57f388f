"""What tests of serializers share: serializers of three kinds, and a registry over HTTP that comes and goes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from confluent_kafka.schema_registry import (
    SchemaRegistryClient,
    dual_schema_id_deserializer,
    header_schema_id_serializer,
    prefix_schema_id_serializer,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import Deserializer, Serializer
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

AVRO = json.dumps({"type": "record", "name": "Order", "fields": [{"name": "number", "type": "long"}]})
JSON = json.dumps(
    {"title": "Order", "type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
)


def _protobuf_order() -> Any:
    field = descriptor_pb2.FieldDescriptorProto(name="number", number=1, type="TYPE_INT64", label="LABEL_OPTIONAL")
    order = descriptor_pb2.DescriptorProto(name="Order", field=[field])
    file = descriptor_pb2.FileDescriptorProto(name="penstock_order.proto", syntax="proto3", message_type=[order])
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Order"))


#: The class of orders in Protobuf; the other kinds have dicts.
ProtobufOrder = _protobuf_order()


def mock_registry() -> SchemaRegistryClient:
    """Return the client library's own registry, in this process and empty."""
    return SchemaRegistryClient.new_client({"url": "mock://"})


def serdes_of(
    kind: str, registry: SchemaRegistryClient, *, in_headers: bool = False
) -> tuple[Serializer, Deserializer]:
    """Return a serializer and a deserializer of orders: "avro", "json" or "protobuf"."""
    write_id = header_schema_id_serializer if in_headers else prefix_schema_id_serializer
    writes, reads = {"schema.id.serializer": write_id}, {"schema.id.deserializer": dual_schema_id_deserializer}
    if kind == "avro":
        return AvroSerializer(registry, AVRO, conf=writes), AvroDeserializer(registry, conf=reads)
    if kind == "json":
        return JSONSerializer(JSON, registry, conf=writes), JSONDeserializer(JSON, None, registry, reads)
    return ProtobufSerializer(ProtobufOrder, registry, writes), ProtobufDeserializer(ProtobufOrder, reads, registry)


def order(kind: str, number: int) -> Any:
    """Return an order as the serializers of a kind take it, and the deserializers give it."""
    return ProtobufOrder(number=number) if kind == "protobuf" else {"number": number}


class HttpRegistry:
    """A registry with one Avro schema, whose id is 1; or with those of `schemas`."""

    def __init__(self, url: str) -> None:
        self.url = url
        #: What it answers; with 200 it answers as it should.
        self.status = 200
        self.schemas: SchemaRegistryClient | None = None
        #: The paths that it was asked for.
        self.asked: list[str] = []

    def client(self) -> SchemaRegistryClient:
        """Return a client without retries."""
        return SchemaRegistryClient({"url": self.url, "timeout": 30, "max.retries": 0})

    def answer(self, path: str) -> tuple[int, object]:
        """Return the status and the content of an answer."""
        self.asked.append(path)
        if self.status == 200 and self.schemas is not None:
            return self._found(self.schemas, path)
        if self.status != 200:
            return self.status, {"message": "refused"}
        if path.startswith("/associations/"):
            return 404, {"error_code": 404, "message": "not found"}
        return 200, {"id": 1, "version": 1, "subject": "s", "guid": "a" * 32, "schema": AVRO, "schemaType": "AVRO"}

    @staticmethod
    def _found(schemas: SchemaRegistryClient, path: str) -> tuple[int, object]:
        _, kind, name, *version = re.split("[?]", path)[0].split("/")[:5]
        try:
            if kind == "subjects":
                latest = version[-1] == "latest"
                found = schemas.get_latest_version(name) if latest else schemas.get_version(name, int(version[-1]))
                return 200, found.to_dict()
            schema = schemas.get_schema(int(version[0])) if name == "ids" else schemas.get_schema_by_guid(version[0])
        except SchemaRegistryError as error:
            return error.http_status_code, {"error_code": error.error_code, "message": "none"}
        return 200, schema.to_dict()


@contextmanager
def http_registry() -> Iterator[HttpRegistry]:
    """Run a registry on a port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = registry.answer(self.path)
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - the same

        def log_message(self, *given: object) -> None:
            """Write nothing: requests are no news."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        registry = HttpRegistry(f"http://127.0.0.1:{server.server_address[1]}")
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        serving.start()
        yield registry
        server.shutdown()
        serving.join()
