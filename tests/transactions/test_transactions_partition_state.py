"""When checks of a half partition are due, and what its state machine makes of notes and of operators. Pure."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.transactions.coordinator.state.check_schedule import CheckPolicy, CheckSchedule
from penstock.transactions.coordinator.state.judgement import Refusal
from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.coordinator.state.state_machine import PartitionState
from penstock.transactions.wire.done_records import Note
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict


def half(transaction_id: str | None = None) -> Half:
    return Half(transaction_id or new_id(), "orders", "topic", None, None, b"v", (), None)


def op(of: Half, verdict: Verdict, offsets: tuple[int, ...], number: int = 0, group: str = "orders") -> Op:
    return Op(of.transaction_id, verdict, Author.PRODUCER, group, 0, offsets, number)


POLICY = CheckPolicy(timeout_s=6, interval_s=30, maximum=15)


def schedule_of(*pending: Pending) -> CheckSchedule:
    """Return a schedule on which checks of these may be planned."""
    return CheckSchedule(POLICY, {one.half.transaction_id: one for one in pending}.get)


def pending(immunity_s: float | None = None) -> Pending:
    immune = half()._replace(immunity_ms=None if immunity_s is None else int(immunity_s * 1000))
    return Pending(immune, 0)


@given(st.floats(0, 1e6), st.none() | st.floats(0, 1000), st.none() | st.floats(0, 1e6))
def test_a_check_is_due_neither_before_timeout_nor_immunity_nor_interval(
    birth: float, immunity: float | None, answered: float | None
) -> None:
    one = pending(immunity)
    schedule = schedule_of(one)
    one.birth_ms, one.answered_ms = int(birth * 1000), int((answered or 0) * 1000)

    schedule.add(one)

    due = schedule.next_due()
    assert due is not None
    assert due >= one.birth_ms / 1000 + max(6, int((immunity or 0) * 1000) / 1000) - 1e-6
    if one.answered_ms:
        assert due >= one.answered_ms / 1000 + 30 - 1e-6
    assert list(schedule.take_due(due - 0.001, 10)) == []
    assert list(schedule.take_due(due, 10)) == [one]


def test_a_decided_half_and_a_postponed_one_are_not_asked_about() -> None:
    decided, postponed, due = pending(), pending(), pending()
    schedule = schedule_of(decided, postponed, due)
    for one in (decided, postponed, due):
        schedule.add(one)
    decided.verdict = Verdict.COMMIT
    schedule.postpone(postponed, 100.0)

    assert list(schedule.take_due(6.0, 10)) == [due]
    assert list(schedule.take_due(99.0, 10)) == []
    assert list(schedule.take_due(100.0, 10)) == [postponed]


def test_groups_take_turns_and_a_parked_one_is_left_alone() -> None:
    crowd = [Pending(half()._replace(group="crowd"), n) for n in range(5)]
    few = [Pending(half()._replace(group="few"), n) for n in range(2)]
    schedule = schedule_of(*crowd, *few)
    for one in [*crowd, *few]:
        schedule.add(one)

    first = list(schedule.take_due(6.0, 4))
    assert Counter(one.half.group for one in first) == {"crowd": 2, "few": 2}
    assert schedule.park("crowd", 10.0) == 3
    assert schedule.next_due() == 10.0
    assert list(schedule.take_due(9.0, 10)) == []
    assert list(schedule.take_due(10.0, 10)) == crowd[2:]


def test_a_parked_group_does_not_hold_back_what_nobody_has_to_be_asked_about() -> None:
    asked, exhausted = pending(), pending()
    schedule = schedule_of(asked, exhausted)
    exhausted.check_count = POLICY.maximum
    schedule.add(asked)
    schedule.add(exhausted)

    schedule.park("orders", 100.0)

    assert list(schedule.take_due(7.0, 10)) == [exhausted]


def test_intervals_grow_with_the_back_off_to_an_hour() -> None:
    policy = CheckPolicy(6, 30, 15, backoff=2.0)

    assert [policy.interval(count) for count in (1, 2, 3, 8, 1000)] == [30, 60, 120, 3600, 3600]
    assert CheckPolicy(6, 7200, 15, backoff=2.0).interval(5) == 7200
    assert POLICY.interval(9) == 30


@pytest.mark.parametrize("immunity_s", [None, 3600])
def test_ids_of_what_is_settled_do_not_heap_up_until_their_checks_would_be_due(immunity_s: float | None) -> None:
    known: dict[str, Pending] = {}
    schedule = CheckSchedule(POLICY, known.get)
    stays = pending(immunity_s)
    known[stays.half.transaction_id] = stays
    schedule.add(stays)
    for n in range(20_000):
        one = pending(immunity_s)
        one.birth_ms = n
        known[one.half.transaction_id] = one
        schedule.add(one)
        del known[one.half.transaction_id]

    assert len(schedule._first) + len(schedule._later) < 10_000
    assert list(schedule.take_due(4000.0, 10)) == [stays]


def test_of_several_notes_on_one_half_the_end_stands_and_else_the_greatest_count() -> None:
    settled, counted = half(), half()
    state = PartitionState(0, 0)
    state.remember(
        [
            Note(settled.transaction_id, 0, Verdict.UNKNOWN, 1, 10),
            Note(counted.transaction_id, 1, Verdict.UNKNOWN, 1, 20),
            Note(settled.transaction_id, 0, Verdict.COMMIT, 1, 10),
            Note(counted.transaction_id, 1, Verdict.UNKNOWN, 2, 30),
        ]
    )

    assert state.add_half(0, settled) is None
    known = state.add_half(1, counted)

    assert isinstance(known, Pending)
    assert (known.check_count, known.answered_ms) == (2, 30)


@pytest.mark.parametrize("is_published", [False, True])
def test_an_operators_discard_of_what_is_being_published_is_judged_when_that_has_ended(is_published: bool) -> None:
    state, one = PartitionState(0, 0), half()
    discard = Op(one.transaction_id, Verdict.DISCARD, Author.OPERATOR, "orders", 0, (0,), 0)
    state.add_half(0, one)
    state.add_op(0, op(one, Verdict.COMMIT, (0,)), 1_000)
    batch = state.next_batch(1, lambda _: None)
    assert batch is not None
    (pending,) = batch.decided
    pending.in_flight = True

    assert state.add_op(1, discard, 2_000) is None
    assert state.sweep_ahead(1) == 0
    assert state.checkpoints() == (0, 0)
    assert pending.verdict is Verdict.COMMIT
    pending.in_flight = False
    if is_published:
        state.apply(batch)

    refused = state.join_ahead(one.transaction_id)
    assert refused == ([(1, Refusal.SETTLED_OR_UNKNOWN)] if is_published else [])
    if is_published:
        assert state.checkpoints() == (1, 2)
    else:
        assert (pending.verdict, pending.author, pending.decided_at) == (Verdict.DISCARD, Author.OPERATOR, 1)
        assert state.checkpoints() == (0, 1)
