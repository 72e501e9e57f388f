"""Transactions of several messages, delayed ones, and what a state machine makes of halves that do not fit together."""

from __future__ import annotations

import time
from functools import partial

import pytest
from transaction_tools import Bench

from penstock.outgoing import Outgoing
from penstock.transactions.coordinator.state.check_schedule import CheckPolicy
from penstock.transactions.coordinator.state.judgement import Refusal
from penstock.transactions.coordinator.state.pending.ready_queue import CommitBatch
from penstock.transactions.coordinator.state.state_machine import PartitionState
from penstock.transactions.wire.done_records import Note
from penstock.transactions.wire.half import Half, encode_half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict
from waiting import wait_until

ID = new_id()


def part(number: int, count: int, group: str = "g") -> Half:
    return Half(ID, group, "topic", None, None, b"%d" % number, (), None, part=(number, count))


def op(verdict: Verdict, *offsets: int, author: Author = Author.PRODUCER) -> Op:
    return Op(ID, verdict, author, "g", 0, offsets, 0)


def settle(state: PartitionState) -> CommitBatch:
    batch = state.next_batch(10, lambda _: None)
    assert batch is not None
    state.apply(batch)
    return batch


def test_all_parts_go_together_in_their_order_however_they_were_stored() -> None:
    state = PartitionState(0, 0)
    state.add_half(0, part(2, 3))
    state.add_half(1, part(3, 3))

    assert state.add_op(0, op(Verdict.COMMIT, 2, 0, 1), 0) is None
    assert not state.has_work, "the first part is not there yet"
    state.add_half(2, part(1, 3))
    assert state.join_ahead(ID) == []

    batch = settle(state)
    assert [half.value for half in batch.decided[0].halves] == [b"1", b"2", b"3"]
    assert batch.notes() == [Note(ID, 2, Verdict.COMMIT, 0, 0, 0, 0)]
    assert (batch.half_checkpoint, batch.op_checkpoint) == (3, 1)


def test_a_note_on_several_parts_is_kept_until_the_last_was_read_again() -> None:
    state = PartitionState(0, 1)
    state.remember([Note(ID, 4, Verdict.COMMIT, 0, 0, 0, 0)])

    assert state.add_half(0, part(1, 2)) is None
    assert state.add_half(4, part(2, 2)) is None
    assert not state.pending


def test_a_commit_that_does_not_name_all_parts_is_refused() -> None:
    state = PartitionState(0, 0)
    state.add_half(0, part(1, 2))
    state.add_half(1, part(2, 2))

    assert state.add_op(0, op(Verdict.COMMIT, 0), 0) is Refusal.WRONG_PLACE
    assert state.add_op(1, op(Verdict.COMMIT, 0, 1), 0) is None


@pytest.mark.parametrize("stranger", [part(1, 2), part(2, 3), part(2, 2, group="others")])
def test_parts_that_contradict_each_other_can_only_be_rolled_back(stranger: Half) -> None:
    state = PartitionState(0, 0)
    state.add_half(0, part(1, 2))

    assert state.add_half(1, stranger) is Refusal.DUPLICATE_ID
    state.add_half(2, part(2, 2))
    assert state.add_op(0, op(Verdict.COMMIT, 0, 2), 0) is Refusal.INCOMPLETE
    assert state.add_op(1, op(Verdict.ROLLBACK, 0, author=Author.COORDINATOR), 0) is None
    assert settle(state).decided[0].verdict is Verdict.ROLLBACK


def test_a_commit_of_what_can_never_be_complete_is_refused_once_that_is_known() -> None:
    state = PartitionState(0, 0)
    state.add_half(0, part(1, 2))

    assert state.add_op(0, op(Verdict.COMMIT, 0, author=Author.CHECK), 0) is None
    assert state.sweep_ahead(1) == 1
    batch = state.next_batch(10, lambda _: None)
    assert batch is None
    assert state.add_op(1, op(Verdict.ROLLBACK, author=Author.COORDINATOR), 0) is None
    assert settle(state).op_checkpoint == 2


def test_several_messages_to_several_topics_are_visible_together_or_not_at_all(
    bench: Bench, request: pytest.FixtureRequest
) -> None:
    other = request.getfixturevalue("new_topic")()
    producer, coordinator = bench.producer(), bench.coordinator()

    for value in ("1", "2"):
        with producer.transaction_of([Outgoing(bench.topic, key="a", value=value), Outgoing(other, value=value)]):
            pass
    with producer.transaction_of([Outgoing(bench.topic, key="a", value="3"), Outgoing(other, value="3")]) as tx:
        tx.rollback()
    bench.settled(coordinator, committed=2, rolled_back=1)

    assert [value for _, value in bench.visible()] == [b"1", b"2"]
    assert [value for _, value in bench.visible(other)] == [b"1", b"2"]


def test_an_incomplete_transaction_is_rolled_back_and_nobody_is_asked_about_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.coordinator.options.CheckPolicy", partial(CheckPolicy, incomplete_s=0.5))
    lost = Half(new_id(), "orders", bench.topic, None, None, b"1", (), None, part=(1, 2))
    bench.write(bench.topics.half, 0, None, b"1", encode_half(lost))
    coordinator = bench.coordinator()

    now = bench.settled(coordinator, rolled_back=1)

    assert (now.checks, now.no_producer, now.discarded) == (0, 0, 0)
    assert bench.visible() == []


def test_a_delayed_message_is_published_when_due_and_holds_nothing_up(bench: Bench) -> None:
    producer, coordinator = bench.producer(), bench.coordinator()
    bench.counted(coordinator, partitions=2)
    due = time.time() + 8

    producer.send(bench.topic, key="a", value="later", deliver_at=due)
    producer.send(bench.topic, key="a", value="now")
    wait_until(lambda: bench.visible() == [(b"a", b"now")] and coordinator.statistics().delayed == 1)
    bench.settled(coordinator, committed=2)

    (late,) = [m for m in bench.messages() if m.value() == b"later"]
    # The broker's clock and this one are the same here; append times are cut to milliseconds.
    assert late.timestamp()[1] >= due * 1000 - 50
    assert coordinator.statistics().checks == 0
