"""`decode`: a column of what a schema registry's serializers wrote, as a column of structs.

The reader's schema is found on the driver, once, when the query is built. Executors ask for the schemas that values
were written with, once for each in a process. Values go through Arrow, without pandas.
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
#: Seconds that the registry may take for an answer; the client has no limit of its own, and tries four times.
_ANSWER_S = 10
#: Readers that a process keeps: one for each call of `decode` whose queries it runs.
_KEPT = 64
#: Characters of a reason that stand in a row.
_REASON = 300


@dataclass(frozen=True, slots=True)
class Decoding:
    """What an executor needs to know."""

    #: The settings of the registry's client. Never shown.
    registry: tuple[tuple[str, Any], ...] = field(repr=False)
    #: The reader's schema, as the registry has it.
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
    """Return a column of values that a schema registry's serializers wrote, with the types of the reader's schema.

    Args:
        column: the bytes, such as `"value"`.
        registry: settings of confluent-kafka's `SchemaRegistryClient`, such as `{"url": ...}`; a request has 10
            seconds unless they name a `timeout`. They are sent to executors, and never shown.
        subject: whose latest schema is the reader's; it is asked for once, now.
        schema: the reader's schema as text, where no subject is given: of Avro and JSON Schema as it is, of Protobuf
            as the registry gives it with `format=serialized`.
        format: what `schema` is: "avro", "json" or "protobuf".
        message: the message's name in a schema of Protobuf; its first when left out.
        headers: the column `headers` of the source, where schema ids may stand in headers.
        is_key: whether the column holds keys, whose ids stand in another header.
        on_error: what a value becomes that cannot be read: "null"; with "report" the column is a struct of `value` and
            `error`, the reason as text.

    Returns:
        The column; NULL where the given one is NULL.

    Raises:
        ConfigurationError: an option is wrong, or a part of the schema has no type in Spark.
        RegistryConnectionError: the registry did not answer. Later that ends the batch, which is done again.
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
    # Not deterministic, so that Spark does not decode once for a filter and once more for the rows that pass it.
    udf: Any = F.arrow_udf(decoder(decoding), result).asNondeterministic()  # type: ignore[attr-defined] # has no types
    decoded: Column = udf(F.struct(_column(column).alias("data"), _column(headers).alias("headers")))
    return decoded if on_error == "report" else decoded.getField("value")


def _column(given: Column | str | None) -> Column:
    if given is None:
        return F.lit(None)
    return F.col(given) if isinstance(given, str) else given


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


def _latest(client: SchemaRegistryClient, subject: str) -> Schema:
    latest = client.get_latest_version(subject)
    fetched_as = _READERS[str(latest.schema.schema_type)].fetched_as
    if fetched_as is None or latest.schema_id is None:
        return latest.schema
    return client.get_schema(latest.schema_id, subject, fetched_as)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Have errors leave the block, on the driver, as those of the registry or of what it was asked for."""
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
    """Return the function that executors call with the batches of a task; Spark knows it by its types."""

    def decoded(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        reader = reader_of(decoding)
        reader.failures.clear()
        for batch in batches:
            yield _decoded(reader, decoding.field, batch)

    return decoded


def _decoded(reader: Reader, where: MessageField, batch: pa.StructArray) -> pa.Array:
    """Return a struct of the value and of the reason why there is none, for each row."""
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
    """Return the values as Spark takes them; those that do not fit their type become NULL, with a reason."""
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
    """Return why a value cannot be read, without anything of the value."""
    if isinstance(error, SerializationError | SchemaResolutionError | ConfigurationError):
        return f"{type(error).__name__}: {error}"[:_REASON]
    return describe(error)
