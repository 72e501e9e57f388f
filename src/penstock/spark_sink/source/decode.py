"""`decode`: converts a column of values from a schema registry's serializers to a column of structs.

The driver fetches the reader's schema once, when the query is built. Executors fetch each writer's schema once in a
process. Values go through Arrow, without pandas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pyarrow as pa
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.serialization import MessageField, SerializationError
from fastavro.read import SchemaResolutionError
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type
from pyspark.sql.types import StringType, StructType

from penstock.consumer.handlers.serialization import classified, describe
from penstock.errors import ConfigurationError, RegistryConnectionError
from penstock.options import one_of
from penstock.spark_sink.source.formats import AvroReader, JsonReader, ProtobufReader, Reader

_READERS: Mapping[str, Any] = {reader.kind: reader for reader in (AvroReader, JsonReader, ProtobufReader)}
#: Seconds for an answer of the registry; the client has no limit of its own, and tries four times.
_ANSWER_S = 10
#: Most readers that a process keeps: one for each call of `decode`.
_KEPT = 64
#: Most characters of a reason in a row.
_REASON = 300


@dataclass(frozen=True, slots=True)
class Decoding:
    """The arguments that executors need."""

    #: The settings of the registry's client. Never shown.
    registry: tuple[tuple[str, Any], ...] = field(repr=False)
    #: The reader's schema, in the registry's form.
    schema: str
    message: str | None
    field: MessageField


def decode(
    column: Column | str,
    registry: Mapping[str, Any],
    *,
    subject: str | None = None,
    schema: str | None = None,
    format: str = "avro",  # noqa: A002 - what users call it
    message: str | None = None,
    headers: Column | str | None = None,
    is_key: bool = False,
    on_error: str = "null",
) -> Column:
    """Return the decoded column of values from a schema registry's serializers, with the reader's types.

    Args:
        column: the bytes, such as `"value"`.
        registry: settings of confluent-kafka's `SchemaRegistryClient`, such as `{"url": ...}`. Requests time out after
            10 s unless the settings have a `timeout`. They are sent to executors, and never shown.
        subject: the subject whose latest schema is the reader's. It is fetched once, now.
        schema: the reader's schema as text, if no subject is given. Protobuf needs the registry's text with
            `format=serialized`.
        format: the format of `schema`: "avro", "json" or "protobuf".
        message: the message's name in a Protobuf schema; default: the first.
        headers: the column `headers` of the source, if schema ids may be in headers.
        is_key: whether the column holds keys, whose ids are in another header.
        on_error: for values that cannot be read: "null" makes them NULL; with "report" the column is a struct of
            `value` and `error`, the reason as text.

    Returns:
        The column; NULL values stay NULL.

    Raises:
        ConfigurationError: an option is wrong, or a part of the schema has no type in Spark.
        RegistryConnectionError: the registry did not answer. On executors this fails the batch, which is repeated.
    """
    if (subject is None) == (schema is None):
        raise ConfigurationError("decode takes the reader's schema from subject= or from schema=; give one of the two")
    one_of("format", format.lower(), *map(str.lower, _READERS))
    one_of("on_error", on_error, "null", "report")
    where = MessageField.KEY if is_key else MessageField.VALUE
    with _refused(f"the subject {subject}" if schema is None else "the reader's schema"):
        found = Schema(schema, format.upper()) if subject is None else _latest(client_of(registry), subject)
        decoding = Decoding(tuple(sorted(registry.items())), json.dumps(found.to_dict()), message, where)
        value = from_arrow_type(reader_of(decoding).type)
    result = StructType().add("value", value).add("error", StringType())
    # Declared as not deterministic, so that Spark does not decode twice, for a filter and for the rows that pass it.
    udf: Any = F.arrow_udf(decoder(decoding), result).asNondeterministic()  # type: ignore[attr-defined] # has no types
    decoded: Column = udf(F.struct(_column(column).alias("data"), _column(headers).alias("headers")))
    return decoded if on_error == "report" else decoded.getField("value")


def _column(given: Column | str | None) -> Column:
    if given is None:
        return F.lit(None)
    return F.col(given) if isinstance(given, str) else given


def client_of(settings: Mapping[str, Any]) -> SchemaRegistryClient:
    """Return a client with a time limit on each request; `ConfigurationError` if it refuses a setting."""
    try:
        return SchemaRegistryClient({"timeout": _ANSWER_S, **settings})
    except Exception as error:  # noqa: BLE001 - the client also raises errors of certificate files
        said = str(error)
        for part in filter(None, (part.rstrip("/") for value in settings.values() for part in str(value).split(","))):
            said = said.replace(part, "***")
    # Not chained: the library repeats some values, and any may be a secret.
    raise ConfigurationError(f"the client of the schema registry refused its settings: {said}; correct registry=")


def _latest(client: SchemaRegistryClient, subject: str) -> Schema:
    latest = client.get_latest_version(subject)
    fetched_as = _READERS[str(latest.schema.schema_type)].fetched_as
    if fetched_as is None or latest.schema_id is None:
        return latest.schema
    return client.get_schema(latest.schema_id, subject, fetched_as)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Convert errors of the registry, on the driver, to our own: unreachable, or a wrong request."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        failure = classified("decoded", error)
        if isinstance(failure, RegistryConnectionError):
            raise failure from error
        raise ConfigurationError(f"{what} cannot be used: {_reason(error)}; correct it") from error


@lru_cache(_KEPT)
def reader_of(decoding: Decoding) -> Reader:
    """Return this process's reader."""
    schema = Schema.from_dict(json.loads(decoding.schema))
    reader: Reader = _READERS[str(schema.schema_type)](client_of(dict(decoding.registry)), schema, decoding.message)
    return reader


