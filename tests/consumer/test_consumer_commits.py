"""Commits when the client knows more, or less, than was tracked: faults that no broker gives on demand."""

from __future__ import annotations

import logging
import random
import time
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from stepped import Stepped

from penstock.clients.cluster import Clock
from penstock.consumer import ConsumerSettings, handler
from penstock.consumer.assignments import Assignment
from penstock.consumer.engine import Engine
from penstock.consumer.poll.commits import ConsumerCommits
from penstock.consumer.poll.loop import PollLoop
from penstock.consumer.poll.refusals import Refusals
from penstock.offsets import Block
from penstock.testing import TestClock


class FakeConsumer:
    """A client with a position, that notes commits and fails when asked to."""

    def __init__(self, position: int) -> None:
        self.at = position
        self.sent: list[int] = []
        #: How long the group was waited for at each question, and whether it answers none.
        self.asked: list[float] = []
        self.silent = False
        #: The metadata of each commit.
        self.metadata: list[str] = []
        self.fails = False

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        return [TopicPartition(partition.topic, partition.partition, self.at) for partition in partitions]

    def get_watermark_offsets(self, _: TopicPartition, *, cached: bool) -> None:
        assert cached

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert asynchronous, "a commit that is waited for knows no bound"
        if self.fails:
            raise KafkaException(KafkaError(KafkaError.NOT_COORDINATOR))
        self.metadata.append(offsets[0].metadata)
        self.sent.append(offsets[0].offset)

    def committed(self, asked: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        self.asked.append(timeout)
        if self.silent:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return asked


def client(position: int) -> Any:
    """Return a fake with the used methods of a `Consumer`."""
    return FakeConsumer(position)


def commits_of(*, interval_s: float = 1.0, clock: Clock = time) -> tuple[ConsumerCommits, Assignment]:
    """Return the commits of an engine, and its one assignment, which begins at offset 10."""
    engine = Engine("g", {"topic": handler(print)}, ConsumerSettings(commit_interval=interval_s), clock)
    assignment = Assignment("topic", 0, engine.routes["topic"], start=10)
    engine.assignments.put(assignment)
    return ConsumerCommits(engine, Refusals(engine)), assignment


def test_a_revocation_in_the_middle_of_a_fetch_commits_only_what_was_tracked() -> None:
    # The client has counted 15 out of a fetch that it has not handed over when the callback runs.
    consumer = client(position=15)
    commits, assignment = commits_of()
    block = assignment.tracker.register([10, 11])
    assignment.tracker.complete(block, range(2))

    commits.commit_revoked(consumer, [assignment], 5.0)

    assert consumer.sent == [12]


def test_the_position_does_not_move_the_commit_past_messages_in_flight() -> None:
    consumer = client(position=15)
    commits, assignment = commits_of()
    assignment.tracker.register([12, 13])

    commits.tick(consumer, 100.0)

    assert consumer.sent == [12]


def test_a_commit_that_fails_is_made_again_soon_however_long_the_interval_is(caplog: pytest.LogCaptureFixture) -> None:
    consumer, clock = client(position=15), TestClock()
    commits, _ = commits_of(interval_s=3600.0, clock=clock)
    consumer.fails = True
    begun, failed_at = clock.monotonic(), []
    for _ in range(200):
        failed = commits._engine.counts.failed_commits
        commits.tick(consumer, clock.monotonic())
        if commits._engine.counts.failed_commits > failed:
            failed_at.append(clock.monotonic() - begun)
        clock.advance(0.125)

    assert {later - earlier for earlier, later in pairwise(failed_at)} == {0.5}
    # In 25 s.
    assert 1 <= caplog.text.count("it is made again in 0.5 s") <= 3


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        (KafkaError.ILLEGAL_GENERATION, 0),
        (KafkaError.REBALANCE_IN_PROGRESS, 0),
        (KafkaError.STALE_MEMBER_EPOCH, 0),
        (KafkaError.UNKNOWN_MEMBER_ID, 0),
        (KafkaError.FENCED_INSTANCE_ID, 1),
    ],
)
def test_a_commit_that_a_rebalance_refuses_is_no_failure_and_is_made_again(
    code: int, failed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.consumer")
    stepped = Stepped({"t": handler(print)}, commit_interval=10.0)
    stepped.broker.fail("commit", code)
    stepped.feed("t", [(b"k", b"v")])
    stepped.serve()
    stepped.broker.advance(10.0)
    for _ in range(4):
        stepped.poll()
        stepped.broker.advance(0.3)

    assert stepped.committed("t") == 1
    assert stepped.consumer.engine.counts.failed_commits == failed
    (level,) = {record.levelname for record in caplog.records if KafkaError(code).name() in record.getMessage()}
    assert level == ("WARNING" if failed else "INFO")


def test_a_commit_that_is_refused_at_the_end_of_a_drain_is_made_again_soon() -> None:
    # As with group.protocol=consumer, where a commit of an epoch ago is refused: the next is taken.
    consumer, clock = client(position=15), TestClock()
    commits, _ = commits_of(interval_s=3600.0, clock=clock)
    for _ in range(8):
        assert not commits.commit_drained(consumer, clock.monotonic())
        commits.on_commit(KafkaError(KafkaError.STALE_MEMBER_EPOCH), [TopicPartition("topic", 0, 15)])
        clock.advance(0.6)
    assert not commits.commit_drained(consumer, clock.monotonic())
    commits.on_commit(None, [TopicPartition("topic", 0, 15)])

    assert commits.commit_drained(consumer, clock.monotonic())
    assert consumer.sent == [15] * 9


def test_an_answer_that_stays_out_is_not_waited_for_and_the_point_is_sent_once_more_in_the_end() -> None:
    consumer = client(position=15)
    commits, _ = commits_of()
    commits.tick(consumer, 100.0)
    consumer.at = 20
    commits.tick(consumer, 121.0)

    # The newer is answered first: the older, repeated by the client, may have taken the group back.
    commits.on_commit(None, [TopicPartition("topic", 0, 20)])
    commits.on_commit(None, [TopicPartition("topic", 0, 15)])
    commits.tick(consumer, 122.0)
    commits.on_commit(None, [TopicPartition("topic", 0, 20)])
    commits.tick(consumer, 123.0)

    assert consumer.sent == [15, 20, 20]


def test_a_commit_that_timed_out_may_be_taken_late_so_the_next_one_is_sent_once_more() -> None:
    consumer = client(position=12)
    commits, assignment = commits_of()
    block = assignment.tracker.register([10, 11])
    assignment.tracker.complete(block, (0,))
    commits.tick(consumer, 100.0)
    commits.on_commit(KafkaError(KafkaError._TIMED_OUT), [TopicPartition("topic", 0, 11)])
    assignment.tracker.complete(block, (1,))

    for now in (110.0, 120.0, 130.0):
        commits.tick(consumer, now)
        commits.on_commit(None, [TopicPartition("topic", 0, 12)])

    # The broker may have taken 11 behind the first 12.
    assert consumer.sent == [11, 12, 12]


def scattered(assignment: Assignment) -> Block:
    """Have about half of many offsets done, the first not among them, in a pattern that nothing shortens."""
    draw = random.Random("scattered")  # noqa: S311 - the same pattern at each run
    block = assignment.tracker.register(range(10, 5010))
    assignment.tracker.complete(block, draw.sample(range(1, 5000), 2500))
    return block


def test_where_the_broker_refuses_a_map_commits_go_on_without_maps(caplog: pytest.LogCaptureFixture) -> None:
    consumer = client(position=15)
    commits, assignment = commits_of()
    scattered(assignment)

    commits.tick(consumer, 100.0)
    for _ in range(2):
        commits.on_commit(KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE), [TopicPartition("topic", 0, 10)])
        # At the next turn of the loop, not after the interval.
        commits.tick(consumer, 100.01)

    assert [len(text) > 100 for text in consumer.metadata] == [True, False, False]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "offset.metadata.max.bytes" in caplog.text


