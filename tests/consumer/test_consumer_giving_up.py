"""Requests to give up the message that holds a partition: the effects, and the refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from confluent_kafka import Producer
from tenacity import stop_never, wait_fixed

import penstock
from kafka_tools import read_all
from penstock.devbroker import DevBroker
from penstock.errors import NotGivenUpError
from penstock.testing import TestApp
from waiting import wait_until


def failing(on_failure: str, **options: object) -> tuple[penstock.App, list[bytes | None]]:
    """Return an app whose handler fails for "bad", and the values that it was done with."""
    # No limit counts what was asked for.
    limit = penstock.DeadLetterLimit(consecutive=1)
    app = penstock.App("sms", bootstrap_servers="in memory", dead_letter_limit=limit)
    done: list[bytes | None] = []

    @app.handler("orders", retry=penstock.retry(attempts=9, wait=wait_fixed(60)), on_failure=on_failure, **options)  # type: ignore[arg-type] # options of the test's
    def handle(message: penstock.Message) -> None:
        if message.value == b"bad":
            raise ValueError("no good")
        done.append(message.value)

    return app, done


@pytest.mark.parametrize("on_failure", ["stop", "dead_letter", "drop", "hold"])
def test_a_message_that_waits_for_its_retry_is_given_up_whatever_its_handler_chose(on_failure: str) -> None:
    app, done = failing(on_failure)
    with TestApp(app) as test:
        test.send("orders", "bad", key="1")
        test.send("orders", "next", key="1")
        test.settle()

        given = test.give_up("orders", 0, 0)
        test.advance(2)

        [letter] = test.published("dlq.orders")
        headers = dict(letter.headers)
        assert (given, letter.value, done) == ("dlq.orders", b"bad", [b"next"])
        assert headers["penstock-exception-class"] == b"penstock.errors.GivenUpError"
        assert b"after 1 try, the last of which failed with ValueError" in headers["__dlq.errors.message"]
        assert test.committed("orders") == {0: 2}


def test_a_batch_that_failed_as_a_whole_goes_on_without_the_message_that_is_given_up() -> None:
    app = penstock.App("sms", bootstrap_servers="in memory")
    done: list[bytes | None] = []

    @app.handler("orders", batch=10, retry=penstock.retry(attempts=9, wait=wait_fixed(60)))
    def handle(messages: list[penstock.Message]) -> None:
        values = [message.value for message in messages]
        if b"bad" in values:
            raise ValueError("no good")
        done.extend(values)

    with TestApp(app) as test:
        for key, value in [("1", "bad"), ("2", "b"), ("1", "c")]:
            test.send("orders", value, key=key)
        test.settle()

        test.give_up("orders", 0, 0)
        test.advance(120)

        assert sorted(filter(None, done)) == [b"b", b"c"]
        assert [message.value for message in test.published("dlq.orders")] == [b"bad"]


def test_a_message_of_a_retry_topic_is_given_up_before_its_time() -> None:
    app = penstock.App("sms", bootstrap_servers="in memory")

    @app.handler("orders", retry=penstock.retry(attempts=1), retry_delays=[3600], on_failure="dead_letter")
    def handle(message: penstock.Message) -> None:
        raise ValueError("no good")

    with TestApp(app) as test:
        test.send("orders", "bad", key="1")
        test.advance(2)

        assert test.give_up("retry.sms.orders.3600s", 0, 0) == "dlq.orders"
        assert [sent.value for sent in test.dead_letters("orders")] == [b"bad"]


def no_such_partition(test: TestApp) -> None:
    test.give_up("orders", 7, 0)


def another_offset(test: TestApp) -> None:
    test.give_up("orders", 0, 1)


def behind_its_key(test: TestApp) -> None:
    test.give_up("orders", 0, 0)
    test.give_up("orders", 0, 0)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (no_such_partition, r"orders:7@0 was not given up: this member does not have orders:7"),
        (another_offset, r"orders:0@1 was not given up: it does not hold orders:0; offset 0, parked, does"),
        (behind_its_key, r"orders:0@0 was not given up: it does not hold orders:0; nothing does"),
    ],
)
def test_what_does_not_hold_its_partition_is_not_given_up(ask: Callable[[TestApp], None], said: str) -> None:
    app, _ = failing("stop")
    with TestApp(app) as test:
        test.send("orders", "bad", key="1")
        test.settle()

        with pytest.raises(NotGivenUpError, match=said):
            ask(test)


def test_a_message_that_waits_for_a_rate_is_refused_with_what_helps() -> None:
    app, _ = failing("stop", rate=0)
    with TestApp(app) as test:
        test.send("orders", "good", key="1")
        test.settle()

        with pytest.raises(NotGivenUpError, match="it waits for the rate of its handler; raise the rate"):
            test.give_up("orders", 0, 0)


def test_a_deferred_message_is_refused_until_its_completion_has_failed() -> None:
    app = penstock.App("sms", bootstrap_servers="in memory")
    out: list[penstock.DeferredCompletion] = []

    @app.handler("orders", retry=penstock.retry(attempts=9, wait=wait_fixed(60)))
    def handle(message: penstock.Message) -> penstock.DeferredCompletion:
        out.append(penstock.DeferredCompletion())
        return out[-1]

    with TestApp(app) as test:
        test.send("orders", "good", key="1")
        test.settle()
        with pytest.raises(NotGivenUpError, match="its handler has put its completion off"):
            test.give_up("orders", 0, 0)

        out[0].fail(ValueError("no good"))
        test.settle()

        assert test.give_up("orders", 0, 0) == "dlq.orders"


@pytest.mark.thorough
@pytest.mark.parametrize("exactly_once", [False, True])
def test_threads_that_give_up_during_quick_retries_lose_and_repeat_nothing(
    broker: DevBroker, new_topic: Callable[..., str], exactly_once: bool
) -> None:
    topic, values = new_topic(2), [b"bad %d" % number for number in range(30)]
    app = penstock.App(
        topic, bootstrap_servers=broker.bootstrap_servers, workers=4, commit_interval=0.1, exactly_once=exactly_once
    )

    @app.handler(topic, retry=penstock.retry(stop=stop_never, wait=wait_fixed(0.003)))
    def handle(message: penstock.Message) -> None:
        raise ValueError("no good")

    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for number, value in enumerate(values):
        producer.produce(topic, value, key=b"%d" % (number % 5), partition=number % 2)
    assert producer.flush(60) == 0
    done = threading.Event()

    with app.start() as running:

        def give_up() -> None:
            while not done.is_set():
                for explanation in running.explain():
                    if explanation.blocking_offset is None:
                        continue
                    with suppress(NotGivenUpError):
                        running.give_up(topic, explanation.partition, explanation.blocking_offset, timeout=2)

        threads = [threading.Thread(target=give_up, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: running.statistics().dead_letters == len(values), 120)
        wait_until(lambda: sum(explanation.watermark for explanation in running.explain()) == len(values), 60)
        done.set()
        for thread in threads:
            thread.join(60)

    letters = [sent.value() for sent in read_all(broker.bootstrap_servers, f"dlq.{topic}", timeout=60)]
    assert sorted(letters) == sorted(values)