def decoder(decoding: Decoding) -> Callable[[Iterator[pa.Array]], Iterator[pa.Array]]:
    """Return the function that executors call with the batches of a task. Spark recognises it by its type hints."""

    def decoded(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        reader = reader_of(decoding)
        reader.failures.clear()
        for batch in batches:
            yield _decoded(reader, decoding.field, batch)

    return decoded


def _decoded(reader: Reader, where: MessageField, batch: pa.StructArray) -> pa.Array:
    """Return for each row a struct of the value and, without a value, the reason."""
    data, headers = (part.to_pylist() for part in batch.flatten())
    values: list[object] = [None] * len(data)
    errors: list[str | None] = [None] * len(data)
    for number, value in enumerate(data):
        if value is None:
            continue
        named = [(header["key"], header["value"]) for header in headers[number] or ()]
        try:
            values[number] = reader.value(value, named, where)
        except RegistryConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - bytes that nobody wrote so may do anything to a parser
            errors[number] = _reason(error)
    column = _column_of(reader, values, errors)
    return pa.StructArray.from_arrays([column, pa.array(errors, pa.string())], ["value", "error"])


def _column_of(reader: Reader, values: list[object], errors: list[str | None]) -> pa.Array:
    """Return the values with Spark's type; values that do not fit become NULL, with a reason."""
    try:
        return _cast(reader, values)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        for number, value in enumerate(values):
            try:
                _cast(reader, [value])
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                values[number], errors[number] = None, f"a field does not fit its type ({type(error).__name__})"
        return _cast(reader, values)


def _cast(reader: Reader, values: list[object]) -> pa.Array:
    return pa.array(values, reader.type).cast(to_arrow_type(from_arrow_type(reader.type), timezone="UTC"))


def _reason(error: Exception) -> str:
    """Return why a value cannot be read, without any part of the value."""
    if isinstance(error, SerializationError | SchemaResolutionError | ConfigurationError):
        return f"{type(error).__name__}: {error}"[:_REASON]
    return describe(error)
