"""Where a group begins, and what commit metadata says: in memory, and on a real broker's logs."""

from __future__ import annotations

import pytest
from confluent_kafka import OFFSET_INVALID, Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

import penstock
from kafka_tools import Recorder, committed, ends, produce
from penstock.consumer import handler
from penstock.devbroker import DevBroker
from penstock.errors import PenstockError
from penstock.message import Message
from penstock.offsets import encode, owner_of
from penstock.testing import TestApp, TestBroker
from support.consumers import NewTopic, app_of, consumer_of, group_of
from waiting import wait_until


def written(base: int, done: list[range], *, group: str = "app") -> str:
    """Return the offset map that a group writes for the partition of "t"."""
    return encode(base, done, owner=owner_of(group, "t", 0))


def committed_at(offset: int, metadata: str, count: int) -> TestBroker:
    """Return a broker with so many messages in "t", and what the group has committed."""
    broker = TestBroker(max_fetch=5)
    broker.create_topic("t", 1)
    for number in range(count):
        broker.produce("t", b"x", key=b"k%d" % number)
    bare = broker.consumer({"group.id": "app"})
    bare.commit(offsets=[TopicPartition("t", 0, offset, metadata=metadata)], asynchronous=False)
    bare.close()
    return broker


def test_a_restored_map_skips_what_was_done_and_outlives_an_owner_who_did_not_get_that_far() -> None:
    first, second = list[int](), list[int]()
    app, out = app_of(max_in_flight=2, stop_timeout=1.0), list[penstock.DeferredCompletion]()

    @app.handler("t")
    def hold_the_fifth(message: Message) -> penstock.DeferredCompletion | None:
        first.append(message.offset)
        if message.offset > 5:
            return None
        out.append(penstock.DeferredCompletion())
        return out[-1]

    again = app_of()
    again.handler("t")(lambda message: second.append(message.offset))
    broker = committed_at(5, written(5, [range(6, 20), range(40, 50)]), 60)
    with TestApp(app, broker) as test:
        test.settle()
        test.stop()
        between = test.committed("t")
    with TestApp(again, broker) as test:
        test.advance(2)
        restored = test.statistics().restored
        end = test.committed("t")

    done = {*range(6, 20), *range(40, 50), *first[1:]}
    assert (between, end) == ({0: 5}, {0: 60})
    assert set(first).isdisjoint(range(6, 20))
    assert sorted(second) == [offset for offset in range(5, 60) if offset not in done]
    assert restored == 55 - len(second)


@pytest.mark.parametrize(
    "metadata",
    [
        "p3rsomething newer",
        written(6, [range(7, 30)]),
        written(5, [range(6, 20)])[:-3],
        written(5, [range(6, 20)], group="another"),
    ],
    ids=["newer", "other offset", "cut", "other group"],
)
def test_metadata_that_cannot_be_trusted_makes_work_come_again_and_is_replaced(metadata: str) -> None:
    app, seen = app_of(), list[int]()
    app.handler("t")(lambda message: seen.append(message.offset))
    broker = committed_at(5, metadata, 30)

    with TestApp(app, broker) as test:
        test.advance(2)

    assert sorted(seen) == list(range(5, 30))
    assert (broker.committed("app")["t", 0].offset, broker.committed("app")["t", 0].metadata) == (30, "")


def commit(broker: DevBroker, topic: str, offset: int, metadata: str = "") -> None:
    """Commit for the group as somebody else would."""
    bare = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": group_of(topic)})
    bare.commit(offsets=[TopicPartition(topic, 0, offset, metadata=metadata)], asynchronous=False)
    bare.close()


def map_of(topic: str, base: int, done: list[range]) -> str:
    """Return the offset map that the group of a topic writes."""
    return encode(base, done, owner=owner_of(group_of(topic), topic, 0))


def delete_below(admin: AdminClient, topic: str, offset: int) -> None:
    """Have the log begin at an offset, as retention would."""
    for future in admin.delete_records([TopicPartition(topic, 0, offset)]).values():
        future.result(30)


def at(broker: DevBroker, topic: str) -> TopicPartition:
    return committed(broker.bootstrap_servers, group_of(topic), topic, 1)[0]


RESETS = pytest.mark.parametrize("reset", ["earliest", pytest.param("latest", marks=pytest.mark.thorough)])


@RESETS
def test_an_offset_past_the_end_follows_the_reset_policy(broker: DevBroker, new_topic: NewTopic, reset: str) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"old", b"x")] * 5)
    commit(broker, topic, 4000, map_of(topic, 4000, [range(4001, 4100)]))
    seen = Recorder()

    with consumer_of(broker, {topic: handler(seen)}, config={"auto.offset.reset": reset}) as consumer:
        # New ones are written until one is seen: when the reset has taken place is not reported.
        def new_ones_arrive() -> bool:
            produce(broker.bootstrap_servers, topic, [(b"new", b"x")])
            return any(call.key == b"new" for call in list(seen.calls))

        wait_until(new_ones_arrive, interval=0.2)
        wait_until(lambda: at(broker, topic).offset == ends(broker.bootstrap_servers, topic, 1)[0])
        lag = wait_until(lambda: (one := consumer.statistics().partitions) and one[0].lag == 0 and one)

    assert lag[0].watermark < 4000
    assert (b"old" in seen.by_key()) == (reset == "earliest")


@RESETS
def test_an_offset_below_the_start_of_the_log_goes_on_at_the_first_message_that_is_there(
    broker: DevBroker, new_topic: NewTopic, admin: AdminClient, caplog: pytest.LogCaptureFixture, reset: str
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"old", b"x")] * 20)
    commit(broker, topic, 4, map_of(topic, 4, [range(5, 8), range(12, 15)]))
    delete_below(admin, topic, 10)
    seen = Recorder()

    with consumer_of(broker, {topic: handler(seen)}, config={"auto.offset.reset": reset}):
        wait_until(lambda: at(broker, topic).offset == 20)

    assert f"{topic}:0 stood at offset 4, and its log begins at 10 by now" in caplog.text
    # The group's map still tells what of the rest was done.
    assert seen.by_key().get(b"old") == [10, 11, *range(15, 20)]


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

    consumer = consumer_of(broker, {topic: handler(print)}, config={"auto.offset.reset": "error"}).start()
    with pytest.raises(PenstockError, match=r"auto\.offset\.reset forbids another"):
        wait_until(consumer.wait)
    with pytest.raises(PenstockError):
        consumer.stop()

    assert at(broker, topic).offset == offset
    assert "the consumer stops: the group's offset is not in the log" in caplog.text
