"""Changes while a consumer runs: rates, policies, workers, limits. Nothing is lost, no order broken."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import tenacity

from penstock.consumer import handler, retry
from penstock.errors import ConfigurationError, RetryLater
from penstock.message import Message
from penstock.offsets import decode, owner_of
from penstock.testing import TestBroker
from support.consumers import Handled, consumer_of, fed, group_of
from waiting import wait_until


def known_done(broker: TestBroker) -> int:
    """Return how many messages the group knows to be done."""
    group = group_of("t")
    known = 0
    for (topic, partition), found in broker.committed(group).items():
        above = decode(found.offset, found.metadata, owner_of(group, topic, partition))
        known += max(0, found.offset) + sum(map(len, above.done if above is not None else ()))
    return known


def test_a_rate_stops_all_lanes_and_lets_them_go_on_and_the_commits_follow() -> None:
    broker, seen = fed(400, 400, partitions=2), Handled()

    with consumer_of(broker, {"t": handler(seen, rate=0)}) as consumer:

        def is_quiet() -> bool:
            # Workers count as busy a moment after they have taken a lane.
            return consumer.statistics().received == 400 and consumer._engine.scheduler.idle

        wait_until(is_quiet)
        held = len(seen.done)
        consumer.change_handler("t", rate=50)
        wait_until(lambda: len(seen.done) >= 40)
        consumer.change_handler("t", rate=0)
        wait_until(is_quiet)
        done = len(seen.done)
        # Which of a fetch come first is open, so the watermark may stand; what is done above it shows.
        wait_until(lambda: known_done(broker) == done)
        still = len(seen.done)
        consumer.change_handler("t", rate=None)
        wait_until(lambda: len(seen.done) == 400)

    assert (held, still) == (0, done)
    assert len({(message.partition, message.offset) for message in seen.done}) == 400


def test_a_quicker_rate_reaches_the_keys_that_wait_for_their_own() -> None:
    broker, seen = fed(30, 3), Handled()

    with consumer_of(broker, {"t": handler(seen, key_rate=1e-9)}) as consumer:
        wait_until(lambda: len(seen.done) == 3 and consumer.statistics().parked_keys == 3)
        consumer.change_handler("t", key_rate=20)
        wait_until(lambda: len(seen.done) == 30)

    assert all(offsets == sorted(offsets) for offsets in seen.offsets().values())


def test_retry_later_and_a_changed_policy_decide_from_then_on() -> None:
    broker, tries, changed = fed(1, 1), list[float](), threading.Event()

    def function(message: Message) -> None:
        tries.append(broker.clock.monotonic())
        if len(tries) == 4:
            changed.wait()
        raise RetryLater(30)

    never = retry(attempts=1000, wait=tenacity.wait_fixed(1e9))
    with consumer_of(broker, {"t": handler(function, retry=never, on_failure="drop")}) as consumer:
        wait_until(lambda: len(tries) >= 3)
        consumer.change_handler("t", retry=retry(attempts=4))
        changed.set()
        wait_until(lambda: consumer.statistics().dropped == 1)

    assert len(tries) == 4
    assert min(later - former for former, later in pairwise(tries)) > 29.999


def test_workers_and_limits_that_change_in_mid_stream_lose_and_reorder_nothing() -> None:
    broker, seen, count = fed(2000, 30, partitions=2), Handled(), 2000

    with consumer_of(broker, {"t": handler(seen)}, workers=1, max_in_flight=10, fetch_size=5) as consumer:
        for step, (workers, limit) in enumerate([(3, 20), (1, 5), (5, 15), (2, 10_000), (8, 7)], 1):
            wait_until(lambda step=step: len(seen.done) >= step * count // 8)
            consumer.change(workers=workers, max_in_flight=limit, commit_interval=0.1 * step)
            assert consumer.statistics().workers == workers
        wait_until(lambda: len(seen.done) == count and consumer.statistics().in_flight == 0)

    assert seen.overlaps == []
    places = [(message.partition, message.offset) for message in seen.done]
    assert len(set(places)) == len(places)
    assert all(offsets == sorted(offsets) for offsets in seen.offsets().values())
    assert known_done(broker) == count


def test_workers_that_come_and_go_leave_no_slots_behind() -> None:
    broker, seen = fed(100, 10), Handled()

    with consumer_of(broker, {"t": handler(seen)}, workers=1) as consumer:
        for _ in range(20):
            consumer.change(workers=4)
            pool = consumer._executor.threads
            gone = pool.workers[1:]
            consumer.change(workers=1)
            wait_until(lambda gone=gone: not any(assignment.thread.is_alive() for assignment in gone))
        assert len(consumer._executor.slots) == 4
        wait_until(lambda: consumer.statistics().handled == 100)


def test_workers_that_own_their_lanes_cannot_change_in_number() -> None:
    with consumer_of(TestBroker(), {"t": handler(print)}, pinned=True) as consumer:
        with pytest.raises(ConfigurationError, match="cannot change while lanes are pinned"):
            consumer.change(workers=2, max_in_flight=5)

        # Refused as a whole.
        assert consumer._loop.back_pressure.max_in_flight == 10_000
        assert consumer.statistics().workers == 4


@pytest.mark.parametrize(
    "wrong", [{"workers": 0}, {"max_in_flight": -1}, {"commit_interval": 0}, {"max_in_flight_bytes": 1.5}]
)
def test_a_wrong_value_changes_nothing(wrong: dict[str, int]) -> None:
    consumer = consumer_of(TestBroker(), {"t": handler(print)})

    with pytest.raises(ConfigurationError):
        consumer.change(**{"workers": 9, **wrong})

    assert consumer.statistics().workers == 4


@pytest.mark.parametrize("order", ["partition", "none"])
def test_a_key_rate_is_refused_where_messages_of_a_key_do_not_wait_for_each_other(order: str) -> None:
    consumer = consumer_of(TestBroker(), {"t": handler(print, order=order, rate=3)})

    with pytest.raises(ConfigurationError, match="order='key'"):
        consumer.change_handler("t", rate=5, key_rate=1)
    consumer.change_handler("t", key_rate=None)

    assert consumer._engine.routes["t"].token_bucket.rate == 3
