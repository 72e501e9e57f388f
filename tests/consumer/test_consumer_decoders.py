"""Decoders and filters: what a handler gets as `body`, what never reaches it, and what is done without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from consuming import consumer_of
from stepped_engine import SteppedEngine

from kafka_tools import committed, produce, read_all
from penstock.consumer import handler
from penstock.consumer.handlers.serialization.decoding import decoder_of
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from penstock.message import Message
from waiting import wait_until

NewTopic = Callable[..., str]


class Model:
    """Stands for a pydantic model: known by its class method."""

    def __init__(self, number: int) -> None:
        self.number = number

    @classmethod
    def model_validate_json(cls, value: bytes) -> Model:
        """Take a number."""
        return cls(int(value))


class Struct:
    """Stands for a msgspec struct: known by its fields."""

    __struct_fields__ = ("number",)


def test_values_are_decoded_and_what_cannot_be_goes_to_the_dead_letters_without_a_try(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    values = [b'{"id": 1}', b"\xff\xfe\x00", None, b"", b"[" * 100_000, b'"last"']
    produce(broker.bootstrap_servers, topic, [(b"k", value) for value in values])
    seen: list[tuple[bytes | None, object]] = []

    def keeps(message: Message) -> None:
        seen.append((message.value, message.body))

    with consumer_of(broker, {topic: handler(keeps, decoder="json", on_failure="dead_letter")}) as consumer:
        wait_until(lambda: consumer.statistics().dead_letters == 3 and consumer.statistics().handled == 3)
        statistics = consumer.statistics()

    letters = read_all(broker.bootstrap_servers, f"dlq.{topic}")
    assert seen == [(b'{"id": 1}', {"id": 1}), (None, None), (b'"last"', "last")]
    assert [letter.value() for letter in letters] == [b"\xff\xfe\x00", b"", b"[" * 100_000]
    for letter in letters:
        headers = dict(letter.headers() or [])
        assert headers["__dlq.errors.delivery.count"] == b"1"
        assert headers["penstock-exception-class"] == b"penstock.errors.MessageFormatError"
        assert headers["__dlq.errors.message"].startswith(b"the value cannot be decoded: ")
    assert (statistics.failed, statistics.retried, statistics.in_flight) == (3, 0, 0)
    assert committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset == 6


@pytest.mark.parametrize("decoder", [Model, lambda value: Model(int(value))], ids=["model", "callable"])
def test_a_model_or_a_callable_makes_the_body(decoder: object) -> None:
    seen: list[Message] = []
    stepped = SteppedEngine({"t": handler(seen.append, decoder=decoder, on_failure="drop")})  # type: ignore[arg-type] # both are decoders

    stepped.feed("t", (b"k", b"7"), (b"k", b"no number"), (b"k", None))
    stepped.serve()

    model, tombstone = (message.body for message in seen)
    assert isinstance(model, Model)
    assert (model.number, seen[0].value) == (7, b"7")
    assert tombstone is None
    assert (stepped.count("dropped"), stepped.count("failed")) == (1, 1)
    assert stepped.of("t").tracker.in_flight == 0


def test_a_struct_is_decoded_by_the_package_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    class Decoder:
        def __init__(self, struct: type) -> None:
            self._struct = struct

        def decode(self, value: bytes) -> tuple[type, bytes]:
            return self._struct, value

    monkeypatch.setitem(sys.modules, "msgspec", SimpleNamespace(json=SimpleNamespace(Decoder=Decoder)))

    decode = decoder_of(Struct)

    assert decode is not None
    assert decode(b"x") == (Struct, b"x")


def test_a_pydantic_model_is_a_decoder() -> None:
    pydantic = pytest.importorskip("pydantic")
    order = pydantic.create_model("Order", number=(int, ...))
    seen: list[Message] = []
    stepped = SteppedEngine({"t": handler(seen.append, decoder=order, on_failure="drop")})

    stepped.feed("t", (b"k", b'{"number": 7}'), (b"k", b'{"number": "x"}'))
    stepped.serve()

    assert [message.body for message in seen] == [order(number=7)]
    assert stepped.count("dropped") == 1


class PanicError(BaseException):
    """What a decoder written in Rust raises for its own defects: no `Exception`."""


@pytest.mark.parametrize("where", ["decoder", "filter", "key"])
def test_what_is_no_exception_costs_its_message_and_not_the_consumer(where: str) -> None:
    def panics(given: object) -> bytes:
        value = given.value if isinstance(given, Message) else given
        if value == b"bad":
            raise PanicError
        return b"fine"

    seen: list[bytes | None] = []
    options: dict[str, Callable[..., bytes]] = {where: panics}
    stepped = SteppedEngine({"t": handler(lambda one: seen.append(one.value), on_failure="drop", **options)})  # type: ignore[arg-type] # one of three

    stepped.feed("t", (b"a", b"bad"), (b"b", b"good"))
    stepped.serve()
    for _ in range(30):
        stepped.pass_time(10)

    assert seen == [b"good"]
    assert stepped.count("dropped") == 1
    assert stepped.of("t").tracker.in_flight == 0


@pytest.mark.parametrize("given", ["xml", 7, b"json", object()])
def test_what_is_no_decoder_is_refused(given: object) -> None:
    with pytest.raises(ConfigurationError, match="decoder must be 'json'"):
        handler(print, decoder=given)  # type: ignore[arg-type] # that is what is tested


def test_what_a_filter_refuses_is_done_and_counted_and_never_holds_the_watermark(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    group = f"group-{topic}"
    for tag, count in ((b"other", 300), (b"mine", 5), (b"other", 300)):
        produce(
            broker.bootstrap_servers, topic, [(b"k%d" % (i % 9), tag) for i in range(count)], headers=[("tag", tag)]
        )
    seen: list[bytes | None] = []

    one = handler(lambda message: seen.append(message.value), filter=lambda message: message.header("tag") == b"mine")
    with consumer_of(broker, {topic: one}) as consumer:
        wait_until(lambda: committed(broker.bootstrap_servers, group, topic, 1)[0].offset == 605)
        statistics = consumer.statistics()

    assert seen == [b"mine"] * 5
    assert (statistics.filtered, statistics.handled, statistics.in_flight) == (600, 5, 0)


def test_a_filter_that_raises_is_the_failure_of_its_message_only(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"a", b"bad"), (b"b", b"good"), (b"a", b"behind")])
    seen: list[bytes | None] = []

    def screen(message: Message) -> bool:
        if message.value == b"bad":
            raise LookupError("no such tag")
        return True

    one = handler(lambda message: seen.append(message.value), filter=screen, on_failure="dead_letter")
    with consumer_of(broker, {topic: one}) as consumer:
        wait_until(lambda: consumer.statistics().dead_letters == 1 and consumer.statistics().handled == 2)

    (letter,) = read_all(broker.bootstrap_servers, f"dlq.{topic}")
    assert sorted(value or b"" for value in seen) == [b"behind", b"good"]
    assert letter.value() == b"bad"
    assert dict(letter.headers() or [])["penstock-exception-class"] == b"builtins.LookupError"
