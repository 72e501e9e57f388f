"""Unknown schemas, invalid values, and a registry that is away: which failures are tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from confluent_kafka.schema_registry import AsyncSchemaRegistryClient, SchemaRegistryError
from confluent_kafka.schema_registry.avro import (
    AsyncAvroDeserializer,
    AsyncAvroSerializer,
    AvroDeserializer,
    AvroDeserializerBuilder,
    AvroSerializer,
)
from confluent_kafka.serialization import (
    SerializationError,
    StringDeserializer,
    StringSerializer,
)
from serdes_apps import Recording, framed

import penstock
from penstock.consumer import handler
from penstock.errors import ConfigurationError
from penstock.testing import TestApp
from registries import AVRO, http_registry, mock_registry, serdes_of
from support.consumers import app_of, every


def reasons(test: TestApp, topic: str) -> list[bytes | None]:
    return [message.header("__dlq.errors.message") for message in test.dead_letters(topic)]


def test_what_a_registry_does_not_know_and_what_is_no_value_go_to_the_dead_letters_without_a_try() -> None:
    serializer, deserializer = serdes_of("avro", mock_registry())
    good = framed(serializer, {"number": 1})
    app, seen = app_of(), []

    @app.handler("orders", decoder=deserializer, on_failure="dead_letter", order="partition")
    def keep(message: penstock.Message) -> None:
        seen.append(message.body)

    with TestApp(app) as test:
        for value in (b"\0\0\0\0\x63\x02", b"\x07garbage", b"\0", b"", good[:5], good):
            test.send("orders", value)
        test.settle()
        said = reasons(test, "orders")
        counts = {sent.header("__dlq.errors.delivery.count") for sent in test.dead_letters("orders")}

    assert seen == [{"number": 1}]
    assert said[0] == b"the value cannot be decoded: SchemaRegistryError 40400; correct its producer or the decoder"
    assert [item for item in said if not (item or b"").startswith(b"the value cannot be decoded: ")] == []
    assert (len(said), counts) == (5, {b"1"})


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (httpx2.ConnectTimeout("late"), 3),
        (ConnectionRefusedError(), 3),
        (SchemaRegistryError(503, -1, "away"), 3),
        (SchemaRegistryError(500, 50001, "its own store is away"), 3),
        (SchemaRegistryError(404, 404, "a proxy's"), 3),
        (SchemaRegistryError(401, 401, "not yet allowed"), 3),
        (SchemaRegistryError(429, None, "slower"), 3),  # type: ignore[arg-type] # what the client makes of an answer without
        (caused(SerializationError(), httpx2.ReadError("in a rule")), 3),
        (SchemaRegistryError(404, 40403, "no such schema"), 1),
        (SchemaRegistryError(409, 409, "not compatible"), 1),
        (SchemaRegistryError(422, 42201, "not valid"), 1),
        (SerializationError("not like its schema"), 1),
        (EOFError(), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("option", ["decoder", "encoder"])
def test_failures_that_may_pass_are_tried_again_by_the_policy_and_others_are_not(
    option: str, error: BaseException, tries: int
) -> None:
    app, fails = app_of(), Recording(error)

    @app.handler("in", retry=every(10), on_failure="dead_letter", to="out", **{option: fails})  # type: ignore[arg-type] # one of two
    def take(_: penstock.Message) -> str:
        return "text"

    with TestApp(app) as test:
        test.send("in", "x")
        test.advance(100)
        (letter,) = test.dead_letters("in")
        assert test.published("out") == []

    assert len(fails.contexts) == tries
    assert letter.header("__dlq.errors.delivery.count") == str(tries).encode()
    name = (letter.header("penstock-exception-class") or b"").decode()
    assert (name == "penstock.errors.RegistryConnectionError") is (tries == 3)
    assert type(error).__name__ in (letter.header("__dlq.errors.message") or b"").decode() or error.__cause__


def test_while_the_registry_is_away_messages_wait_and_when_it_is_back_they_are_handled_in_order() -> None:
    app, seen, handled = app_of(), [], []

    with http_registry() as registry:
        serializer, deserializer = AvroSerializer(registry.client(), AVRO), AvroDeserializer(registry.client())

        @app.handler("orders", decoder=deserializer, to="out", encoder=serializer, retry=every(10, 10))
        def take(message: penstock.Message) -> object:
            handled.append(message.offset)
            if len(handled) == 1:
                registry.status = 503
            return message.body

        app.handler("out", decoder=deserializer)(lambda message: seen.append(message.body))
        with TestApp(app) as test:
            registry.status = 500
            for _ in range(2):
                test.send("orders", b"\0\0\0\0\x01\x02", key="k")
            test.advance(15)
            assert (handled, test.statistics().in_flight) == ([], 2)
            registry.status = 200
            test.advance(10)
            assert (handled, seen) == ([0], [])  # it was decoded, and not encoded
            registry.status = 200
            test.advance(10)
            statistics = test.statistics()

    assert handled == [0, 0, 1]
    assert seen == [{"number": 1}] * 2
    assert statistics.in_flight == 0


async def asynchronous() -> tuple[object, object]:
    registry = AsyncSchemaRegistryClient.new_client({"url": "mock://"})
    return await AsyncAvroDeserializer(registry), await AsyncAvroSerializer(registry, AVRO)


async def awaited(value: object) -> bytes:
    return str(value).encode()


def yielding(value: object) -> Iterator[bytes]:
    yield str(value).encode()


@pytest.mark.parametrize(
    ("option", "given", "why"),
    [
        ("decoder", AvroDeserializer, "the class: give AvroDeserializer"),
        ("decoder", StringSerializer(), "which StringSerializer is not; that one is for encoder="),
        ("decoder", AvroSerializer, "which AvroSerializer is not; that one is for encoder="),
        ("decoder", AvroDeserializerBuilder(), "give what it builds"),
        (
            "decoder",
            asyncio.run(asynchronous())[0],
            "which AsyncAvroDeserializer is not; no code would await it: give AvroDeserializer",
        ),
        ("encoder", AvroSerializer, "the class: give AvroSerializer"),
        ("encoder", StringDeserializer(), "which StringDeserializer is not; that one is for decoder="),
        (
            "encoder",
            asyncio.run(asynchronous())[1],
            "which AsyncAvroSerializer is not; no code would await it: give AvroSerializer",
        ),
        ("encoder", awaited, "encoder is an `async def`, which nothing awaits"),
        ("encoder", yielding, "encoder yields values that no code reads"),
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_what_cannot_decode_or_encode_is_refused(option: str, given: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        handler(print, **{option: given})
