"""A half partition in a coordinator's hands, without Kafka."""

from __future__ import annotations

from half_partition import context_of, fetched, half_partition, half_record, op_record, recovered_at

from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition, held_in
from penstock.transactions.stores.store_coordinator import Counts
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict, encode_op
from penstock.transactions.wire.topics import StoreTopics


def test_a_partition_counts_as_recovered_only_when_all_that_was_in_its_logs_is_read() -> None:
    owned = half_partition(recovered_at(5, 3, half_end=7, op_end=4))
    half = Half(new_id(), "orders", "topic", None, None, b"v", (), None)
    other = half._replace(transaction_id=new_id())
    op = Op(half.transaction_id, Verdict.UNKNOWN, Author.CHECK, "orders", 0, (5,), 1)
    seen = []

    def look() -> None:
        owned.note_progress(0.0)
        now = Counts().statistics(lambda: held_in([owned], 0.0))
        seen.append((now.partitions, now.pending))

    look()
    owned.feed.take_half(half_record(5, half), 0.0)
    look()
    owned.feed.take_op(op_record(3, op), 0.0)
    look()
    owned.feed.take_half(half_record(6, other), 0.0)
    look()

    assert seen == [(0, 0), (0, 1), (0, 1), (1, 2)]


def decided_in_order(owned: HalfPartition) -> list[str]:
    return list(owned.state.queue.all)


def test_decisions_wait_for_a_half_however_long_its_log_is_not_read() -> None:
    owned = half_partition()
    halves = [Half(new_id(), "orders", "topic", None, b"k", b"v", (), None) for _ in range(2)]
    owned.feed.take_half(half_record(0, halves[0]), 0.0)
    for place, number in enumerate((1, 0)):
        op = Op(halves[number].transaction_id, Verdict.COMMIT, Author.PRODUCER, "orders", 0, (number,), 0)
        owned.feed.take_op(op_record(place, op), 1.0)

    # What was asked for before the decision was read tells nothing of its half.
    owned.feed.learn_half_end(1, asked=0.9)
    for now in (2.0, 4.0, 60.0):
        owned.note_progress(now)
        assert owned.feed.wants_half_end(now)
        assert decided_in_order(owned) == []
    # It is there; how long reading it takes does not matter.
    owned.feed.learn_half_end(2, asked=60.0)
    owned.note_progress(100.0)
    assert decided_in_order(owned) == []
    assert not owned.feed.wants_half_end(100.0)

    owned.feed.take_half(half_record(1, halves[1]), 100.0)
    owned.note_progress(100.0)

    assert decided_in_order(owned) == [halves[1].transaction_id, halves[0].transaction_id]


def test_a_decision_for_a_half_that_cannot_come_holds_others_up_only_until_the_end_of_the_half_log_is_known() -> None:
    context = context_of(StoreTopics("store", 1))
    owned = half_partition(context=context)
    half = Half(new_id(), "orders", "topic", None, None, b"v", (), None)
    owned.feed.take_half(half_record(0, half), 0.0)
    forged = Op(new_id(), Verdict.COMMIT, Author.PRODUCER, "orders", 0, (10**12,), 0)
    real = Op(half.transaction_id, Verdict.COMMIT, Author.PRODUCER, "orders", 0, (0,), 0)
    for place, record in enumerate((encode_op(forged), b"garbage", encode_op(real))):
        owned.feed.take_op(fetched(place, record), 0.0)

    owned.note_progress(0.9)
    assert decided_in_order(owned) == []
    assert owned.state.op_position == 0, "what waits would be read again after a restart"
    owned.feed.learn_half_end(1, asked=0.9)
    owned.note_progress(1.0)

    assert decided_in_order(owned) == [half.transaction_id]
    assert context.counts.forged == 1
    assert owned.state.op_position == 3


def test_a_half_that_was_ahead_before_a_mark_named_the_time_is_checked_no_later_than_others() -> None:
    owned = half_partition()
    ahead, usual = (Half(new_id(), "orders", "topic", None, None, b"v", (), None) for _ in range(2))
    owned.feed.take_half(half_record(0, ahead, appended_s=3_600), 0.0)
    owned.note_progress(0.0)
    assert owned.plan.next_due() == 3_606

    owned.clock.marked(10_000, sent=0.1, acknowledged=0.1)
    owned.note_progress(0.1)
    owned.feed.take_half(half_record(1, usual, appended_s=10.1), 0.2)
    owned.note_progress(0.2)

    assert owned.state.pending[ahead.transaction_id].birth_ms == 10_000
    assert owned.plan.next_due() == 16
    due = [one.half.transaction_id for one in owned.plan.take_due(17, 10)]
    assert sorted(due) == sorted([ahead.transaction_id, usual.transaction_id])
