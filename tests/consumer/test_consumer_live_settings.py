"""What may change while a consumer runs: rates, workers, concurrency, limits. Nothing is lost, no order broken."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import tenacity

import histories
from kafka_tools import Recorder, committed, produce
from penstock.consumer import ConsumerSettings, LitePushConsumer, handler, retry
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, RetryLater
from penstock.message import Message
from penstock.offsets import decode, owner_of
from waiting import wait_until

NewTopic = Callable[..., str]


def consumer_of(
    broker: DevBroker,
    topic: str,
    function: Callable[[Message], object],
    settings: dict[str, object] | None = None,
    **options: object,
) -> LitePushConsumer:
    return LitePushConsumer(
        f"g-{topic}",
        {topic: handler(function, **options)},  # type: ignore[arg-type] # options of several types
        bootstrap_servers=broker.bootstrap_servers,
        settings=ConsumerSettings(**{"workers": 4, "commit_interval": 0.1, **(settings or {})}),
    )


def told_done(broker: DevBroker, topic: str, partitions: int) -> int:
    """Return how many messages the group knows to be done."""
    known = 0
    for partition, one in committed(broker.bootstrap_servers, f"g-{topic}", topic, partitions).items():
        above = decode(one.offset, one.metadata, owner_of(f"g-{topic}", topic, partition))
        known += max(0, one.offset) + sum(map(len, above.done if above is not None else ()))
    return known


def check_rate(times: list[float], rate: float) -> None:
    """Assert that no window held more than the rate and its burst. A begin is noted after it was allowed."""
    times = sorted(times)
    late = 0.25  # seconds between the permission and the note, on a busy machine
    for first, start in enumerate(times):
        for last in range(first, len(times)):
            assert last - first + 1 <= rate * (times[last] - start + late) + max(1.0, rate * 0.1) + 1e-6


def test_one_handler_of_two_topics_has_one_rate_for_both(broker: DevBroker, new_topic: NewTopic) -> None:
    topics = [new_topic(), new_topic()]
    for topic in topics:
        produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x") for i in range(40)))
    seen = Recorder()
    both = handler(seen, rate=20)
    consumer = LitePushConsumer(
        f"g-{topics[0]}",
        dict.fromkeys(topics, both),
        bootstrap_servers=broker.bootstrap_servers,
        settings=ConsumerSettings(workers=4),
    )

    with consumer:
        wait_until(lambda: len(seen.calls) >= 40)
        limited = [call.begun for call in seen.calls]
        consumer.change_handler(topics[1], rate=None)
        wait_until(lambda: len(seen.calls) == 80)

    check_rate(limited, 20)


def test_a_rate_holds_over_all_lanes_stops_and_goes_on_and_the_commits_follow(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x") for i in range(400)))
    seen = Recorder()

    with consumer_of(broker, topic, seen, rate=0) as consumer:
        wait_until(lambda: consumer.statistics().received == 400)
        wait_until(lambda: consumer.statistics().ready_lanes == 0 and consumer.statistics().busy_workers == 0)
        held = len(seen.calls)
        consumer.change_handler(topic, rate=50)
        wait_until(lambda: len(seen.calls) >= 40)
        consumer.change_handler(topic, rate=0)
        wait_until(lambda: consumer.statistics().ready_lanes == 0 and consumer.statistics().busy_workers == 0)
        slow = [call.begun for call in seen.calls]
        done = len(slow)
        # Which of a fetch come first is open, so the watermark may stand; what is done above it is told.
        wait_until(lambda: told_done(broker, topic, 2) == done)
        still = len(seen.calls)
        consumer.change_handler(topic, rate=None)
        wait_until(lambda: len(seen.calls) == 400)

    assert held == 0
    check_rate(slow, 50)
    assert still == done
    assert len(set(seen.places())) == 400


def test_a_drain_keeps_to_the_rate_and_finishes(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x") for i in range(60)))
    seen = Recorder()
    consumer = consumer_of(broker, topic, seen, rate=40).start()
    wait_until(lambda: consumer.statistics().received == 60)

    drained = consumer.stop(timeout=60)

    assert drained
    assert len(seen.calls) == 60
    check_rate([call.begun for call in seen.calls], 40)
    assert committed(broker.bootstrap_servers, f"g-{topic}", topic, 1)[0].offset == 60


def test_a_retry_gets_its_turn_though_more_waits_than_the_rate_lets_through(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    records = [(b"bad", b"poison"), *((b"k%d" % i, b"x") for i in range(400))]
    produce(broker.bootstrap_servers, topic, records)
    seen = Recorder()

    def function(message: Message) -> None:
        seen(message)
        if message.value == b"poison":
            raise ValueError

    policy = retry(attempts=3, wait=tenacity.wait_fixed(0.1))
    with consumer_of(broker, topic, function, retry_policy=policy, rate=40, on_failure="drop") as consumer:
        wait_until(lambda: consumer.statistics().dropped == 1, timeout=60)
        handled = consumer.statistics().handled
        consumer.change_handler(topic, rate=None)

    # All its tries came before the crowd was through.
    assert handled < 400


def test_each_key_keeps_its_own_rate_and_a_quicker_one_reaches_those_that_wait(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, ((b"k%d" % (i % 3), b"%d" % i) for i in range(30)))
    seen = Recorder()

    with consumer_of(broker, topic, seen, key_rate=0.001) as consumer:
        wait_until(lambda: len(seen.calls) == 3)
        wait_until(lambda: consumer.statistics().parked_keys == 3)
        first = len(seen.calls)
        # The next message of each key would begin a thousand seconds from here.
        consumer.change_handler(topic, key_rate=20)
        wait_until(lambda: len(seen.calls) == 30)

    assert first == 3
    for key, offsets in seen.by_key().items():
        assert offsets == sorted(offsets)
        begun = [call.begun for call in seen.calls if call.key == key]
        assert begun[-1] - begun[1] >= 8 * 0.05 - 0.25


def test_retry_later_and_a_changed_policy_decide_from_then_on(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")])
    tries: list[float] = []
    changed = threading.Event()

    def function(message: Message) -> None:
        tries.append(time.monotonic())
        if len(tries) == 4:
            assert changed.wait(60)
        raise RetryLater(0.3)

    never = retry(attempts=1000, wait=tenacity.wait_fixed(600))
    with consumer_of(broker, topic, function, retry_policy=never, on_failure="drop") as consumer:
        wait_until(lambda: len(tries) >= 3)
        consumer.change_handler(topic, retry=retry(attempts=4))
        changed.set()
        wait_until(lambda: consumer.statistics().dropped == 1)

    assert len(tries) == 4
    assert all(later - former >= 0.29 for former, later in pairwise(tries))


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_settings_that_change_in_mid_stream_lose_and_reorder_nothing(  # noqa: PLR0915 - one stream, watched at each step
    broker: DevBroker, new_topic: NewTopic, kind: str
) -> None:
    topic, keys, count = new_topic(partitions=2), 30, 1500
    produced: dict[tuple[int, int], str] = {}
    calls: list[histories.Call] = []
    steps: list[tuple[int, int, int, int]] = []
    most = under_way = fullest = 0
    lock = threading.Lock()
    produce(broker.bootstrap_servers, topic, ((b"k%d" % (i % keys), b"x") for i in range(count)))

    def begin() -> float:
        nonlocal most, under_way
        with lock:
            under_way += 1
            most = max(most, under_way)
        return time.monotonic()

    def end(message: Message, begun: float) -> None:
        nonlocal under_way
        with lock:
            under_way -= 1
            key = (message.key or b"").decode()
            produced[message.partition, message.offset] = key
            calls.append(histories.Call("one", key, message.partition, message.offset, begun, time.monotonic()))

    def function(message: Message) -> None:
        begun = begin()
        # A handler takes time, so that several run at once.
        time.sleep(0.001)
        end(message, begun)

    async def task(message: Message) -> None:
        begun = begin()
        await asyncio.sleep(0.001)
        end(message, begun)

    def narrowed(width: int) -> bool:
        """Tell whether those too many have ended: a smaller width holds from then on."""
        if kind == "tasks":
            return consumer._executor.tasks is not None and consumer._executor.tasks._running <= width
        names = [thread.name for thread in threading.enumerate()]
        return sum(name.startswith(f"penstock-worker-g-{topic}-") for name in names) <= width

    def fill() -> int:
        return max((one.in_flight for one in consumer.statistics().partitions), default=0)

    def step_over(done: int) -> bool:
        nonlocal fullest
        fullest = max(fullest, fill())
        return len(calls) >= done

    size = "workers" if kind == "threads" else "max_concurrency"
    settings: dict[str, object] = {size: 1, "max_in_flight": 10, "fetch_size": 5}
    with consumer_of(broker, topic, function if kind == "threads" else task, settings) as consumer:
        wait_until(lambda: len(calls) >= count // 8, timeout=60)
        for step, (width, limit, interval) in enumerate(
            [(3, 20, 0.05), (1, 5, 1.0), (5, 15, 0.02), (2, 10_000, 0.1), (8, 7, 0.5)], 2
        ):
            consumer.change(
                workers=width if kind == "threads" else None,
                max_concurrency=width if kind == "tasks" else None,
                max_in_flight=limit,
                commit_interval=interval,
            )
            # A partition that is full takes up to twice as many while the other is hungry, and what one fetch brings.
            allowed = 2 * limit + 5
            wait_until(lambda width=width, allowed=allowed: narrowed(width) and fill() <= allowed, timeout=60)
            with lock:
                most, fullest = under_way, 0
            wait_until(lambda step=step: step_over(step * count // 8), timeout=60)
            steps.append((most, width, fullest, allowed))
        wait_until(lambda: len(calls) == count, timeout=60)
        wait_until(lambda: consumer.statistics().in_flight == 0)

    report = histories.examine(produced, calls)
    assert report.faults == []
    assert report.repeats == 0
    assert len(produced) == count
    assert [step for step in steps if step[0] > step[1] or step[2] > step[3]] == []
    # It did change: the narrow ones are not what all were.
    assert max(widest for widest, *_ in steps) > 1
    done = committed(broker.bootstrap_servers, f"g-{topic}", topic, 2)
    assert sum(one.offset for one in done.values()) == count


def test_workers_that_own_their_lanes_cannot_change_in_number(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()

    with consumer_of(broker, topic, Recorder(), {"pinned": True}) as consumer:
        with pytest.raises(ConfigurationError, match="cannot change while lanes are pinned"):
            consumer.change(workers=2, max_in_flight=5)

        # Refused as a whole.
        assert consumer._engine.back_pressure.max_in_flight == 10_000
        assert consumer.statistics().workers == 4


@pytest.mark.parametrize(
    "wrong", [{"workers": 0}, {"max_in_flight": -1}, {"commit_interval": 0}, {"max_parked_bytes": 1.5}]
)
def test_a_wrong_value_changes_nothing(broker: DevBroker, new_topic: NewTopic, wrong: dict[str, int]) -> None:
    consumer = consumer_of(broker, "unused", Recorder())

    with pytest.raises(ConfigurationError):
        consumer.change(**{"workers": 9, **wrong})

    assert consumer.statistics().workers == 4


@pytest.mark.parametrize("order", ["partition", "none"])
def test_a_key_rate_is_refused_where_messages_of_a_key_do_not_wait_for_each_other(
    broker: DevBroker, order: str
) -> None:
    consumer = consumer_of(broker, "unused", Recorder(), order=order, rate=3)

    with pytest.raises(ConfigurationError, match="order='key'"):
        consumer.change_handler("unused", rate=5, key_rate=1)
    consumer.change_handler("unused", key_rate=None)

    assert consumer._engine.routes["unused"].token_bucket.rate == 3
