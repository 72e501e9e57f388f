"""Retry topics: the way there and back, the trust in their headers, and that they block no other message."""

from __future__ import annotations

from collections import Counter

import pytest
import tenacity
from confluent_kafka import TopicPartition

from penstock.app import App
from penstock.consumer import CallNext, DeferredCompletion, retry
from penstock.consumer.retry_topics import (
    DUE,
    ORIGIN,
    ROUND,
    TRIES,
    first_place,
    former_retry_topics,
    headers,
    retry_topic,
    retry_topics,
    tries_before,
)
from penstock.dead_letters.headers import own_headers, read
from penstock.message import FixedRecord, Headers, Message
from penstock.testing import TestApp
from support.consumers import ONCE, Handled, PoisonError, app_of


def record(*fields: tuple[str, bytes | None], topic: str = "retry.g.t.1s", offset: int = 7) -> FixedRecord:
    return FixedRecord(topic, 1, offset, b"k", b"v", fields, 0)


@pytest.mark.parametrize("reset", ["latest", "error"])
def test_what_waits_in_a_retry_topic_is_never_passed_over_by_auto_offset_reset(reset: str) -> None:
    handled: list[bytes | None] = []
    app = app_of(config={"auto.offset.reset": reset})
    app.handler("t", retry_delays=(30,))(lambda message: handled.append(message.value))
    test, waits_in = TestApp(app), retry_topic("app", "t", 30)
    test.broker.create_topic("t")
    test.broker.create_topic(waits_in)
    # As where a member was killed that had committed the message's own offset only.
    former = test.broker.consumer({"group.id": "app"})
    former.commit(offsets=[TopicPartition("t", 0, 1)], asynchronous=False)
    former.close()
    for topic in ("t", waits_in):
        test.send(topic, topic)

    with test:
        test.advance(2)
        committed = test.committed(waits_in)

    assert (handled, committed) == ([waits_in.encode()], {0: 1})


@pytest.mark.parametrize("dead_letter_format", ["kafka", "spring"])
def test_a_message_takes_its_rounds_and_its_dead_letter_tells_where_it_first_came_from(dead_letter_format: str) -> None:
    app, handled, options = app_of(), Handled(), {"dead_letter_format": dead_letter_format}
    app.handler("t", retry=ONCE, retry_delays=(30, 600), on_failure="dead_letter", **options)(handled)  # type: ignore[arg-type] # a name

    with TestApp(app, partitions=2) as test:
        for value in ("fine", "poison", "behind"):
            test.send("t", value, key="k")
        test.advance(2)
        # It waits, and holds neither its key nor the watermark.
        at_first, offsets = list(handled.calls), test.committed("t")
        test.advance(30)
        second_round = handled.calls.count("poison")
        test.advance(600)
        (letter,), now = test.dead_letters("t"), test.statistics()

    origin = read(letter.headers)
    (partition,) = {message.partition for message in handled.done}
    assert (at_first, second_round, handled.calls.count("poison")) == (["fine", "poison", "behind"], 2, 3)
    assert offsets[partition] == 3
    assert origin is not None
    assert (origin.topic, origin.partition, origin.offset) == ("t", partition, 1)
    assert not [name for name, _ in letter.headers if name.startswith("penstock-retry-")]
    assert (now.retry_topic, now.handled, now.received) == (2, 2, 5)


def test_a_retry_waits_for_a_completion_of_its_key_that_is_out_and_then_holds_the_key_itself() -> None:
    app, out = app_of(), dict[bytes | None, DeferredCompletion]()

    @app.handler("t", retry_delays=(30,))
    def put_off(message: Message) -> DeferredCompletion:
        return out.setdefault(message.value, DeferredCompletion())

    with TestApp(app) as test:
        test.send("t", "first", key="k")
        test.settle()
        test.send(retry_topic("app", "t", 30), "again", key="k")
        test.settle()
        while_out = list(out)
        out[b"first"].complete()
        test.settle()
        test.send("t", "later", key="k")
        test.settle()
        while_again = list(out)
        out[b"again"].complete()
        test.settle()
        out[b"later"].complete()

    assert (while_out, while_again) == ([b"first"], [b"first", b"again"])
    assert list(out) == [b"first", b"again", b"later"]


