"""A schema registry as executors use it: its client with bounds, and a reader that asks once for each schema.

What is one format's is in the files beside this one: how its schemas become types, and how its values are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any, ClassVar

import pyarrow as pa
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, dual_schema_id_deserializer
from confluent_kafka.schema_registry.serde import BaseDeserializer, SchemaId
from confluent_kafka.serialization import MessageField, SerializationContext, SerializationError

from penstock.consumer.handlers.serialization import classified
from penstock.errors import ConfigurationError, RegistryConnectionError

#: Seconds that the registry may take for an answer; the client has no limit of its own, and tries four times.
_ANSWER_S = 10

Read = Callable[[BytesIO], object]
Headers = list[tuple[str, str | bytes | None]]


def client_of(settings: Mapping[str, Any]) -> SchemaRegistryClient:
    """Return a client with a bound on each request; `ConfigurationError` where it refuses a setting."""
    try:
        return SchemaRegistryClient({"timeout": _ANSWER_S, **settings})
    except Exception as error:  # noqa: BLE001 - the client also raises errors of certificate files
        said = str(error)
        for part in filter(None, (part.rstrip("/") for value in settings.values() for part in str(value).split(","))):
            said = said.replace(part, "***")
    # Not chained: the library repeats some values, and any may be a secret.
    raise ConfigurationError(f"the client of the schema registry refused its settings: {said}; correct registry=")


class Reader(ABC):
    """Reads the values of one format as the reader's schema has them. One for each process; for one thread."""

    #: The registry's name of the format.
    kind: ClassVar[str]
    #: The format in which schemas are asked for; None for the registry's own.
    fetched_as: ClassVar[str | None] = None
    #: What `value` returns, as Arrow takes it.
    type: pa.DataType

    def __init__(self, deserializer: BaseDeserializer) -> None:
        # It resolves what schemas refer to, keeps what it has parsed, and has no other way to either.
        self._confluent: Any = deserializer
        #: By the id of the schema that a value was written with. Failures are kept for the batches of a task.
        self._reads: dict[object, Read | Exception] = {}

    def forget_failures(self) -> None:
        """Ask again for the schemas that the registry did not have."""
        self._reads = {written: read for written, read in self._reads.items() if not isinstance(read, Exception)}

    def value(self, data: bytes, headers: Headers, field: MessageField) -> object:
        """Return a value, whose schema's id stands in front of it or in a header.

        Raises:
            RegistryConnectionError: the registry did not answer; the value may be good.
            Exception: the value cannot be read; `reason` says why.
        """
        written = SchemaId(self.kind)
        payload = dual_schema_id_deserializer(data, SerializationContext("", field, headers), written)
        place = (written.id, written.guid, *(written.message_indexes or ()))
        if place not in self._reads:
            self._reads[place] = self._opened(written)
        read = self._reads[place]
        if isinstance(read, Exception):
            raise read.with_traceback(None)
        value = read(payload)
        if payload.read(1):
            raise SerializationError("the value ends before its bytes do")
        return value

    def _opened(self, written: SchemaId) -> Read | Exception:
        try:
            return self.read(written)
        except Exception as error:
            failure = classified("decoded", error)
            if isinstance(failure, RegistryConnectionError) or not isinstance(failure, Exception):
                raise failure from error
            return failure

    def fetched(self, written: SchemaId) -> Any:
        """Return the schema that a value was written with, as the deserializer parses it."""
        schema: Schema = self._confluent._get_writer_schema(written, None, self.fetched_as)  # noqa: SLF001 - see __init__
        if schema.schema_type != self.kind:
            raise SerializationError(f"its schema is of the type {schema.schema_type}, not {self.kind}")
        return self.parsed(schema)

    def parsed(self, schema: Schema) -> Any:
        """Return a schema as the deserializer parses it, with what it refers to."""
        return self._confluent._get_parsed_schema(schema)  # noqa: SLF001 - see __init__

    @abstractmethod
    def read(self, written: SchemaId) -> Read:
        """Return what reads the values of one writer's schema."""


def unsupported(place: str, what: str) -> ConfigurationError:
    """Return the error for a part of a reader's schema that is no type of Spark's."""
    return ConfigurationError(
        f"{place or 'the schema'} {what}, for which Spark has no type; give decode a reader's schema= without it"
    )