def test_a_commit_of_a_revocation_that_is_not_answered_in_time_is_said_to_be_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    consumer = client(position=15)
    commits, assignment = commits_of()
    assignment.tracker.complete(assignment.tracker.register([10]), range(1))
    consumer.silent = True

    commits.commit_revoked(consumer, [assignment], 5.0)
    commits._engine.stop_request.leave()  # the client closes, waits for the answer itself, and fetches no offsets
    commits.commit_revoked(consumer, [assignment], 5.0)

    assert consumer.sent == [11, 11]
    (waited,) = consumer.asked
    assert 0 < waited <= 5
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "the commit of topic:0, which were revoked" in line
    assert "the next owner handles again" in line


def test_a_revocation_whose_coordinator_is_away_ends_within_its_budget() -> None:
    stepped = Stepped({"t": handler(print)}, commit_interval=3600.0, revoke_timeout=5.0)
    stepped.feed("t", [(b"k", b"v")])
    stepped.serve()
    stepped.broker.coordinator_away(600)
    before = stepped.broker.clock.monotonic()

    # Leaving revokes.
    stepped.loop.leave()

    assert stepped.broker.clock.monotonic() - before <= 6


@pytest.mark.parametrize(
    ("ids", "is_taken"),
    [(["m1", "m1"], True), (["", ""], False), ([None, None], False), (["m1", ""], False), (["m1", "m2"], False)],
)
def test_positions_are_committed_only_as_a_member_that_is_in_the_group(ids: list[Any], is_taken: bool) -> None:
    # Kafka fences no positions that name no member: a zombie's results would become visible.
    membership = PollLoop(Engine("g", {"topic": handler(print)}, ConsumerSettings(), time)).membership
    membership.client = Mock(memberid=Mock(side_effect=ids))

    assert (membership.generation() is not None) == is_taken
