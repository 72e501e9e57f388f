"""Trimming of half, op and done logs, and checks of the logs that block no caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException, TopicPartition
from half_partition import context_of, fetched, half_partition, half_record, op_record

from fake_admin import FakeAdmin
from penstock.transactions.core import snapshot
from penstock.transactions.stores.kafka.coordinator.log_upkeep import UPKEEP_S, LogUpkeep
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict
from penstock.transactions.wire.topics import StoreTopics
from waiting import wait_until

TOPICS = StoreTopics("store", 1)
#: What the client library calls the end of a log.
LATEST = -1
FETCH = 1


class Admin(FakeAdmin):
    """A broker that answers when a test says so."""

    def __init__(self) -> None:
        self.ends = {TOPICS.half: 0, TOPICS.op: 0, TOPICS.done: 0}
        self.lows = dict(self.ends)
        #: How often each topic was made.
        self.made = dict.fromkeys(self.ends, 1)
        #: Deletions that were asked for and not answered: topic and offset.
        self.deleting: list[tuple[str, int, Future[Any]]] = []
        #: How many deletions were asked for.
        self.asked = 0

    def list_offsets(
        self, places: Mapping[TopicPartition, Any], request_timeout: float, isolation_level: Any
    ) -> dict[Any, Future[Any]]:
        assert request_timeout
        assert isolation_level is IsolationLevel.READ_UNCOMMITTED
        is_end = next(iter(places.values()))._value == LATEST
        offsets = self.ends if is_end else self.lows
        return {place: done(SimpleNamespace(offset=offsets[place.topic])) for place in places}

    def describe_topics(self, topics: Any, request_timeout: float, **_: object) -> dict[str, Future[Any]]:
        assert request_timeout
        return {
            name: done(SimpleNamespace(topic_id=f"{name} {self.made[name]}", authorized_operations=None))
            for name in topics.topic_names
        }

    def delete_records(self, points: list[TopicPartition], request_timeout: float) -> dict[Any, Future[Any]]:
        assert request_timeout
        asked: dict[Any, Future[Any]] = {point: Future() for point in points}
        self.deleting += [(point.topic, point.offset, future) for point, future in asked.items()]
        self.asked += 1
        return asked

    def answer(self, error: KafkaException | None = None) -> list[tuple[str, int]]:
        """Answer the questions, and return them."""
        asked, self.deleting = self.deleting, []
        for topic, offset, future in asked:
            if error is None:
                self.lows[topic] = offset
                future.set_result(None)
            else:
                future.set_exception(error)
        return [(topic, offset) for topic, offset, _ in asked]


def done(result: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class Room:
    """A partition with one settled transaction, whose logs are tended; a test moves the time."""

    def __init__(self) -> None:
        self.admin, self.now = Admin(), 100.0
        context = context_of(TOPICS)
        self.rights, self.partition = context.rights, half_partition(context=context)
        self.upkeep = LogUpkeep(context, self.admin)  # type: ignore[arg-type] # what is used
        self.settle_one(0)
        self.admin.ends = {TOPICS.half: 1, TOPICS.op: 1, TOPICS.done: 2}

    def settle_one(self, offset: int) -> None:
        """Let a transaction be decided and settled whose half and op stand at an offset."""
        half = Half(new_id(), "orders", "topic", None, None, b"v", (), None)
        self.partition.feed.take_half(half_record(offset, half), self.now)
        op = Op(half.transaction_id, Verdict.ROLLBACK, Author.PRODUCER, "orders", 0, (offset,), 0)
        self.partition.feed.take_op(op_record(offset, op), self.now)
        self.partition.note_progress(self.now)
        self.commit()

    def commit(self) -> int:
        """Commit what there is, and return the checkpoint of the done log."""
        batch = self.partition.next_batch(100, lambda _: None, 1 << 30) or self.partition.claim()
        self.partition.settled(batch)
        return batch.done_checkpoint

    def look(self) -> None:
        """Ask how far the logs go, if it is time, and take the answer."""
        self.upkeep.look({0: self.partition}, self.now)
        if self.upkeep._looking is not None:
            wait_until(self.upkeep._looking.call._call.done)
            self.upkeep.look({0: self.partition}, self.now)

    def tend(self, after_s: float = UPKEEP_S) -> list[tuple[str, int]]:
        """Run the upkeep some time later, and return the deletions."""
        self.now += after_s
        begun = self.admin.asked
        was_deleting = self.upkeep._deleting
        self.look()
        if self.upkeep._deleting not in {None, was_deleting}:
            wait_until(lambda: self.admin.asked > begun)
        return [(topic, offset) for topic, offset, _ in self.admin.deleting]

    def answer(self, error: KafkaException | None = None) -> None:
        """Answer the deletions."""
        deleting: Any = self.upkeep._deleting
        self.admin.answer(error)
        wait_until(deleting._call.done)


def test_the_done_log_is_trimmed_last_after_half_and_op_were_and_below_what_was_committed() -> None:
    room = Room()

    assert sorted(room.tend()) == [(TOPICS.half, 1), (TOPICS.op, 1)]
    assert sorted(room.tend()) == [(TOPICS.half, 1), (TOPICS.op, 1)], "they are under way, and not asked for again"
    assert room.commit() == 0, "what it says is needed as long as they are not known to be deleted"
    room.answer()
    assert room.tend() == []
    assert room.commit() == 2
    assert room.tend() == [(TOPICS.done, 2)]
    room.answer()
    assert room.tend() == []


def test_a_deletion_that_is_refused_is_reported_with_the_right_it_needs_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    room = Room()
    room.tend()

    room.answer(KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
    assert len(room.tend()) == 2

    assert "topic store.half cannot be truncated" in caplog.text
    assert "lacks the permission Delete on topic store.half" in caplog.text
    assert [*room.rights.missing()] == ["Delete on topic store.half", "Delete on topic store.op"]
    assert room.commit() == 0


def test_an_answer_is_compared_with_what_had_been_read_when_it_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    room = Room()
    room.tend()
    room.now += UPKEEP_S
    room.upkeep.look({0: room.partition}, room.now)
    looking: Any = room.upkeep._looking
    wait_until(looking.call._call.done)

    # Meanwhile more is read and settled than there was when it was asked.
    room.settle_one(1)
    room.look()

    assert room.upkeep._looking is None, "the answer was compared"
    assert "was deleted and made again" not in caplog.text
    assert room.partition._counts.lost == 0


def test_what_is_written_down_whole_is_looked_for_from_where_the_done_log_ended_as_that_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot, "GAP", 0)
    room = Room()
    room.tend()
    old = Half(new_id(), "orders", "topic", None, None, b"v", (), None)
    room.partition.feed.take_half(half_record(1, old), room.now)
    for offset in range(2, 10):
        room.partition.feed.take_half(fetched(offset, b"no half"), room.now)
    room.partition.note_progress(room.now)
    room.partition._snapshot_due = 0.0
    batch = room.partition.next_batch(100, lambda _: None, 1 << 30)
    assert batch is not None
    assert [snapshot.note.transaction_id for snapshot in batch.snapshots] == [old.transaction_id]
    room.partition.began(batch)

    # Its record is at 2; the logs are looked at before its end is known.
    room.admin.ends = {TOPICS.half: 10, TOPICS.op: 1, TOPICS.done: 4}
    room.tend()
    assert room.partition.done_end == 4
    room.partition.settled(batch)

    assert [pending.snapshot_at for pending in room.partition.state.places.snapshotted.values()] == [2]


def test_an_answer_without_an_offset_is_no_end_of_a_log(caplog: pytest.LogCaptureFixture) -> None:
    room = Room()
    room.tend()
    positions = room.partition.state.half_position, room.partition.state.op_position
    caplog.clear()

    # So it is answered for a moment where a partition has no leader.
    room.admin.ends = dict.fromkeys(room.admin.ends, OFFSET_INVALID)
    room.tend()

    assert "it is not known where" in caplog.text
    assert "was deleted and made again" not in caplog.text
    assert (room.partition.state.half_position, room.partition.state.op_position) == positions
    assert room.partition._counts.lost == 0


def made_again(admin: Admin) -> None:
    admin.made[TOPICS.half] += 1


def cut_off_at_its_end(admin: Admin) -> None:
    admin.ends[TOPICS.op] = 0


def deleted_from(admin: Admin) -> None:
    admin.lows[TOPICS.done] = 1


@pytest.mark.parametrize("what", [made_again, cut_off_at_its_end, deleted_from])
def test_a_partition_with_a_log_that_is_not_as_it_was_read_is_given_up_and_nothing_of_it_published_or_deleted(
    what: Callable[[Admin], None], caplog: pytest.LogCaptureFixture
) -> None:
    room = Room()
    room.tend()
    room.answer()
    room.commit()
    assert not room.partition.is_given_up
    room.settle_one(1)
    room.admin.ends = {TOPICS.half: 2, TOPICS.op: 2, TOPICS.done: 4}

    what(room.admin)
    assert room.tend() == []

    assert room.partition.is_given_up
    assert "half partition 0 is given up, and taken over again" in caplog.text
    room.partition.feed.take_half(
        half_record(2, Half(new_id(), "orders", "topic", None, None, b"v", (), None)), room.now
    )
    assert room.partition.next_batch(100, lambda _: None, 1 << 30) is None
