"""Batch handlers on a real broker: how lists are made, when they are handed over, and what becomes of failures."""

from __future__ import annotations

import threading
from collections.abc import Callable

import tenacity
from consuming import consumer_of

from kafka_tools import committed, ends, produce, read_all
from penstock.consumer import handler, retry
from penstock.devbroker import DevBroker
from penstock.errors import BatchError
from penstock.message import Message
from waiting import wait_until

NewTopic = Callable[..., str]

QUICK = retry(attempts=3, wait=tenacity.wait_fixed(0.05))


class Lists:
    """A batch handler that keeps its lists, under a lock."""

    def __init__(self) -> None:
        self.lists: list[list[Message]] = []
        self._lock = threading.Lock()

    def __call__(self, messages: list[Message]) -> None:
        """Keep a list."""
        with self._lock:
            self.lists.append(messages)

    def count(self) -> int:
        """Return how many messages came."""
        return sum(map(len, list(self.lists)))

    def offsets(self) -> dict[tuple[bytes | None, int], list[int]]:
        """Return the offsets of each key and partition in the order they came in."""
        found: dict[tuple[bytes | None, int], list[int]] = {}
        for messages in self.lists:
            for message in messages:
                found.setdefault((message.key, message.partition), []).append(message.offset)
        return found


def test_lists_hold_many_messages_of_one_key_in_order_and_none_twice(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic(partitions=2)
    produce(broker.bootstrap_servers, topic, ((b"k%d" % (i % 5), b"x") for i in range(1000)))
    lists = Lists()

    with consumer_of(broker, {topic: handler(lists, batch=50, linger=0.2)}) as consumer:
        wait_until(lambda: lists.count() == 1000)
        wait_until(lambda: consumer.statistics().handled == 1000)

    assert max(map(len, lists.lists)) == 50
    assert any(len(messages) > len({message.key for message in messages}) for messages in lists.lists)
    assert all(offsets == sorted(set(offsets)) for offsets in lists.offsets().values())
    assert {
        p: one.offset for p, one in committed(broker.bootstrap_servers, f"group-{topic}", topic, 2).items()
    } == ends(broker.bootstrap_servers, topic, 2)


def test_a_full_batch_does_not_wait_and_a_drain_hands_over_what_waits_for_more(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"%d" % i) for i in range(25)])
    lists = Lists()

    # Ten minutes: what came before the stop came because it was full.
    consumer = consumer_of(broker, {topic: handler(lists, batch=10, linger=600)}, stop_timeout=60).start()
    wait_until(lambda: consumer.statistics().received == 25 and lists.count() == 20)
    before = [len(messages) for messages in lists.lists]
    drained = consumer.stop()

    assert before == [10, 10]
    assert drained
    assert [len(messages) for messages in lists.lists] == [10, 10, 5]
    assert committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset == 25


def test_a_batch_that_is_not_full_is_handed_over_after_linger(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"%d" % i) for i in range(3)])
    lists = Lists()

    with consumer_of(broker, {topic: handler(lists, batch=10, linger=0.3)}):
        wait_until(lambda: lists.count() == 3)

    assert [value.value for messages in lists.lists for value in messages] == [b"0", b"1", b"2"]


def test_what_a_batch_error_names_is_given_up_in_order_and_the_rest_is_done_once(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    records = [(b"k%d" % (i % 4), b"poison" if i in (10, 33) else b"%d" % i) for i in range(60)]
    produce(broker.bootstrap_servers, topic, records)
    done: list[tuple[bytes | None, int]] = []
    tries: list[int] = []

    async def stores(messages: list[Message]) -> None:
        failed: dict[int, BaseException] = {
            place: ValueError("cannot store") for place, one in enumerate(messages) if one.value == b"poison"
        }
        tries.extend(messages[place].offset for place in failed)
        if failed:
            # It has stored nothing behind a failed message of a key, as it will get that again.
            bad = {messages[place].key: place for place in reversed(failed)}
            done.extend(
                (one.key, one.offset) for place, one in enumerate(messages) if place < bad.get(one.key, len(messages))
            )
            raise BatchError(failed)
        done.extend((one.key, one.offset) for one in messages)

    one = handler(stores, batch=20, retry_policy=QUICK, on_failure="dead_letter")
    with consumer_of(broker, {topic: one}) as consumer:
        wait_until(lambda: consumer.statistics().dead_letters == 2 and consumer.statistics().in_flight == 0)

    letters = read_all(broker.bootstrap_servers, f"dlq.{topic}")
    assert sorted(offset for _, offset in done) == [i for i in range(60) if i not in (10, 33)]
    for key in {key for key, _ in done}:
        offsets = [offset for other, offset in done if other == key]
        assert offsets == sorted(offsets)
    assert sorted(tries) == [10] * 3 + [33] * 3
    assert {dict(letter.headers() or [])["__dlq.errors.offset"] for letter in letters} == {b"10", b"33"}
    assert committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset == 60


def test_a_batch_that_fails_as_a_whole_comes_again_key_by_key_in_order(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k%d" % (i % 3), b"%d" % i) for i in range(30)])
    lists = Lists()
    failed = threading.Event()

    def fails_once(messages: list[Message]) -> None:
        if not failed.is_set():
            failed.set()
            raise ConnectionError("the database is away")
        lists(messages)

    with consumer_of(broker, {topic: handler(fails_once, batch=30, order="partition", retry_policy=QUICK)}) as consumer:
        wait_until(lambda: consumer.statistics().in_flight == 0 and consumer.statistics().handled == 30)

    assert [message.offset for messages in lists.lists for message in messages] == list(range(30))


def test_lists_hold_decoded_bodies_of_what_the_filter_lets_pass(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    values = [b"not json" if i == 7 else b"%d" % i for i in range(40)]
    produce(broker.bootstrap_servers, topic, [(b"k", value) for value in values])
    lists = Lists()

    one = handler(
        lists,
        batch=10,
        decoder="json",
        filter=lambda message: message.offset % 2 == 1,
        on_failure="dead_letter",
        linger=0.2,
    )
    with consumer_of(broker, {topic: one}) as consumer:
        wait_until(
            lambda: (now := consumer.statistics()).filtered + now.dead_letters + now.handled == 40 and not now.in_flight
        )
        statistics = consumer.statistics()

    bodies = [message.body for messages in lists.lists for message in messages]
    assert bodies == [i for i in range(1, 40, 2) if i != 7]
    assert (statistics.filtered, statistics.dead_letters, statistics.handled) == (20, 1, 19)
    assert [letter.value() for letter in read_all(broker.bootstrap_servers, f"dlq.{topic}")] == [b"not json"]
