"""Where the group stands is not known: nothing is committed, and nothing is said that was counted from 0."""

from __future__ import annotations

from confluent_kafka import KafkaError

import penstock
from penstock.message import Message
from penstock.testing import Operation, TestApp, TestBroker

Seen = list[tuple[str, int]]


def app_of(seen: Seen, **config: object) -> penstock.App:
    app = penstock.App("group", bootstrap_servers="memory:0", config=config)

    @app.handler("first", "second")
    def note(message: Message) -> None:
        seen.append((message.topic, message.offset))

    return app


def overtake_commits(test: TestApp) -> None:
    """Let an answer stay out so long that all commits are made once more when it comes."""
    test.broker.delay_answer("commit_async", 25.0)
    for seconds in (3, 12, 30):
        test.send("second", b"x", key=b"k")
        test.advance(seconds)
    assert test.broker.faults.happened[Operation.COMMIT_ASYNC]


def test_a_group_whose_offsets_were_not_told_is_not_taken_back_to_the_beginning() -> None:
    broker, seen = TestBroker(0), Seen()
    with TestApp(app_of(seen), broker) as test:
        for _ in range(50):
            test.send("first", b"x", key=b"k")
        test.advance(5)
    broker.fail("committed", KafkaError._TIMED_OUT)
    with TestApp(app_of(seen), broker) as test:
        test.settle()
        assert broker.faults.happened[Operation.COMMITTED]
        overtake_commits(test)
        told = [one for one in test.explain() if one.topic == "first"]
        lags = [one.lag for one in test.statistics().partitions if one.topic == "first"]
        before = test.committed("first")
        test.send("first", b"x", key=b"k")
        test.advance(5)
        after = test.committed("first")
    with TestApp(app_of(seen), broker) as test:
        test.advance(5)

    # Each key's partition: the one of all these messages.
    assert list(before.values()) == [50]
    assert list(after.values()) == [51]
    assert [offset for topic, offset in seen if topic == "first"] == list(range(51))
    assert {str(one).partition(": ")[2] for one in told} == {"position not known yet"}
    assert set(lags) == {None}


def test_a_group_that_begins_at_the_end_never_commits_the_beginning() -> None:
    broker, seen = TestBroker(0), Seen()
    broker.create_topic("first")
    for _ in range(1000):
        broker.produce("first", b"x", key=b"k")
    with TestApp(app_of(seen, **{"auto.offset.reset": "latest"}), broker) as test:
        test.settle()
        overtake_commits(test)
        lags = [one.lag for one in test.statistics().partitions if one.topic == "first"]
    committed = broker.committed("group")
    with TestApp(app_of(seen, **{"auto.offset.reset": "latest"}), broker) as test:
        test.advance(5)

    assert set(lags) == {None}
    assert not [place for place in committed if place[0] == "first"]
    assert not [place for place in seen if place[0] == "first"]


def test_a_group_that_begins_at_the_end_commits_from_its_first_message_on() -> None:
    broker, seen = TestBroker(0), Seen()
    broker.create_topic("first", 1)
    for _ in range(100):
        broker.produce("first", b"x", key=b"k")
    with TestApp(app_of(seen, **{"auto.offset.reset": "latest"}), broker) as test:
        test.settle()
        test.send("first", b"x", key=b"k")
        test.advance(5)
        told = next(one for one in test.explain() if one.topic == "first")
        committed = test.committed("first")

    assert committed == {0: 101}
    assert (told.lag, told.state, told.watermark) == (0, "idle", 101)
    assert seen == [("first", 100)]
