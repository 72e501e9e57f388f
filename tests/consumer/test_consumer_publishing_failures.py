"""Results that cannot be published, and producers that fail: on a broker in memory."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from confluent_kafka import KafkaError
from publishing_apps import in_flight, written

import penstock
from penstock import Outgoing
from penstock.errors import TopicNotFoundError
from penstock.testing import Operation, TestApp, TestBroker
from support.consumers import app_of


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (Outgoing("out", {"a": 1}), "value must be bytes, text or None, but is a dict; encode it first, or give"),
        (Outgoing("out", "\ud800"), "value is text that cannot be encoded as UTF-8"),
        (Outgoing("out", b"v", 7), "key must be bytes, text or None, but is a int"),  # type: ignore[arg-type] # wrong
        (Outgoing("out", b"v", "\ud800"), "key is text that cannot be encoded as UTF-8"),
        (Outgoing("", b"v"), "topic must be a topic's name, but is ''"),
        (Outgoing("o\0ut", b"v"), "topic must be a topic's name"),
        (Outgoing("\ud800", b"v"), "topic must be a topic's name"),
        (Outgoing("out", b"v", partition=-1), "partition must be a number from 0, or None, but is -1"),
        (Outgoing("out", b"v", partition=1 << 31), "partition must be a number from 0"),
        (Outgoing("out", b"v", headers=[("a", 1)]), "header a must be bytes, text or None"),  # type: ignore[list-item] # wrong
        (Outgoing("out", b"v", headers=[("a",)]), "is a tuple that is no pair"),  # type: ignore[list-item] # wrong
        (Outgoing("out", b"v", headers={"a": "\ud800"}), "header a is text that cannot be encoded"),
        (Outgoing("out", b"v", headers={"\ud800": b""}), "a header's name is text that cannot be encoded"),
        (Outgoing("out", b"v", headers={"a\0b": b""}), "header names must be text without NUL"),
        ([Outgoing("out", b"v"), b"plain"], "returned a bytes among its messages"),
    ],
    ids=repr,
)
def test_what_cannot_be_a_message_is_a_failure_that_is_not_tried_again(
    returned: object, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    app, tries = app_of(), list[None]()

    @app.handler("in", on_failure="dead_letter", retry=penstock.retry(attempts=9))
    def handle(_: penstock.Message) -> object:
        tries.append(None)
        return returned

    with TestApp(app, topics=["out"]) as test:
        test.send("in", b"payload")
        test.settle()
        (dead,) = test.dead_letters("in")
        assert test.published("out") == []

    said = dict(dead.headers)["__dlq.errors.message"] or b""
    assert what in said.decode()
    assert [
        what in line.getMessage() for line in caplog.records if "is in dlq.in after 1 try:" in line.getMessage()
    ] == [True]
    assert len(tries) == 1


async def _work(_: penstock.Message) -> None:
    """Not started: a call returns a coroutine."""


async def _stream(_: penstock.Message) -> AsyncIterator[Outgoing]:
    yield Outgoing("out", b"v")


class Pending:
    def __await__(self) -> Iterator[None]:
        yield


@pytest.mark.parametrize(
    "handle",
    [
        lambda message: _work(message),  # noqa: PLW0108 - given as it is it would be awaited
        lambda message: _stream(message),  # noqa: PLW0108 - as above
        lambda _: Pending(),
        lambda _: concurrent.futures.Future(),
    ],
    ids=["coroutine", "stream", "awaitable", "future"],
)
@pytest.mark.parametrize("options", [{}, {"batch": 2}, {"to": "out", "encoder": str}], ids=["", "batch", "to"])
@pytest.mark.parametrize("is_list", [False, True])
def test_a_returned_awaitable_fails_its_message(handle: Any, options: Any, is_list: bool) -> None:
    if is_list:
        alone, handle = handle, lambda message: [alone(message)]
        options = {name: value for name, value in options.items() if name == "batch"}  # with `to` a list is a value
    app = app_of()
    app.handler("in", on_failure="dead_letter", **options)(handle)

    with TestApp(app, topics=["out"]) as test:
        test.send("in", b"v", key="k")
        test.settle()
        (dead,) = test.dead_letters("in")
        assert test.published("out") == []

    assert (dict(dead.headers)["__dlq.errors.message"] or b"") != b""


class Truthless:
    """As an array or a frame is: compared it gives no boolean, and has no truth value."""

    def __eq__(self, _other: object) -> Any:
        return self

    __hash__ = None  # type: ignore[assignment] # as theirs

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")


@dataclass
class Order:
    """A type for an encoder."""

    number: int


@pytest.mark.parametrize(
    ("encoder", "value", "error"),
    [
        ("json", {"n": [float("nan")]}, b"ValueError"),
        ("json", {"n": [float("inf")]}, b"ValueError"),
        ("json", {"n": [-float("inf")]}, b"ValueError"),
        (Order, ["no order"], b"PydanticSerializationError"),
    ],
)
def test_what_json_does_not_have_or_its_type_is_not_fails_its_message(encoder: Any, value: Any, error: bytes) -> None:
    app = app_of()
    app.handler("in", to="out", encoder=encoder, batch=2, on_failure="dead_letter")(
        lambda batch: [value if message.value == b"v" else b"fine" for message in batch]
    )

    with TestApp(app) as test:
        test.send("in", b"v")
        test.send("in", b"other")
        test.settle()
        (dead,) = test.dead_letters("in")
        assert written(test) == [(None, b"fine")]

    assert b"cannot be encoded: " + error in (dict(dead.headers)["__dlq.errors.message"] or b"")


def test_json_that_was_taken_is_written_again_with_its_lone_surrogates() -> None:
    app, value = app_of(), b'{"text":"\\ud800 \xc3\xa9"}'
    app.handler("in", decoder="json", to="out", encoder="json")(lambda message: message.body)

    with TestApp(app) as test:
        test.send("in", value)
        test.settle()
        assert [message.value for message in test.published("out")] == [value]


@pytest.mark.parametrize("returns", [lambda _: 42, lambda _: Truthless(), lambda _: (yield 42)])
def test_a_value_that_means_nothing_is_said_once_and_the_message_is_done(
    returns: Callable[[object], object], caplog: pytest.LogCaptureFixture
) -> None:
    app = app_of()
    app.handler("in")(returns)

    with TestApp(app) as test, caplog.at_level(logging.WARNING):
        for _ in range(5):
            test.send("in", b"v")
        test.settle()
        assert (test.statistics().handled, in_flight(test)) == (5, 0)

    said = [record.message for record in caplog.records if "is not published" in record.message]
    assert len(said) == 1
    assert f" {type(returns(None)).__name__}, which is not published: return penstock.Outgoing, name the" in said[0]


def test_results_that_timed_out_are_written_again_in_their_order_and_no_handler_is_called_again() -> None:
    app, broker, tries = app_of(), TestBroker(0), list[bytes | None]()

    @app.handler("in", to="out", on_failure="drop")
    def handle(message: penstock.Message) -> bytes | None:
        tries.append(message.value)
        return message.value

    with TestApp(app, broker) as test:
        broker.fail("produce", KafkaError._MSG_TIMED_OUT, times=3)
        for value in (b"1", b"2", b"3"):
            test.send("in", value, key="k")
        test.settle()
        test.advance(60)
        assert broker.faults.happened[Operation.PRODUCE]
        out = [value for _, value in written(test)]
        assert (test.statistics().failed, in_flight(test)) == (0, 0)

    assert tries == [b"1", b"2", b"3"]
    assert out == [b"1", b"2", b"3"]


def test_a_refused_result_is_a_failure_of_its_message_and_of_no_other() -> None:
    app, tries = app_of(), list[bytes | None]()

    @app.handler("in", retry=penstock.retry(attempts=3, wait=lambda _: 1.0), on_failure="dead_letter")
    def handle(message: penstock.Message) -> Outgoing:
        tries.append(message.value)
        return Outgoing("absent" if message.value == b"bad" else "out", message.value, message.key)

    with TestApp(app, topics=["out"]) as test:
        for value in ("1", "bad", "2", "3"):
            test.send("in", value, key="k")
        test.settle()
        test.advance(10)
        (dead,) = test.dead_letters("in")
        assert written(test) == [(b"k", b"1"), (b"k", b"2"), (b"k", b"3")]
        assert in_flight(test) == 0

    assert dead.value == b"bad"
    assert tries.count(b"bad") == 3
    assert b"absent refuses the result of a handler" in (dict(dead.headers)["__dlq.errors.message"] or b"")


def test_a_batch_that_returns_too_many_plain_values_fails() -> None:
    app = app_of()
    app.handler("in", batch=4, to="out", on_failure="dead_letter")(lambda _: [b"too many"] * 9)

    with TestApp(app) as test:
        test.send("in", b"v")
        test.settle()
        (dead,) = test.dead_letters("in")

    assert b"return a list with a value for each of them" in (dict(dead.headers)["__dlq.errors.message"] or b"")


def test_a_topic_named_with_to_that_is_absent_is_said_at_the_start() -> None:
    app = app_of()
    app.handler("in", to="out")(lambda message: message.value)
    test = TestApp(app)
    test._topics.pop("out")

    with pytest.raises(TopicNotFoundError, match="out; create it first"):
        test.start()