def test_forged_headers_cost_their_message_a_bounded_wait_and_no_further_rounds() -> None:
    app, seen = app_of(), Counter[bytes | None]()
    retries = retry_topic("app", "t", 40)
    forged: dict[bytes, list[tuple[str, bytes | None]]] = {
        b"far future": [(DUE, b"99999999999999"), (ROUND, b"2")],
        b"garbage": [(DUE, b"\xff\x00soon"), (ROUND, b"-5"), (ORIGIN, b"\xff/\xff/\xff")],
        b"nothing": [],
        b"null": [(DUE, None), (ROUND, None), (ORIGIN, None)],
        b"no rounds": [(DUE, b"0"), (ROUND, b"0"), (ORIGIN, b"elsewhere/1/2")],
        b"many": [(ROUND, b"999999999999999"), (DUE, b"9" * 400), (ORIGIN, b"t/3/99")],
    }

    @app.handler("t", retry=ONCE, retry_delays=(20, 40), on_failure="dead_letter")
    def fail(message: Message) -> None:
        seen[message.value] += 1
        raise PoisonError

    with TestApp(app) as test:
        test.settle()
        for value, fields in forged.items():
            test.send(retries, value, key="k", headers=fields)
        test.advance(100)
        letters = {letter.value: read(letter.headers) for letter in test.dead_letters("t")}

    # Round 0 is taken for the first, after which there is one more; all others had their last.
    assert seen == {**dict.fromkeys(forged, 1), b"no rounds": 2}
    places = {value: (origin.topic, origin.offset) for value, origin in letters.items() if origin}
    assert {value: topic for value, (topic, _) in places.items()} == {**dict.fromkeys(forged, retries), b"many": "t"}
    assert places[b"many"] == ("t", 99)


def test_an_origin_is_believed_only_in_the_retry_topic_and_only_of_its_own_topic() -> None:
    origin: tuple[str, bytes | None] = (ORIGIN, b"t/3/99")

    assert first_place(record(origin), "t")[:3] == ("t", 3, 99)
    assert first_place(record(origin), "other")[:3] == ("retry.g.t.1s", 1, 7)
    assert first_place(record(origin, topic="t"), "t")[:3] == ("t", 1, 7)
    assert first_place(record((ORIGIN, b"t/3/" + b"9" * 40)), "t")[:3] == ("retry.g.t.1s", 1, 7)


def test_the_origin_outlives_every_round_and_headers_do_not_pile_up() -> None:
    fields: Headers = (("own", b"1"), ("own", None))
    first = headers(record(*fields, topic="t", offset=5), "t", 1, 100.0, 3)
    carried = tuple((name, value.encode() if isinstance(value, str) else value) for name, value in first)

    second = headers(record(*carried), "t", 2, 200.0, 2)

    assert second == [*fields, (ROUND, "2"), (DUE, "200000"), (ORIGIN, "t/1/5/0"), (TRIES, "5")]
    assert own_headers(record(*carried)) == list(fields)


def test_key_filter_decoder_and_middlewares_see_a_retry_with_the_place_of_its_origin() -> None:
    seen: list[tuple[str, str, int, int]] = []

    def notes(message: Message, call_next: CallNext) -> object:
        seen.append(("middleware", message.topic, message.partition, message.offset))
        return call_next(message)

    def asked(message: Message) -> object:
        seen.append(("asked", message.topic, message.partition, message.offset))
        return b"k"

    app = app_of(middlewares=[notes])

    @app.handler("t", retry=ONCE, retry_delays=(10,), on_failure="drop", key=asked, filter=asked, decoder="json")
    def fail(message: Message) -> None:
        seen.append((f"handler {message.body}", message.topic, message.partition, message.offset))
        raise PoisonError

    with TestApp(app, partitions=2) as test:
        test.send("t", "0", partition=1)
        test.send("t", "1", partition=1)
        test.advance(30)

    assert len([value for value in seen if value[0].startswith("handler")]) == 4
    assert {value[:2] for value in seen} == {(name, "t") for name in ("middleware", "asked", "handler 0", "handler 1")}
    assert {value[2:] for value in seen if value[0] == "handler 1"} == {(1, 1)}


