"""Where the group stands is not known: nothing is committed, and nothing is said that was counted from 0."""

from __future__ import annotations

from typing import cast

import pytest
from confluent_kafka import KafkaError

import penstock
from penstock.consumer.assignments import Assignment
from penstock.consumer.handlers.route import Route
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


def test_a_group_whose_offsets_were_not_reported_is_not_taken_back_to_the_beginning() -> None:
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
        status = [explanation for explanation in test.explain() if explanation.topic == "first"]
        lags = [partition.lag for partition in test.statistics().partitions if partition.topic == "first"]
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
    assert {str(item).partition(": ")[2] for item in status} == {
        "position not known yet (no offset and no message so far)"
    }
    assert set(lags) == {None}


def test_a_group_that_begins_at_the_end_never_commits_the_beginning() -> None:
    broker, seen = TestBroker(0), Seen()
    broker.create_topic("first")
    for _ in range(1000):
        broker.produce("first", b"x", key=b"k")
    with TestApp(app_of(seen, **{"auto.offset.reset": "latest"}), broker) as test:
        test.settle()
        overtake_commits(test)
        lags = [partition.lag for partition in test.statistics().partitions if partition.topic == "first"]
    committed = broker.committed("group")
    with TestApp(app_of(seen, **{"auto.offset.reset": "latest"}), broker) as test:
        test.advance(5)

    assert set(lags) == {0}
    assert {place: at.offset for place, at in committed.items() if place[0] == "first"} == {("first", 0): 1000}
    assert not [place for place in seen if place[0] == "first"]


def test_messages_that_came_to_a_quiet_partition_without_members_are_handled_though_groups_begin_at_the_end() -> None:
    broker, seen = TestBroker(0), Seen()
    broker.create_topic("first")
    broker.produce("first", b"old", key=b"k")
    for _ in range(2):
        with TestApp(app_of(seen, **{"auto.offset.reset": "latest"}), broker) as test:
            test.advance(5)
        broker.produce("first", b"new", key=b"k")

    assert seen == [("first", 1)]


def test_a_partition_that_is_added_to_a_topic_is_read_from_its_first_message(caplog: pytest.LogCaptureFixture) -> None:
    broker, seen = TestBroker(0), Seen()
    broker.create_topic("first", 2)
    broker.produce("first", b"old", key=b"k")
    with TestApp(app_of(seen, **{"auto.offset.reset": "latest"}), broker) as test:
        test.settle()
        test.send("first", b"x", partition=0)
        test.advance(5)
        before = len(seen)
        broker.add_partitions("first", 3)
        for _ in range(10):
            test.send("first", b"x", partition=2)
        test.advance(400)
        committed = test.committed("first")

    assert (before, len(seen)) == (1, 11)
    assert committed[2] == 10
    assert "first:2 were added to topics that the group reads" in caplog.text


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_a_member_whose_position_falls_below_the_start_of_the_log_goes_on_at_the_first_message_that_is_there(
    caplog: pytest.LogCaptureFixture, reset: str
) -> None:
    broker, seen = TestBroker(0), Seen()
    broker.create_topic("first", 1)
    with TestApp(app_of(seen, **{"auto.offset.reset": reset}), broker) as test:
        test.settle()
        test.send("first", b"x", key=b"k")
        test.advance(5)
        test.pause("first")
        for _ in range(200):
            broker.produce("first", b"x", key=b"k")
        broker.delete_records("first", 0, 101)
        test.resume("first")
        test.advance(5)

    assert [offset for _, offset in seen] == [0, *range(101, 201)]
    assert broker.committed("group")["first", 0].offset == 201
    assert "first:0 stood at offset 1, but its log now begins at 101" in caplog.text


@pytest.mark.parametrize(("end", "lag"), [(None, None), (0, 0), (7, None)])
def test_where_no_position_is_known_only_a_log_that_never_had_a_record_has_a_known_lag(
    end: int | None, lag: int | None
) -> None:
    assignment = Assignment("first", 0, cast("Route", None), start=None)
    assignment.end = end

    assert assignment.lag(assignment.tracker.watermark) == lag
