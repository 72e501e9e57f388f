"""The state machine of a half partition: I7 and I8 by simulation, without Kafka and without a clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.transactions.coordinator.state.check_schedule import CheckPolicy, CheckSchedule
from penstock.transactions.coordinator.state.judgement import Refusal
from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.coordinator.state.state_machine import PartitionState
from penstock.transactions.wire.done_records import Note
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict

DECISIONS = {Verdict.COMMIT, Verdict.ROLLBACK, Verdict.DISCARD}


def half(transaction_id: str | None = None) -> Half:
    return Half(transaction_id or new_id(), "orders", "topic", None, None, b"v", (), None)


def op(of: Half, verdict: Verdict, offsets: tuple[int, ...], number: int = 0, group: str = "orders") -> Op:
    return Op(of.transaction_id, verdict, Author.PRODUCER, group, 0, offsets, number)


@dataclass
class World:
    """The logs of one half partition, and a coordinator on them that may be restarted at any step."""

    halves: list[Half] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    done: list[Note] = field(default_factory=list)
    positions: tuple[int, int] = (0, 0)
    published: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    state: PartitionState = field(default_factory=lambda: PartitionState(0, 0))

    def restart(self) -> None:
        self.state = PartitionState(*self.positions)
        self.state.remember(self.done)

    def read_half(self) -> None:
        offset = self.state.half_position
        if offset < len(self.halves):
            self.state.add_half(offset, self.halves[offset])
            self.state.join_ahead(self.halves[offset].transaction_id)

    def read_op(self) -> None:
        offset = self.state.op_position
        if offset < len(self.ops):
            self.state.add_op(offset, self.ops[offset], 1000 + offset)

    def publish(self, limit: int, *, refuses: str | None = None, committed: bool = True) -> None:
        batch = self.state.next_batch(
            limit, lambda pending: "topic" if pending.half.transaction_id == refuses else None
        )
        self.state.queue.release("topic")
        if batch is None or not committed:
            return
        # One Kafka transaction: targets, completions and positions, all or nothing.
        self.published += [p.half.transaction_id for p in batch.decided if p.verdict is Verdict.COMMIT]
        self.done += batch.notes()
        assert batch.half_checkpoint >= self.positions[0], "positions never go back"
        assert batch.op_checkpoint >= self.positions[1], "positions never go back"
        self.positions = (batch.half_checkpoint, batch.op_checkpoint)
        self.state.apply(batch)

    def drain(self) -> None:
        while self.state.half_position < len(self.halves) or self.state.op_position < len(self.ops):
            self.read_half()
            self.read_op()
        self.state.sweep_ahead(len(self.halves))
        self.state.sweep_ahead(len(self.halves))
        while self.state.has_work:
            self.publish(3)

    def first_decisions(self) -> dict[str, Verdict]:
        """Return what the op log says: the first valid decision for each half."""
        places = {h.transaction_id: offset for offset, h in enumerate(self.halves)}
        first: dict[str, Verdict] = {}
        for record in self.ops:
            if self._is_valid(record, places.get(record.transaction_id)) and record.verdict in DECISIONS:
                first.setdefault(record.transaction_id, record.verdict)
        return first

    def answered_checks(self, of: Half) -> int:
        """Return what the op log says of a half that is not decided: each answer counts if its number is the next."""
        count, place = 0, self.halves.index(of)
        for record in self.ops:
            if record.transaction_id == of.transaction_id and self._is_valid(record, place):
                count += record.verdict is Verdict.UNKNOWN and record.check_number == count + 1
        return count

    @staticmethod
    def _is_valid(record: Op, place: int | None) -> bool:
        return place is not None and record.group == "orders" and record.half_offsets in ((), (place,))


steps = st.lists(
    st.tuples(
        st.sampled_from(["half", "decide", "decide", "read half", "read op", "read op", "publish", "lose", "restart"]),
        st.integers(0, 1 << 20),
    ),
    min_size=20,
    max_size=80,
)


@settings(max_examples=400, deadline=None)
@given(steps)
def test_whatever_happens_when_each_half_is_published_once_iff_its_first_decision_is_commit(
    plan: list[tuple[str, int]],
) -> None:
    world = World(halves=[half() for _ in range(4)])

    for step, number in plan:
        if step == "half":
            world.halves.append(half())
        elif step == "decide":
            place = number % len(world.halves)
            verdict = list(Verdict)[number // 7 % 4]
            offsets = ((place,), (place,), (), (place + 1,))[number // 31 % 4]
            group = "others" if number % 13 == 0 else "orders"
            if not offsets and verdict is not Verdict.ROLLBACK:
                offsets = (place,)
            verdict = Verdict.UNKNOWN if number % 5 == 0 else verdict
            world.ops.append(op(world.halves[place], verdict, offsets, number // 5 % 4, group))
        elif step == "read half":
            world.read_half()
        elif step == "read op":
            world.read_op()
        elif step == "publish":
            refused = world.halves[number % len(world.halves)].transaction_id if number % 3 == 0 else None
            world.publish(1 + number % 4, refuses=refused)
        elif step == "lose":
            world.publish(5, committed=False)
        else:
            world.restart()
    world.restart()
    world.drain()

    first = world.first_decisions()
    assert Counter(world.published) == Counter(name for name, verdict in first.items() if verdict is Verdict.COMMIT)
    ends = Counter(note.transaction_id for note in world.done if note.verdict is not Verdict.UNKNOWN)
    assert ends == Counter(first.keys())
    assert set(world.state.pending) == {h.transaction_id for h in world.halves} - set(first)
    for one in world.state.pending.values():
        assert one.check_count == world.answered_checks(one.half)


@settings(max_examples=200, deadline=None)
@given(steps, st.integers(0, 80))
def test_a_restart_at_any_step_ends_in_the_same_state(plan: list[tuple[str, int]], at: int) -> None:
    results = []

    for restarts in (False, True):
        world = World()
        world.halves = [Half(f"{n}", "orders", "topic", None, None, None, (), None) for n in range(8)]
        for index, (step, number) in enumerate(plan):
            place = number % len(world.halves)
            if step == "decide":
                world.ops.append(op(world.halves[place], list(Verdict)[number // 7 % 4], (place,), number // 5 % 4))
            elif step == "publish":
                world.drain()
            if restarts and index == at:
                world.restart()
        world.drain()
        pending = {name: (p.check_count, p.offset) for name, p in world.state.pending.items()}
        results.append((sorted(world.published), pending, world.state.half_position, world.state.op_position))

    assert results[0] == results[1]


def test_a_decision_ahead_of_its_half_is_held_and_then_counts() -> None:
    state, later = PartitionState(0, 0), half()

    assert state.add_op(0, op(later, Verdict.COMMIT, (0,)), 0) is None
    assert not state.has_work
    assert isinstance(state.add_half(0, later), Pending)
    assert state.join_ahead(later.transaction_id) == []

    batch = state.next_batch(10, lambda _: None)
    assert batch is not None
    assert [p.half for p in batch.decided] == [later]
    assert (batch.half_checkpoint, batch.op_checkpoint) == (1, 1)


def test_a_held_transaction_keeps_the_checkpoints_and_lets_the_others_pass() -> None:
    state = PartitionState(0, 0)
    halves = [half() for _ in range(3)]
    for offset, each in enumerate(halves):
        state.add_half(offset, each)
        state.add_op(offset, op(each, Verdict.COMMIT, (offset,)), 0)

    batch = state.next_batch(10, lambda pending: "topic" if pending.offset == 1 else None)

    assert batch is not None
    assert [p.offset for p in batch.decided] == [0, 2]
    assert (batch.half_checkpoint, batch.op_checkpoint) == (1, 1)
    state.apply(batch)
    assert state.next_batch(10, lambda _: None) is None
    state.queue.release("topic")
    assert state.next_batch(10, lambda _: None) is not None


def test_a_second_decision_and_a_late_one_are_told_apart_from_the_first() -> None:
    state, one = PartitionState(0, 0), half()
    state.add_half(0, one)

    assert state.add_op(0, op(one, Verdict.COMMIT, (0,)), 0) is None
    assert state.add_op(1, op(one, Verdict.ROLLBACK, (0,)), 0) is Refusal.ALREADY_DECIDED
    batch = state.next_batch(10, lambda _: None)
    assert batch is not None
    state.apply(batch)
    assert state.add_op(2, op(one, Verdict.ROLLBACK, (0,)), 0) is Refusal.SETTLED_OR_UNKNOWN


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


def test_checks_are_taken_in_portions() -> None:
    several = [pending() for _ in range(5)]
    schedule = schedule_of(*several)
    for one in several:
        schedule.add(one)

    assert len(list(schedule.take_due(6.0, 3))) == 3
    assert len(list(schedule.take_due(6.0, 3))) == 2


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


def test_a_check_of_a_former_life_is_not_taken_for_one_of_the_next_life_of_the_same_id() -> None:
    former = pending()
    known = {former.half.transaction_id: former}
    schedule = CheckSchedule(POLICY, known.get)
    schedule.add(former)
    schedule.add(one := pending())
    known[one.half.transaction_id] = one
    assert list(schedule.take_due(6.0, 1)) == [former]
    schedule.postpone(former, 6.0)
    schedule._ripen(6.0)

    later = Pending(former.half, 7)
    later.birth_ms = 100_000
    known[former.half.transaction_id] = later
    schedule.add(later)

    assert list(schedule.take_due(7.0, 10)) == [one]
    assert list(schedule.take_due(106.0, 10)) == [later]


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
