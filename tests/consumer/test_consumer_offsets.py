"""Where a group begins, what it is told by commit metadata, and what stops back-pressure, on a real broker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest
import tenacity
from confluent_kafka import OFFSET_INVALID, Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from kafka_tools import Recorder, committed, ends, produce
from penstock.consumer import ConsumerSettings, LitePushConsumer, handler, retry
from penstock.devbroker import DevBroker
from penstock.errors import PenstockError
from penstock.message import Message
from penstock.offsets import MAX_METADATA_CHARS, decode, encode, owner_of
from waiting import wait_until

NewTopic = Callable[..., str]

MEGABYTE = 1_000_000


class PoisonError(Exception):
    """What the poison message raises."""


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


def written(topic: str, base: int, done: list[range], *, group: str | None = None, partition: int = 0) -> str:
    """Return the offset map that the group writes for a partition of a topic, or that of another."""
    return encode(base, done, owner=owner_of(f"g-{topic}" if group is None else group, topic, partition))


def commit(broker: DevBroker, topic: str, offset: int, metadata: str = "") -> None:
    """Commit for the group as somebody else would."""
    bare = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": f"g-{topic}"})
    bare.commit(offsets=[TopicPartition(topic, 0, offset, metadata=metadata)], asynchronous=False)
    bare.close()


def delete_below(admin: AdminClient, topic: str, offset: int) -> None:
    """Have the log begin at an offset, as retention would."""
    for future in admin.delete_records([TopicPartition(topic, 0, offset)]).values():
        future.result(30)


def at(broker: DevBroker, topic: str) -> TopicPartition:
    return committed(broker.bootstrap_servers, f"g-{topic}", topic, 1)[0]


def test_a_restored_map_skips_what_was_done_and_outlives_an_owner_who_did_not_get_that_far(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x") for i in range(60)))
    commit(broker, topic, 5, written(topic, 5, [range(6, 20), range(40, 50)]))
    gate, first, second = threading.Event(), Recorder(), Recorder()

    def blocks_at_5(message: Message) -> None:
        if message.offset == 5:
            gate.wait(120)
        first(message)

    settings: dict[str, object] = {"max_in_flight": 2, "fetch_size": 5, "revoke_timeout": 0.1}
    one = consumer_of(broker, topic, blocks_at_5, settings).start()
    wait_until(lambda: len(first.calls) >= 1)
    one.stop(timeout=0.2)
    between = at(broker, topic)
    with consumer_of(broker, topic, second) as two:
        wait_until(lambda: at(broker, topic).offset == 60)
        restored = two.statistics().restored
    gate.set()

    done = decode(between.offset, between.metadata, owner_of(f"g-{topic}", topic, 0))
    assert between.offset == 5
    assert done is not None
    assert all(offset in done for offset in (*range(6, 20), *range(40, 50)))
    handled = sorted(offset for _, offset in second.places())
    assert handled == [offset for offset in range(5, 60) if offset not in done]
    assert restored == 55 - len(handled)


@pytest.mark.parametrize(
    "metadata",
    [
        "p3rsomething newer",
        "p2",
        "p2r",
        "p2r!!!!",
        lambda topic: written(topic, 6, [range(7, 30)]),
        lambda topic: written(topic, 5, [range(6, 20)])[:-3],
        lambda topic: written(topic, 5, [range(6, 20)], group="another"),
        "p2R" + "0" * 4000,
        "\u00e9" * 500,
    ],
    ids=["newer", "empty", "no body", "no code", "other offset", "cut", "other group", "long", "not ascii"],
)
def test_metadata_that_cannot_be_trusted_makes_work_come_again_and_is_replaced(
    broker: DevBroker, new_topic: NewTopic, metadata: str | Callable[[str], str]
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x") for i in range(30)))
    commit(broker, topic, 5, metadata if isinstance(metadata, str) else metadata(topic))
    seen = Recorder()

    with consumer_of(broker, topic, seen):
        wait_until(lambda: at(broker, topic).offset == 30)

    assert sorted(offset for _, offset in seen.places()) == list(range(5, 30))
    assert not at(broker, topic).metadata


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_an_offset_past_the_end_follows_the_reset_policy(broker: DevBroker, new_topic: NewTopic, reset: str) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"old", b"x")] * 5)
    commit(broker, topic, 4000, written(topic, 4000, [range(4001, 4100)]))
    seen = Recorder()

    with consumer_of(broker, topic, seen, {"config": {"auto.offset.reset": reset}}) as consumer:
        # New ones are written until one is seen: when the reset has taken place is not told.
        def new_ones_arrive() -> bool:
            produce(broker.bootstrap_servers, topic, [(b"new", b"x")])
            return any(call.key == b"new" for call in list(seen.calls))

        wait_until(new_ones_arrive, interval=0.2)
        wait_until(lambda: at(broker, topic).offset == ends(broker.bootstrap_servers, topic, 1)[0])
        lag = wait_until(lambda: (one := consumer.statistics().partitions) and one[0].lag == 0 and one)

    assert lag[0].watermark < 4000
    assert (b"old" in seen.by_key()) == (reset == "earliest")


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_an_offset_below_the_start_of_the_log_follows_the_reset_policy_loudly(
    broker: DevBroker, new_topic: NewTopic, admin: AdminClient, caplog: pytest.LogCaptureFixture, reset: str
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"old", b"x")] * 20)
    commit(broker, topic, 4, written(topic, 4, [range(5, 8), range(12, 15)]))
    delete_below(admin, topic, 10)
    seen = Recorder()

    def said() -> list[str]:
        return [one.getMessage() for one in caplog.records if f"{topic} [0]: offset reset" in one.getMessage()]

    with consumer_of(broker, topic, seen, {"config": {"auto.offset.reset": reset}}):
        wait_until(said)
        wait_until(lambda: produce(broker.bootstrap_servers, topic, [(b"new", b"x")]) or b"new" in seen.by_key())
        wait_until(lambda: at(broker, topic).offset == ends(broker.bootstrap_servers, topic, 1)[0])

    (line,) = said()
    (level,) = {one.levelname for one in caplog.records if one.getMessage() == line}
    assert level == "WARNING"
    assert "at offset 4" in line
    assert "not available on the broker" in line
    # The group's map still tells what of the rest was done.
    assert seen.by_key().get(b"old") == ([10, 11, *range(15, 20)] if reset == "earliest" else None)


def test_a_group_without_offsets_is_said_to_begin_by_the_reset_policy(
    broker: DevBroker, new_topic: NewTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic, seen = new_topic(), Recorder()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")] * 5)

    with caplog.at_level(logging.INFO, "penstock"), consumer_of(broker, topic, seen):
        wait_until(lambda: len(seen.calls) == 5)

    assert f"the group has no offset of {topic}[0]: auto.offset.reset says where it begins" in caplog.messages


@pytest.mark.parametrize("place", ["past the end", "below the start", "nowhere"])
def test_an_offset_that_is_not_in_the_log_stops_the_consumer_where_no_policy_is_allowed(
    broker: DevBroker, new_topic: NewTopic, admin: AdminClient, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")] * 5)
    offset = {"past the end": 4000, "below the start": 1, "nowhere": OFFSET_INVALID}[place]
    if place != "nowhere":
        commit(broker, topic, offset)
    if place == "below the start":
        delete_below(admin, topic, 3)

    consumer = consumer_of(broker, topic, Recorder(), {"config": {"auto.offset.reset": "error"}}).start()
    with pytest.raises(PenstockError, match=r"auto\.offset\.reset forbids another"):
        wait_until(consumer.wait)
    with pytest.raises(PenstockError):
        consumer.stop()

    assert at(broker, topic).offset == offset
    assert "the consumer stops: the group's offset is not in the log" in caplog.text


def test_a_poison_fraction_stops_nothing_until_its_own_budget_is_full(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()

    def records(count: int) -> Iterator[tuple[bytes, bytes]]:
        return ((b"k%d" % i, b"poison" if i % 5 == 0 else b"fine") for i in range(count))

    produce(broker.bootstrap_servers, topic, records(1000))
    mended = threading.Event()

    def function(message: Message) -> None:
        if message.value == b"poison" and not mended.is_set():
            raise PoisonError

    policy = retry(attempts=10_000, wait=tenacity.wait_fixed(0.5))
    # A fifth is poisoned: 200 parked are twice what may be in flight, and fit into their own budget.
    settings: dict[str, object] = {"max_in_flight": 100, "max_parked": 300, "fetch_size": 20}
    with consumer_of(broker, topic, function, settings, retry_policy=policy) as consumer:
        first = wait_until(
            lambda: (
                (now := consumer.statistics()).handled == 800
                and (one := now.partitions[0]).parked == 200
                and one.paused is None
                and one
            )
        )
        produce(broker.bootstrap_servers, topic, ((b"more%s" % key, value) for key, value in records(2000)))
        second = wait_until(
            lambda: (one := consumer.statistics().partitions[0]) and one.paused == "parked limit" and one
        )
        (said,) = consumer.explain()
        mended.set()
        wait_until(lambda: consumer.statistics().handled == 3000)

    assert (first.parked, first.paused) == (200, None)
    assert 300 <= second.parked <= 320
    assert (said.paused, said.state) == ("parked limit", "parked")


def test_many_scattered_undone_offsets_stop_fetching_before_their_map_outgrows_the_commit(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic, count = new_topic(), 40_000
    draw = [(i * 2_654_435_761) % 4_294_967_296 % 10 < 4 for i in range(count)]
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"p" if draw[i] else b"f") for i in range(count)))
    mended = threading.Event()

    def function(message: Message) -> None:
        if message.value == b"p" and not mended.is_set():
            raise PoisonError

    policy = retry(attempts=10_000, wait=tenacity.wait_fixed(3))
    settings: dict[str, object] = {"max_parked": 100_000, "max_in_flight": 10_000}
    with consumer_of(broker, topic, function, settings, retry_policy=policy) as consumer:
        tracker = wait_until(lambda: [one.tracker for one in consumer._engine.assignments.all()])[0]
        longest = compared = 0

        def is_stopped() -> bool:
            nonlocal longest, compared
            above = tracker.gaps()
            point = tracker.commit_point()
            longest = max(longest, len(point.metadata))
            if above and above == tracker.gaps():
                # Nothing moved in between: nothing may be cut off.
                told = decode(point.offset, point.metadata, owner_of(f"g-{topic}", topic, 0))
                assert told is not None
                assert list(told.done) == above
                compared += 1
            return consumer.statistics().partitions[0].paused == "offset map limit"

        wait_until(is_stopped, timeout=60)
        stopped = consumer.statistics().partitions[0]
        wait_until(lambda: is_stopped() and compared)
        wait_until(lambda: at(broker, topic).metadata)
        mended.set()
        wait_until(lambda: consumer.statistics().handled == count, timeout=60)

    assert stopped.position < count
    assert longest < MAX_METADATA_CHARS
    assert at(broker, topic).offset == count


def test_a_partition_that_was_paused_when_it_left_runs_when_it_comes_back(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x") for i in range(400)))
    gate = threading.Event()
    seen = Recorder()

    def function(message: Message) -> None:
        gate.wait(120)
        seen(message)

    settings: dict[str, object] = {
        "max_in_flight": 20,
        "fetch_size": 10,
        "revoke_timeout": 0.1,
        "stop_timeout": 0.5,
        "config": {"heartbeat.interval.ms": 200},
    }
    with consumer_of(broker, topic, function, settings) as first:
        wait_until(lambda: (one := first.statistics().partitions) and len(one) == 2 and all(p.paused for p in one))
        with consumer_of(broker, topic, function, settings) as second:
            wait_until(lambda: len(first.statistics().partitions) == 1 and len(second.statistics().partitions) == 1)
            wait_until(lambda: second.statistics().partitions[0].paused)
            second.request_stop(now=True)
            wait_until(lambda: len(first.statistics().partitions) == 2)
        gate.set()
        wait_until(lambda: len(set(seen.places())) == 400)
        wait_until(lambda: first.statistics().in_flight == 0)