def test_tries_of_all_rounds_count_and_a_forged_count_does_not(caplog: pytest.LogCaptureFixture) -> None:
    app, attempts = app_of(), list[int]()

    @app.handler(
        "t", retry=retry(attempts=3, wait=tenacity.wait_fixed(1)), retry_delays=(10, 20), on_failure="dead_letter"
    )
    def fail(message: Message) -> None:
        attempts.append(message.attempt)
        raise PoisonError

    with TestApp(app) as test:
        test.send("t", "poison")
        test.advance(60)
        (letter,) = test.dead_letters("t")

    assert attempts == list(range(1, 10))
    assert (letter.header("__dlq.errors.delivery.count"), "is in dlq.t after 9 tries" in caplog.text) == (b"9", True)
    assert [tries_before(record((TRIES, text)), "t") for text in (b"7", b"-1", b"x", b"9" * 40)] == [7, 0, 0, 0]
    assert tries_before(record((TRIES, b"7"), topic="t"), "t") == 0


def test_a_retry_topic_is_called_by_group_topic_and_delay() -> None:
    delays = (0.0001, 0.5, 1.5, 60, 60.0, 3600)

    assert retry_topics("sms", "orders", delays) == {
        "retry.sms.orders.1ms": 0.0001,
        "retry.sms.orders.500ms": 0.5,
        "retry.sms.orders.1500ms": 1.5,
        "retry.sms.orders.60s": 60,
        "retry.sms.orders.3600s": 3600,
    }
    existing = [
        "60s",
        "orders",
        "retry.sms.orders",
        "retry.sms.orders.",
        "retry.sms.orders.7",
        "retry.sms.orders.eu.7s",
    ]
    existing += ["retry.mail.orders.7s", "retry.sms.orders.500ms", "retry.sms.orders.7s"]
    assert former_retry_topics("sms", "orders", existing) == {
        "retry.sms.orders.500ms": 0.5,
        "retry.sms.orders.7s": 7.0,
    }


def test_a_message_that_waits_for_a_removed_delay_is_handled_all_the_same() -> None:
    seen: list[tuple[bytes | None, int]] = []

    def app_with(*delays: float) -> App:
        app = app_of()

        @app.handler("t", retry=ONCE, retry_delays=delays, on_failure="drop")
        def fail(message: Message) -> None:
            seen.append((message.value, message.attempt))
            raise PoisonError

        return app

    with TestApp(app_with(60, 3600)) as first:
        first.send("t", "poison")
        first.advance(100)
        assert [message.value for message in first.published("retry.app.t.3600s")] == [b"poison"]
    with TestApp(app_with(10), first.broker) as second:
        second.advance(4000)
        assert second.statistics().dropped == 1

    assert seen == [(b"poison", 1), (b"poison", 2), (b"poison", 3)]


def app_of_delays(seen: list[tuple[bytes | None, float]], clock: list[TestApp], **limits: int) -> App:
    """An app that fails all, and tries again after 5 s, then after an hour."""
    app = app_of(**limits)

    @app.handler("t", retry=ONCE, retry_delays=(5, 3600), on_failure="drop")
    def fail(message: Message) -> None:
        seen.append((message.value, clock[0].clock.monotonic()))
        raise PoisonError

    return app


@pytest.mark.parametrize("limits", [{"max_in_flight": 2}, {"max_in_flight_bytes": 4_000}])
def test_messages_that_wait_for_a_long_delay_hold_back_none_that_waits_for_a_short_one(limits: dict[str, int]) -> None:
    seen: list[tuple[bytes | None, float]] = []
    clock: list[TestApp] = []

    with TestApp(app_of_delays(seen, clock, **limits)) as test:
        clock.append(test)
        for number in range(50):
            test.send("t", f"early {number}")
        test.advance(300)
        # All of them wait for the hour now, more than may be parked.
        begun = test.clock.monotonic()
        test.send("t", "late")
        test.advance(30)

        tries = [at - begun for value, at in seen if value == b"late"]
        assert len(tries) == 2
        assert tries[1] <= 7
        test.crash()
