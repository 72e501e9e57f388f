"""Retries on a real broker, and what a retry policy decides."""

from __future__ import annotations

import threading

import tenacity

from kafka_tools import Recorder, produce
from penstock.consumer import handler, retry
from penstock.devbroker import DevBroker
from penstock.errors import RetryLater
from penstock.message import Message
from support.consumers import NewTopic, PoisonError, consumer_of
from waiting import wait_until

QUICK = retry(attempts=3, wait=tenacity.wait_fixed(0.05))


def test_a_parked_key_delays_no_other_key_of_its_lane_and_keeps_its_own_order(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic, seen, released = new_topic(), Recorder(), threading.Event()
    records = [(b"bad", b"poison")] + [(key, b"%d" % number) for number in range(20) for key in (b"bad", b"good")]
    produce(broker.bootstrap_servers, topic, records)

    def fails_until_released(message: Message) -> None:
        if message.value == b"poison" and not released.is_set():
            raise PoisonError
        seen(message)

    policy = retry(attempts=1_000_000, wait=tenacity.wait_fixed(0.02))
    # One worker with one lane: every key shares it.
    handlers = {topic: handler(fails_until_released, retry=policy)}
    with consumer_of(broker, handlers, workers=1, pinned=True) as consumer:
        wait_until(lambda: len(seen.by_key()[b"good"]) == 20)
        held_back = list(seen.by_key()[b"bad"])
        wait_until(lambda: consumer.statistics().retried >= 3)
        released.set()
        wait_until(lambda: len(seen.calls) == 41)

    assert held_back == []
    bad = seen.by_key()[b"bad"]
    assert bad == sorted(bad)
    assert len(bad) == 21


def test_the_delays_are_what_tenacity_says() -> None:
    policy = retry(stop=tenacity.stop_after_delay(10), wait=tenacity.wait_incrementing(start=1, increment=2))

    delays = [policy.delay_after(attempts, 0.0, PoisonError()) for attempts in (1, 2, 3)]
    too_late = policy.delay_after(4, 11.0, PoisonError())

    assert delays == [1, 3, 5]
    assert too_late is None


def test_a_wish_to_try_again_is_no_failure_that_a_policy_sorts_out_but_ends_by_its_stop() -> None:
    policy = retry(
        stop=tenacity.stop_after_attempt(3),
        wait=tenacity.wait_fixed(1),
        retry=tenacity.retry_if_exception_type(OSError),
    )

    assert policy.delay_after(1, 0.0, PoisonError()) is None
    assert [policy.delay_after(attempts, 0.0, RetryLater(5)) for attempts in (1, 2, 3)] == [5, 5, None]
    assert policy.delay_after(1, 0.0, tenacity.TryAgain()) == 1


def test_a_stop_that_counts_the_next_wait_in_is_asked_as_tenacity_asks_it() -> None:
    policy = retry(stop=tenacity.stop_before_delay(10), wait=tenacity.wait_fixed(8))

    assert policy.delay_after(1, 0.0, PoisonError()) == 8
    assert policy.delay_after(2, 8.0, PoisonError()) is None
    assert policy.delay_after(1, 0.0, RetryLater(12)) is None
    assert policy.delay_after(1, 3.0, RetryLater(5)) == 5
