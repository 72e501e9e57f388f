"""`Message.attempt`: how often a message was tried before, in the process and in retry topics alike."""

from __future__ import annotations

import tenacity

from penstock import App
from penstock.consumer import retry
from penstock.message import Message
from penstock.testing import TestApp

THREE_TIMES = retry(attempts=3, wait=tenacity.wait_fixed(1))


def an_app() -> App:
    return App("app", bootstrap_servers="unused:1")


def test_a_plain_handler_sees_how_often_its_message_was_tried_before() -> None:
    app, seen = an_app(), list[tuple[bytes | None, int]]()

    @app.handler("t", retry=THREE_TIMES, on_failure="drop")
    def handle(message: Message) -> None:
        seen.append((message.value, message.attempt))
        if message.value == b"bad":
            raise ValueError

    with TestApp(app) as test:
        for value in ("good", "bad", "behind"):
            test.send("t", value, key="k")
        test.advance(10)

    # The count is of the message, not of its key.
    assert seen == [(b"good", 0), (b"bad", 0), (b"bad", 1), (b"bad", 2), (b"behind", 0)]


def test_the_messages_of_a_batch_count_each_for_itself() -> None:
    app, seen = an_app(), list[list[tuple[bytes | None, int]]]()

    @app.handler("t", batch=3, retry=retry(attempts=2, wait=tenacity.wait_fixed(1)), on_failure="drop")
    def handle(messages: list[Message]) -> None:
        seen.append([(message.value, message.attempt) for message in messages])
        if any(message.value == b"1" for message in messages):
            raise ValueError

    with TestApp(app) as test:
        for number in range(4):
            test.send("t", str(number), key="k")
        test.advance(20)

    assert seen == [
        [(b"0", 0), (b"1", 0), (b"2", 0)],
        [(b"0", 1), (b"1", 1), (b"2", 1)],
        # The policy gave the batch up: now each alone.
        [(b"0", 2)],
        [(b"1", 2)],
        [(b"1", 3)],
        [(b"2", 2)],
        [(b"3", 0)],
    ]
