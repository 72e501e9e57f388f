"""Keys with the same meaning: those of one handler, and those of handlers with one `key_space`."""

from __future__ import annotations

from collections.abc import Callable

import tenacity

from penstock import App, DeferredCompletion, Message, retry
from penstock.consumer import handler
from penstock.consumer.handlers.handler import orderings_of
from penstock.message import FixedRecord
from penstock.testing import TestApp

LATER = retry(attempts=3, wait=tenacity.wait_fixed(60))


class Out:
    """A handler whose messages stay out until the test completes them."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, bytes | None]] = []
        self.completions: list[DeferredCompletion] = []

    def __call__(self, message: Message) -> DeferredCompletion:
        """Take a message."""
        self.begun.append((message.topic, message.value))
        self.completions.append(DeferredCompletion())
        return self.completions[-1]


def app_of(users: Callable[..., object], orders: Callable[..., object], key_space: str | None) -> App:
    app = App("app", bootstrap_servers="memory:0")
    app.handler("users", retry=LATER, key_space=key_space)(users)
    app.handler("orders", retry=LATER, key_space=key_space)(orders)
    return app


def test_a_parked_key_of_one_handler_does_not_hold_the_same_key_of_another() -> None:
    seen: list[bytes | None] = []

    def users(_message: Message) -> None:
        raise ConnectionError

    def orders(message: Message) -> None:
        seen.append(message.value)

    with TestApp(app_of(users, orders, None)) as test:
        test.send("users", "user", key="42")
        test.settle()
        test.send("orders", "order", key="42")
        test.settle()

        assert seen == [b"order"]
        assert test.statistics().parked_keys == 1
        test.crash()


def test_handlers_that_share_a_key_space_take_the_messages_of_a_key_one_at_a_time_and_in_order() -> None:
    users, orders = Out(), Out()

    with TestApp(app_of(users, orders, "customer")) as test:
        test.send("users", "1", key="42")
        test.settle()
        test.send("orders", "2", key="42")
        test.send("orders", "other", key="7")
        test.settle()
        test.send("users", "3", key="42")
        test.settle()

        assert (users.begun, orders.begun) == ([("users", b"1")], [("orders", b"other")])
        users.completions[0].complete()
        test.settle()
        assert (len(users.begun), orders.begun[1:]) == (1, [("orders", b"2")])
        orders.completions[1].complete()
        test.settle()
        assert users.begun[1:] == [("users", b"3")]
        for completion in (*users.completions, *orders.completions):
            completion.complete()


def test_a_key_that_is_parked_in_a_shared_space_holds_the_key_of_all_its_handlers_until_its_retry() -> None:
    seen: list[tuple[str, bytes | None]] = []

    def users(message: Message) -> None:
        seen.append((message.topic, message.value))
        if len(seen) == 1:
            raise ConnectionError

    def orders(message: Message) -> None:
        seen.append((message.topic, message.value))

    with TestApp(app_of(users, orders, "customer")) as test:
        test.send("users", "user", key="42")
        test.settle()
        test.send("orders", "order", key="42")
        test.settle()
        assert seen == [("users", b"user")]
        held = next(explanation for explanation in test.explain() if explanation.topic == "orders")
        test.advance(61)

    assert seen == [("users", b"user")] * 2 + [("orders", b"order")]
    assert held.state == "behind its key"
    assert held.detail == "it waits for users:0@0 of its key"


def test_a_message_without_a_key_waits_for_those_of_its_handler_only() -> None:
    app, users, orders = App("app", bootstrap_servers="memory:0"), Out(), Out()
    app.handler("users", keyless="together")(users)
    app.handler("orders", keyless="together")(orders)

    with TestApp(app) as test:
        test.send("users", "1")
        test.send("orders", "2")
        test.settle()

        assert (len(users.begun), len(orders.begun)) == (1, 1)
        for completion in (*users.completions, *orders.completions):
            completion.complete()


def fail(_message: Message) -> None:
    raise ConnectionError


def test_keys_of_one_space_have_one_lane_and_those_of_several_have_several() -> None:
    handlers = {
        "users": handler(fail, key_space="customer"),
        "orders": handler(fail, key_space="customer"),
        "prices": handler(fail),
        "rates": handler(fail),
    }
    orderings = orderings_of(handlers, 1024)
    records = {topic: [FixedRecord(topic, 0, i, b"%d" % i, b"", (), 0) for i in range(200)] for topic in handlers}

    lanes = {topic: order.lane_numbers(topic, 0, records[topic]) for topic, order in orderings.items()}
    identities = {topic: [order.identity(record) for record in records[topic]] for topic, order in orderings.items()}

    assert lanes["users"] == lanes["orders"]
    assert identities["users"] == identities["orders"]
    for topic, other in (("users", "prices"), ("prices", "rates"), ("users", "rates")):
        assert set(identities[topic]).isdisjoint(identities[other])
        assert sum(a == b for a, b in zip(lanes[topic], lanes[other], strict=True)) < 5
