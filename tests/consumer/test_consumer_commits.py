"""What is committed when the client knows more, or less, than was tracked: faults that no broker gives on demand."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.consumer import handler
from penstock.consumer.assignments import Assignment, Assignments
from penstock.consumer.commits import Commits
from penstock.consumer.ordering import Keyless, Order, Ordering
from penstock.consumer.routes import Route
from penstock.offsets import decode


class FakeConsumer:
    """A client with a position, that notes commits and fails when told to."""

    def __init__(self, position: int) -> None:
        self.at = position
        self.committed: list[tuple[int, bool]] = []
        #: The metadata of each commit, and how many characters of it are taken.
        self.metadata: list[str] = []
        self.takes = 4095
        self.fails = False

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        return [TopicPartition(one.topic, one.partition, self.at) for one in partitions]

    def get_watermark_offsets(self, _: TopicPartition, *, cached: bool) -> None:
        assert cached

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition] | None:
        if self.fails:
            raise KafkaException(KafkaError(KafkaError.REBALANCE_IN_PROGRESS))
        self.metadata.append(offsets[0].metadata)
        if len(offsets[0].metadata) > self.takes and not asynchronous:
            raise KafkaException(KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE))
        self.committed.append((offsets[0].offset, asynchronous))
        return None if asynchronous else offsets


def client(position: int) -> Any:
    """Return one, as what is used of a `Consumer`."""
    return FakeConsumer(position)


def an_assignment(assignments: Assignments) -> Assignment:
    ordering = Ordering(Order.KEY, Keyless.PARTITION, 8)
    assignment = Assignment("topic", 0, Route(handler(print), ordering, print), start=10)
    assignments.put(assignment)
    return assignment


def test_a_revocation_in_the_middle_of_a_fetch_commits_only_what_was_tracked() -> None:
    # The client has counted 15 out of a fetch that it has not handed over when the callback runs.
    assignments, consumer = Assignments(), client(position=15)
    assignment = an_assignment(assignments)
    block = assignment.tracker.register([10, 11])
    assignment.tracker.complete(block, range(2))
    commits = Commits(assignments, 1.0, time)

    commits.commit_revoked(consumer, [assignment])

    assert consumer.committed == [(12, False)]


def test_between_fetches_the_position_moves_the_commit_past_markers() -> None:
    assignments, consumer = Assignments(), client(position=15)
    an_assignment(assignments)
    commits = Commits(assignments, 1.0, time)

    commits.tick(consumer, 100.0)

    assert consumer.committed == [(15, True)]


def test_the_position_does_not_move_the_commit_past_messages_in_flight() -> None:
    assignments, consumer = Assignments(), client(position=15)
    assignment = an_assignment(assignments)
    assignment.tracker.register([12, 13])
    commits = Commits(assignments, 1.0, time)

    commits.tick(consumer, 100.0)

    assert consumer.committed == [(12, True)]


def test_a_commit_that_fails_is_counted_and_made_again() -> None:
    assignments, consumer = Assignments(), client(position=15)
    an_assignment(assignments)
    commits = Commits(assignments, 1.0, time)
    consumer.fails = True
    commits.tick(consumer, 100.0)
    consumer.fails = False

    commits.tick(consumer, 100.5)
    too_early = list(consumer.committed)
    commits.tick(consumer, 101.0)

    assert too_early == []
    assert consumer.committed == [(15, True)]
    assert commits.failed == 1


def test_an_asynchronous_refusal_is_made_again_too() -> None:
    assignments, consumer = Assignments(), client(position=15)
    an_assignment(assignments)
    commits = Commits(assignments, 1.0, time)
    commits.tick(consumer, 100.0)

    commits.on_commit(KafkaError(KafkaError.REQUEST_TIMED_OUT), [TopicPartition("topic", 0, 15)])
    commits.tick(consumer, 101.0)

    assert consumer.committed == [(15, True), (15, True)]
    assert commits.failed == 1


def test_one_commit_is_under_way_at_a_time_so_that_none_is_overtaken_by_an_older_one() -> None:
    assignments, consumer = Assignments(), client(position=15)
    an_assignment(assignments)
    commits = Commits(assignments, 1.0, time)
    commits.tick(consumer, 100.0)
    consumer.at = 20
    commits.tick(consumer, 101.0)
    before_the_answer = list(consumer.committed)

    commits.on_commit(None, [TopicPartition("topic", 0, 15)])
    commits.tick(consumer, 102.0)

    assert before_the_answer == [(15, True)]
    assert consumer.committed == [(15, True), (20, True)]


def test_an_answer_that_stays_out_is_not_waited_for_and_the_point_is_sent_once_more_in_the_end() -> None:
    assignments, consumer = Assignments(), client(position=15)
    an_assignment(assignments)
    commits = Commits(assignments, 1.0, time)
    commits.tick(consumer, 100.0)
    consumer.at = 20
    commits.tick(consumer, 111.0)

    # The newer is answered first: the older, repeated by the client, may have taken the group back.
    commits.on_commit(None, [TopicPartition("topic", 0, 20)])
    commits.on_commit(None, [TopicPartition("topic", 0, 15)])
    commits.tick(consumer, 112.0)
    commits.on_commit(None, [TopicPartition("topic", 0, 20)])
    commits.tick(consumer, 113.0)

    assert consumer.committed == [(15, True), (20, True), (20, True)]


def scattered(assignment: Assignment) -> None:
    """Have about half of many offsets done, the first not among them, in a pattern that nothing shortens."""
    draw = random.Random("scattered")  # noqa: S311 - the same pattern at each run
    block = assignment.tracker.register(range(10, 5010))
    assignment.tracker.complete(block, draw.sample(range(1, 5000), 2500))


def test_a_map_that_the_broker_finds_too_long_is_halved_at_once_until_it_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assignments, consumer = Assignments(), client(position=15)
    scattered(an_assignment(assignments))
    commits = Commits(assignments, 1.0, time)
    too_large = KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE)

    commits.tick(consumer, 100.0)
    whole = len(consumer.metadata[-1])
    while len(consumer.metadata[-1]) > 100:
        commits.on_commit(too_large, [TopicPartition("topic", 0, 10)])
        # At the next turn of the loop, not after the interval.
        commits.tick(consumer, 100.01)
    commits.on_commit(None, [TopicPartition("topic", 0, 10)])
    commits.tick(consumer, 102.0)

    lengths = [len(text) for text in consumer.metadata]
    assert whole > 100
    assert all(later <= former // 2 for former, later in pairwise(lengths))
    told = decode(10, consumer.metadata[-1])
    assert told is not None
    assert set(told.done) <= set(assignments.all()[0].tracker.gaps())
    assert commits.failed == len(lengths) - 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "offset.metadata.max.bytes" in caplog.text


@pytest.mark.parametrize("takes", [100, 0])
def test_a_revocation_commits_with_as_much_of_the_map_as_the_broker_takes(takes: int) -> None:
    assignments, consumer = Assignments(), client(position=15)
    assignment = an_assignment(assignments)
    scattered(assignment)
    commits = Commits(assignments, 1.0, time)
    consumer.takes = takes

    commits.commit_revoked(consumer, [assignment])

    assert consumer.committed == [(10, False)]
    assert len(consumer.metadata[-1]) <= takes
    assert bool(consumer.metadata[-1]) == bool(takes)
