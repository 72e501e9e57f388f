"""Retries, dead letters and the other ends of a failing message, on a real broker."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import tenacity
from confluent_kafka.admin import AdminClient

from kafka_tools import Recorder, committed, produce, read_all
from penstock.clients.requests.topics import TopicSpec, ensure_topics
from penstock.consumer import ConsumerSettings, LitePushConsumer, RetryPolicy, handler, retry
from penstock.devbroker import DevBroker
from penstock.errors import PenstockError, RetryLater
from penstock.message import Message
from waiting import wait_until

NewTopic = Callable[..., str]

QUICK = retry(attempts=3, wait=tenacity.wait_fixed(0.05))


class PoisonError(Exception):
    """What the poison message raises."""


def consumer_of(
    broker: DevBroker,
    topic: str,
    function: Callable[[Message], object],
    *,
    policy: RetryPolicy = QUICK,
    on_failure: str = "dead_letter",
    workers: int = 4,
) -> LitePushConsumer:
    return LitePushConsumer(
        f"group-{topic}",
        {topic: handler(function, retry_policy=policy, on_failure=on_failure)},
        bootstrap_servers=broker.bootstrap_servers,
        settings=ConsumerSettings(workers=workers, commit_interval=0.1),
    )


def fails_on(poison: bytes, seen: Recorder) -> Callable[[Message], None]:
    def function(message: Message) -> None:
        seen(message)
        if message.value == poison:
            raise PoisonError("cannot swallow this")

    return function


def test_a_parked_key_delays_no_other_key_of_its_lane_and_keeps_its_own_order(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    records = [(b"bad", b"poison")] + [(key, b"%d" % i) for i in range(20) for key in (b"bad", b"good")]
    produce(broker.bootstrap_servers, topic, records)
    seen = Recorder()
    released = threading.Event()

    def fails_until_released(message: Message) -> None:
        if message.value == b"poison" and not released.is_set():
            raise PoisonError
        seen(message)

    policy = retry(attempts=1_000_000, wait=tenacity.wait_fixed(0.02))
    # One worker with one lane: every key shares it.
    consumer = LitePushConsumer(
        f"group-{topic}",
        {topic: handler(fails_until_released, retry_policy=policy)},
        bootstrap_servers=broker.bootstrap_servers,
        settings=ConsumerSettings(workers=1, pinned=True, commit_interval=0.1),
    )
    with consumer:
        wait_until(lambda: len(seen.by_key()[b"good"]) == 20)
        held_back = list(seen.by_key()[b"bad"])
        wait_until(lambda: consumer.statistics().retried >= 3)
        released.set()
        wait_until(lambda: len(seen.calls) == 41)

    assert held_back == []
    bad = seen.by_key()[b"bad"]
    assert bad == sorted(bad)
    assert len(bad) == 21


def test_an_exhausted_message_goes_to_the_dead_letters_with_all_that_is_known_of_it(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    produce(broker.bootstrap_servers, topic, [(b"k", b"poison")], headers=[("own", b"\xff")])
    produce(broker.bootstrap_servers, topic, [(b"k", b"after")])
    seen = Recorder()

    with consumer_of(broker, topic, fails_on(b"poison", seen)) as consumer:
        wait_until(lambda: len(seen.calls) == 4)
        # A message is done a moment before it is counted.
        wait_until(lambda: consumer.statistics().in_flight == 0 and consumer.statistics().handled == 1)
        statistics = consumer.statistics()

    (letter,) = read_all(broker.bootstrap_servers, f"dlq.{topic}")
    headers = dict(letter.headers() or [])
    poison = seen.calls[0]
    assert (letter.key(), letter.value()) == (b"k", b"poison")
    assert headers["own"] == b"\xff"
    assert headers["__dlq.errors.topic"] == topic.encode()
    assert headers["__dlq.errors.partition"] == b"%d" % poison.partition
    assert headers["__dlq.errors.offset"] == b"%d" % poison.offset
    assert headers["__dlq.errors.group"] == f"group-{topic}".encode()
    assert headers["__dlq.errors.delivery.count"] == b"3"
    assert headers["__dlq.errors.message"] == b"cannot swallow this"
    assert headers["penstock-exception-class"].endswith(b"PoisonError")
    assert b"in function" in headers["penstock-exception-stack"]
    assert [call.value for call in seen.calls] == [b"poison"] * 3 + [b"after"]
    assert (statistics.dead_letters, statistics.handled, statistics.failed) == (1, 1, 3)
    group = committed(broker.bootstrap_servers, f"group-{topic}", topic, 2)
    assert sum(max(0, one.offset) for one in group.values()) == 2


def test_a_dead_letter_that_its_topic_never_takes_stops_the_consumer_and_is_written_once_it_does(
    broker: DevBroker, new_topic: NewTopic, admin: AdminClient
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"a", b"poison"), (b"a", b"behind")])
    seen = Recorder()
    # The value fits into the source topic; the dead-letter topic takes nothing of any size.
    ensure_topics(admin, broker.bootstrap_servers, [TopicSpec(f"dlq.{topic}", 1, {"max.message.bytes": "10"})])

    first = consumer_of(broker, topic, fails_on(b"poison", seen)).start()
    with pytest.raises(PenstockError, match=r"does not take it, without what we add either: .*MSG_SIZE_TOO_LARGE"):
        wait_until(first.wait)
    with pytest.raises(PenstockError):
        first.stop()
    behind_waited = [call.value for call in seen.calls if call.value == b"behind"]
    raise_topic_limit(admin, f"dlq.{topic}")
    with consumer_of(broker, topic, fails_on(b"poison", seen)):
        wait_until(lambda: committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset == 2)

    assert first.statistics().dead_letters == 0
    assert behind_waited == []
    assert len(read_all(broker.bootstrap_servers, f"dlq.{topic}")) == 1


def raise_topic_limit(admin: AdminClient, topic: str) -> None:
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

    entry = ConfigEntry("max.message.bytes", "1000000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result()


def test_stop_on_failure_ends_the_consumer_with_the_reason_and_keeps_the_offset(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"a", b"fine"), (b"a", b"poison"), (b"a", b"behind")])
    seen = Recorder()
    consumer = consumer_of(broker, topic, fails_on(b"poison", seen), on_failure="stop").start()

    with pytest.raises(PenstockError, match=rf"failed {topic}\[0\]@1 3 times, last with PoisonError") as caught:
        wait_until(consumer.wait)
    with pytest.raises(PenstockError):
        consumer.stop()

    assert isinstance(caught.value.__cause__, PoisonError)
    assert committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset == 1
    assert b"behind" not in [call.value for call in seen.calls]


def test_a_retry_does_not_hold_a_worker(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"bad%d" % i, b"poison") for i in range(10)])
    produce(broker.bootstrap_servers, topic, [(b"good%d" % i, b"x") for i in range(50)])
    seen = Recorder()
    policy = retry(attempts=2, wait=tenacity.wait_fixed(600))

    with consumer_of(broker, topic, fails_on(b"poison", seen), policy=policy, workers=1) as consumer:
        # Ten minutes pass before the first retry: whoever gets here did not wait for it.
        wait_until(lambda: consumer.statistics().handled == 50)
        statistics = consumer.statistics()
        consumer.request_stop(now=True)

    assert (statistics.parked_keys, statistics.retried) == (10, 0)


def test_a_policy_may_refuse_to_retry_an_error(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"poison")])
    seen = Recorder()
    policy = retry(attempts=9, retry=tenacity.retry_if_not_exception_type(PoisonError))

    with consumer_of(broker, topic, fails_on(b"poison", seen), policy=policy) as consumer:
        wait_until(lambda: consumer.statistics().dead_letters == 1)

    assert len(seen.calls) == 1


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
