"""confluent-kafka's serializers and deserializers as `encoder=` and `decoder=`, with a registry."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from confluent_kafka.schema_registry.avro import (
    AvroSerializer,
)
from confluent_kafka.serialization import (
    MessageField,
    SerializationContext,
)
from serdes_apps import VALUE, Recording, framed

import penstock
from penstock import Outgoing
from penstock.consumer.handlers.serialization import RecordEncoder, encoder_of
from penstock.testing import TestApp
from registries import mock_registry, order, serdes_of
from support.consumers import app_of

ORIGINAL_KEY = "sr_original_key"


#: In Avro six bytes: confluent-kafka reads nothing shorter, also where the schema's id is in the headers.
BIG = 1 << 40


def variables() -> set[str]:
    """Return the names of the context variables that are set here."""
    return {variable.name for variable in contextvars.copy_context()}


@pytest.mark.parametrize("in_headers", [False, True], ids=["prefix", "headers"])
@pytest.mark.parametrize("kind", ["avro", "json", "protobuf"])
def test_values_go_out_by_a_serializer_and_come_in_by_a_deserializer(kind: str, in_headers: bool) -> None:
    serializer, deserializer = serdes_of(kind, mock_registry(), in_headers=in_headers)
    app, seen = app_of(), []

    @app.handler("numbers", to="orders", encoder=serializer)
    def take(message: penstock.Message) -> Any:
        number = BIG + int(message.value or b"0")
        if number % 2:
            return order(kind, number)
        return [Outgoing("orders", order(kind, number), headers={"from": "list"}), Outgoing("orders", None)]

    @app.handler("orders", decoder=deserializer)
    async def keep(message: penstock.Message) -> None:
        seen.append(message.body)

    with TestApp(app) as test:
        for number in range(4):
            test.send("numbers", str(number))
        test.settle()
        written = [sent for sent in test.published("orders") if sent.value is not None]

    assert [value for value in seen if value is not None] == [order(kind, BIG + number) for number in range(4)]
    assert seen.count(None) == 2  # tombstones, which nothing encodes or decodes
    assert all(value.value.startswith(b"\0") is not in_headers for value in written if value.value)
    assert [dict(value.headers).get("from") for value in written] == [b"list", None] * 2
    assert all(("__value_schema_id" in dict(value.headers)) is in_headers for value in written)


def test_a_serializer_gets_the_topic_the_field_and_the_headers() -> None:
    app, decoder, encoder = app_of(), Recording(), Recording()
    attempts = []

    @app.handler("in", decoder=decoder, encoder=encoder, retry=penstock.retry(1), retry_delays=[60])
    def take(message: penstock.Message) -> Outgoing:
        attempts.append(message.attempt)
        if len(attempts) == 1:
            raise ValueError
        return Outgoing("out", "text", headers={"a": "1"})

    with TestApp(app, topics=["out"]) as test:
        test.send("in", b"x", headers=[("h", b"2")])
        test.advance(100)
        assert [sent.value for sent in test.published("out")] == [b"text"]

    (topic, field, headers), (again, _, later) = decoder.contexts
    assert (topic, field, headers) == ("in", MessageField.VALUE, [("h", b"2")])
    assert (again, later[0]) == ("in", ("h", b"2"))  # from its retry topic
    assert encoder.contexts == [("out", MessageField.VALUE, [("a", b"1")])]


class SlowSubjects(set[str]):
    """The subjects that a serializer knows: the second thread is answered when the first is through."""

    def __init__(self) -> None:
        super().__init__()
        self.second_asks, self.first_is_through = threading.Event(), threading.Event()

    def __contains__(self, subject: object) -> bool:
        if threading.current_thread().name.startswith("second"):
            self.second_asks.set()
            self.first_is_through.wait(30)
        return super().__contains__(subject)


@pytest.mark.parametrize("kind", ["avro", "json", "protobuf"])
def test_threads_that_have_the_first_value_of_a_topic_do_not_meet_in_the_serializer(kind: str) -> None:
    serializer, _ = serdes_of(kind, mock_registry())
    subjects = serializer._known_subjects = SlowSubjects()  # type: ignore[attr-defined] # where the race is
    one, another = (encoder_of(serializer) for _ in range(2))  # of two handlers
    registers = serializer._registry.register_schema_full_response  # type: ignore[attr-defined] # the first is held in it

    def encode(encoder: Any, thread: str) -> Future[Any]:
        return ThreadPoolExecutor(1, thread).submit(encoder.encode, "orders", order(kind, 1), [])

    def held(*given: Any, **more: Any) -> Any:
        second.append(encode(another, "second"))
        # With the lock, the second does not come so far.
        subjects.second_asks.wait(0.3)
        return registers(*given, **more)

    serializer._registry.register_schema_full_response = held  # type: ignore[attr-defined] # the same
    second: list[Future[Any]] = []
    first = encode(one, "first").result(30)
    subjects.first_is_through.set()

    assert isinstance(one, RecordEncoder)
    assert isinstance(first, bytes)
    assert first == second[0].result(30)


def test_no_context_variable_is_left_behind() -> None:
    serializer, deserializer = serdes_of("avro", mock_registry())
    app, found = app_of(), []

    @app.handler("orders", decoder=deserializer, to="out", encoder=serializer)
    def take(message: penstock.Message) -> object:
        found.append(variables())
        return message.body

    @app.handler("out", decoder=deserializer)
    async def keep(_: penstock.Message) -> None:
        found.append(variables())

    context = contextvars.copy_context()
    value = context.run(serializer, {"number": 1}, VALUE)
    assert ORIGINAL_KEY in {variable.name for variable in context}  # or there would be nothing to try
    with TestApp(app) as test:
        for _ in range(2):
            test.send("orders", value)
        test.settle()

    assert len(found) == 4
    assert ORIGINAL_KEY not in set().union(*found, variables())


def test_a_schema_id_that_came_with_the_headers_of_another_message_is_not_passed_on() -> None:
    registry = mock_registry()
    by_header, deserializer = serdes_of("avro", registry, in_headers=True)
    name = '{"type": "record", "name": "Name", "fields": [{"name": "name", "type": "string"}]}'
    app, seen = app_of(), []
    encoders = {"prefixed": AvroSerializer(registry, name), "headed": by_header, "bytes": by_header}
    for topic, encoder in encoders.items():

        @app.handler(f"to-{topic}", decoder=deserializer, encoder=encoder)
        def take(message: penstock.Message, topic: str = topic) -> Outgoing:
            value = {"prefixed": {"name": "n"}, "headed": {"number": BIG + 1}, "bytes": message.value}[topic]
            return Outgoing("out", value, headers=message.headers)

    app.handler("out", decoder=deserializer)(lambda message: seen.append(message.body))
    context = SerializationContext("to-prefixed", MessageField.VALUE, [])
    value = framed(by_header, {"number": BIG}, context)

    with TestApp(app) as test:
        for topic in encoders:
            test.send(f"to-{topic}", value, headers=context.headers)
            test.settle()
        ids = [[header for header, _ in sent.headers].count("__value_schema_id") for sent in test.published("out")]

    assert seen == [{"name": "n"}, {"number": BIG + 1}, {"number": BIG}]
    assert ids == [0, 1, 1]


def test_nothing_of_a_registry_is_imported_for_those_who_use_none() -> None:
    program = (
        "import sys, penstock\n"
        "app = penstock.App('a', bootstrap_servers='memory:0')\n"
        "app.handler('t', decoder='json', to='u', encoder='json')(lambda message: message.body)\n"
        "from penstock.testing import TestApp\n"
        "with TestApp(app) as test:\n"
        "    test.send('t', '1')\n"
        "    test.settle()\n"
        "    assert len(test.published('u')) == 1\n"
        "print([n for n in sys.modules if n.startswith(('confluent_kafka.schema', 'httpx', 'fastavro', 'authlib'))])"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
