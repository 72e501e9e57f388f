"""What is committed when the client knows more, or less, than was tracked: faults that no broker gives on demand."""

from __future__ import annotations

import time

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.consumer import handler
from penstock.consumer.assignments import Assignment, Assignments
from penstock.consumer.commits import Commits
from penstock.consumer.ordering import Keyless, Order, Ordering
from penstock.consumer.routes import Route


class FakeConsumer:
    """A client with a position, that notes commits and fails when told to."""

    def __init__(self, position: int) -> None:
        self.at = position
        self.committed: list[tuple[int, bool]] = []
        self.fails = False

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        return [TopicPartition(one.topic, one.partition, self.at) for one in partitions]

    def get_watermark_offsets(self, _: TopicPartition, *, cached: bool) -> None:
        assert cached

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition] | None:
        if self.fails:
            raise KafkaException(KafkaError(KafkaError.REBALANCE_IN_PROGRESS))
        self.committed.append((offsets[0].offset, asynchronous))
        return None if asynchronous else offsets


def an_assignment(assignments: Assignments) -> Assignment:
    ordering = Ordering(Order.KEY, Keyless.PARTITION, 8)
    assignment = Assignment("topic", 0, Route(handler(print), ordering, print), start=10)
    assignments.put(assignment)
    return assignment


def test_a_revocation_in_the_middle_of_a_fetch_commits_only_what_was_tracked() -> None:
    # The client has counted 15 out of a fetch that it has not handed over when the callback runs.
    assignments, consumer = Assignments(), FakeConsumer(position=15)
    assignment = an_assignment(assignments)
    block = assignment.tracker.register([10, 11])
    assignment.tracker.complete(block, range(2))
    commits = Commits(assignments, 1.0, time)

    commits.commit_revoked(consumer, [assignment])  # type: ignore[arg-type]

    assert consumer.committed == [(12, False)]


def test_between_fetches_the_position_moves_the_commit_past_markers() -> None:
    assignments, consumer = Assignments(), FakeConsumer(position=15)
    an_assignment(assignments)
    commits = Commits(assignments, 1.0, time)

    commits.tick(consumer, 100.0)  # type: ignore[arg-type]

    assert consumer.committed == [(15, True)]


def test_the_position_does_not_move_the_commit_past_messages_in_flight() -> None:
    assignments, consumer = Assignments(), FakeConsumer(position=15)
    assignment = an_assignment(assignments)
    assignment.tracker.register([12, 13])
    commits = Commits(assignments, 1.0, time)

    commits.tick(consumer, 100.0)  # type: ignore[arg-type]

    assert consumer.committed == [(12, True)]


def test_a_commit_that_fails_is_counted_and_made_again() -> None:
    assignments, consumer = Assignments(), FakeConsumer(position=15)
    an_assignment(assignments)
    commits = Commits(assignments, 1.0, time)
    consumer.fails = True
    commits.tick(consumer, 100.0)  # type: ignore[arg-type]
    consumer.fails = False

    commits.tick(consumer, 100.5)  # type: ignore[arg-type]
    too_early = list(consumer.committed)
    commits.tick(consumer, 101.0)  # type: ignore[arg-type]

    assert too_early == []
    assert consumer.committed == [(15, True)]
    assert commits.failed == 1


def test_an_asynchronous_refusal_is_made_again_too() -> None:
    assignments, consumer = Assignments(), FakeConsumer(position=15)
    an_assignment(assignments)
    commits = Commits(assignments, 1.0, time)
    commits.tick(consumer, 100.0)  # type: ignore[arg-type]

    commits.on_commit(KafkaError(KafkaError.REQUEST_TIMED_OUT), [TopicPartition("topic", 0, 15)])
    commits.tick(consumer, 101.0)  # type: ignore[arg-type]

    assert consumer.committed == [(15, True), (15, True)]
    assert commits.failed == 1


def test_one_commit_is_under_way_at_a_time_so_that_none_is_overtaken_by_an_older_one() -> None:
    assignments, consumer = Assignments(), FakeConsumer(position=15)
    an_assignment(assignments)
    commits = Commits(assignments, 1.0, time)
    commits.tick(consumer, 100.0)  # type: ignore[arg-type]
    consumer.at = 20
    commits.tick(consumer, 101.0)  # type: ignore[arg-type]
    before_the_answer = list(consumer.committed)

    commits.on_commit(None, [TopicPartition("topic", 0, 15)])
    commits.tick(consumer, 102.0)  # type: ignore[arg-type]

    assert before_the_answer == [(15, True)]
    assert consumer.committed == [(15, True), (20, True)]


def test_an_answer_that_stays_out_is_not_waited_for_and_the_point_is_sent_once_more_in_the_end() -> None:
    assignments, consumer = Assignments(), FakeConsumer(position=15)
    an_assignment(assignments)
    commits = Commits(assignments, 1.0, time)
    commits.tick(consumer, 100.0)  # type: ignore[arg-type]
    consumer.at = 20
    commits.tick(consumer, 111.0)  # type: ignore[arg-type]

    # The newer is answered first: the older, repeated by the client, may have taken the group back.
    commits.on_commit(None, [TopicPartition("topic", 0, 20)])
    commits.on_commit(None, [TopicPartition("topic", 0, 15)])
    commits.tick(consumer, 112.0)  # type: ignore[arg-type]
    commits.on_commit(None, [TopicPartition("topic", 0, 20)])
    commits.tick(consumer, 113.0)  # type: ignore[arg-type]

    assert consumer.committed == [(15, True), (20, True), (20, True)]
