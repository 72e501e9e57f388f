"""The coordinator's state machine by simulation: I7, I8, order per key, and the defects that this must find.

Order holds whatever payloads are dropped and whatever topics take nothing.
`make simulate` makes ten thousand runs. One seed alone: PENSTOCK_SIMULATION_SEED=<seed>.
"""

# ruff: noqa: ARG005 - what is planted takes the arguments of what it replaces

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from partition_world import World
from penstock.transactions.core import decisions, state
from penstock.transactions.core.checkpoints import HeldDecisions, HeldOp, LogPlaces
from penstock.transactions.core.decisions import Kind, Ruling, Standing
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.queue import Delays, KeyOrder, ReadyQueue
from penstock.transactions.core.recovered_state import RecoveredNotes, live_snapshots
from penstock.transactions.core.set_aside import SetAside
from penstock.transactions.core.state import PartitionState
from penstock.transactions.wire.done_records import Done, Snapshot
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict
from simulation.varied import RUNS, chunks, thorough

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(("first", "count"), chunks(RUNS))
def test_each_transaction_ends_once_as_decided_first_whatever_is_restarted_lost_or_trimmed(
    first: int, count: int
) -> None:
    for seed in range(first, first + count):
        World(seed).run()


def test_what_a_snapshot_decided_waits_for_decisions_before_it_that_are_read_again() -> None:
    first, second = (Half(new_id(), "orders", "t", None, b"k", b"v", (), None) for _ in range(2))
    ids = first.transaction_id, second.transaction_id
    ops = [Op(name, Verdict.COMMIT, Author.PRODUCER, "orders", 0, (at,), 0) for at, name in enumerate(ids)]
    state, done = PartitionState(0, 0), list[Done]()
    pending = [state.add_half(at, half) for at, half in enumerate((first, second))]

    def read(state: PartitionState, at: int) -> None:
        assert state.add_op(at, ops[at], 1) is None
        state.skip_op(at)

    def take_snapshot(one: object) -> tuple[int, int]:
        assert isinstance(one, Pending)
        batch = state.next_batch(10, lambda _: "t", [one])
        assert batch is not None
        done.append(Done(batch.notes(), batch.snapshots))
        state.apply(batch, len(done) - 1)
        return batch.half_checkpoint, batch.op_checkpoint

    take_snapshot(pending[0])  # undecided
    read(state, 0)
    read(state, 1)
    again = PartitionState(*take_snapshot(pending[1]))
    again.remember([], live_snapshots(enumerate(done)))
    read(again, 0)
    read(again, 1)

    batch = again.next_batch(10, lambda _: None)
    assert batch is not None
    assert [one.half for one in batch.decided] == [first, second]


def test_one_that_goes_with_its_line_before_its_decision_is_read_again_goes_once() -> None:
    plain = Half(new_id(), "orders", "t", None, None, b"v", (), None)
    first, second = (plain._replace(transaction_id=new_id(), key=b"k", order_key=b"k") for _ in range(2))
    halves = (first, second, plain)
    places = ((plain, 2), (first, 0), (second, 1))
    ops = [Op(half.transaction_id, Verdict.COMMIT, Author.PRODUCER, "orders", 0, (at,), 0) for half, at in places]
    state = PartitionState(0, 0)
    pending = [state.add_half(at, half) for at, half in enumerate(halves)]
    for at, op in enumerate(ops):
        state.add_op(at, op, 1)
    snapshots = state.next_batch(10, lambda _: "t", [one for one in pending[:2] if isinstance(one, Pending)])
    assert snapshots is not None
    assert (snapshots.half_checkpoint, snapshots.op_checkpoint) == (2, 0)

    again = PartitionState(2, 0)
    again.remember([], live_snapshots([(0, Done(snapshots.notes(), snapshots.snapshots))]))
    again.add_half(2, plain)
    published: list[str] = []
    for at, op in enumerate(ops):
        again.add_op(at, op, 1)
        while (batch := again.next_batch(10, lambda _: None)) is not None:
            published += [one.transaction_id for one in batch.decided]
            again.apply(batch)

    assert published == [half.transaction_id for half in (plain, first, second)]


def test_all_that_can_happen_to_a_settlement_does_happen() -> None:
    seen: Counter[str] = Counter()

    for seed in range(60):
        world = World(seed)
        world.run()
        seen += world.happened

    ends = {"committed", "aborted", "in doubt, committed", "in doubt, aborted"}
    happens = {
        "cancelled",
        "snapshotted",
        "resumed",
        "brought back early",
        "truncated",
        "truncated meanwhile",
        "restarted",
        "dropped",
        "loaded",
        "tried apart",
    }
    assert set(+seen) == {*ends, *happens}


def rule(patch: pytest.MonkeyPatch, standing: Standing, kind: Kind, ruling: Ruling) -> None:
    """Change one place of the table of decisions."""
    rows = [list(row) for row in decisions.TABLE]
    rows[standing][kind] = ruling
    patch.setattr(decisions, "TABLE", tuple(map(tuple, rows)))


def forgets_carries(patch: pytest.MonkeyPatch) -> None:
    """Snapshotted transactions are not read after a restart."""
    remember = PartitionState.remember
    patch.setattr(PartitionState, "remember", lambda self, notes, snapshots=(): remember(self, notes))


def pops_notes_early(patch: pytest.MonkeyPatch) -> None:
    """A note is forgotten when the first half of its transaction is read again."""
    note_on = RecoveredNotes.note_on

    def pop(self: RecoveredNotes, transaction_id: str, offset: int) -> object:
        found = note_on(self, transaction_id, offset)
        self.notes.pop(transaction_id, None)
        return found

    patch.setattr(RecoveredNotes, "note_on", pop)


def lets_later_halves_of_a_key_pass(patch: pytest.MonkeyPatch) -> None:
    """Each transaction counts as the head of its line."""
    enter = ReadyQueue._enter

    def enter_at_once(self: ReadyQueue, pending: Pending) -> None:
        enter(self, pending)
        self._ready.setdefault(pending.half.transaction_id, pending)

    patch.setattr(ReadyQueue, "_enter", enter_at_once)


def forgets_who_stands_behind(patch: pytest.MonkeyPatch) -> None:
    """The next one of a key is not released when the head has gone."""
    remove = KeyOrder.remove
    patch.setattr(KeyOrder, "remove", lambda self, key, pending: remove(self, key, pending) and None)


def commits_what_is_there_of_a_transaction(patch: pytest.MonkeyPatch) -> None:
    """A transaction of several messages need not be complete."""
    patch.setattr(Pending, "is_complete", True)
    patch.setattr(PartitionState, "_is_behind", lambda self, pending, op: False)


def publishes_before_time(patch: pytest.MonkeyPatch) -> None:
    """Delayed transactions are due at once."""
    add = Delays.add
    patch.setattr(Delays, "add", lambda self, pending, due_ms: add(self, pending, 0))


def lets_the_last_decision_win(patch: pytest.MonkeyPatch) -> None:
    """A second decision replaces the first, as long as it is not published."""
    for standing in (Standing.COMMITTED, Standing.OVER):
        rule(patch, standing, Kind.COMMIT, Ruling.REPLACE)
        rule(patch, standing, Kind.ROLLBACK, Ruling.REPLACE)


def forgets_decisions_ahead(patch: pytest.MonkeyPatch) -> None:
    """Op records with decisions that wait for their halves are passed by the checkpoint."""
    hold = HeldDecisions.hold

    def hold_nothing_open(self: HeldDecisions, decision: HeldOp) -> None:
        hold(self, decision)
        self._places.close_op(decision.place[0])

    patch.setattr(HeldDecisions, "hold", hold_nothing_open)


def passes_halves_that_are_pending(patch: pytest.MonkeyPatch) -> None:
    """The half checkpoint is the position."""
    patch.setattr(PartitionState, "_half_checkpoint", lambda self, passed: self.half_position)


def takes_a_carry_for_the_decision_that_came_after_it(patch: pytest.MonkeyPatch) -> None:
    """An op counts as unneeded once its transaction was snapshotted, without a look at the snapshot."""
    snapshot = PartitionState._take_snapshot

    def snapshot_all(self: PartitionState, done_from: int, one: Snapshot) -> None:
        snapshot(self, done_from, one)
        pending = self.pending.get(one.note.transaction_id)
        if pending is not None and pending.is_op_open:
            self.places.release_op(pending)

    patch.setattr(PartitionState, "_take_snapshot", snapshot_all)


def counts_answers_again(patch: pytest.MonkeyPatch) -> None:
    """Counts of answered checks are not written down."""
    patch.setattr(Pending, "remember_checks", lambda self, note: None)


def puts_what_came_back_last(patch: pytest.MonkeyPatch) -> None:
    """A transaction resumed before its discard was known comes after all records read since."""
    patch.setattr(state, "by_offset", lambda some: some)
    patch.setattr(LogPlaces, "sort", lambda self: None)


def cancels_what_is_due(patch: pytest.MonkeyPatch) -> None:
    """An unpublished transaction can be cancelled, even if the cancel was stored too late."""
    stands = decisions.standing_of
    patch.setattr(decisions, "standing_of", lambda pending, _, **more: stands(pending, 0, **more))


def lets_checks_cancel(patch: pytest.MonkeyPatch) -> None:
    """A check takes back what its producer has committed."""
    rule(patch, Standing.DELAYED, Kind.ROLLBACK, Ruling.REPLACE)


def publishes_what_is_not_in_memory(patch: pytest.MonkeyPatch) -> None:
    """Delays end whether payloads are there or not."""
    patch.setattr(Delays, "_list", lambda self, *, is_dropped: self._in_memory)
    patch.setattr(World, "is_out", lambda self, pending: any(half.topic in self.out for half in pending.halves))


def lets_messages_of_a_key_pass_what_is_set_aside(patch: pytest.MonkeyPatch) -> None:
    """Only what its own topic refuses is set aside."""
    patch.setattr(SetAside, "is_behind", lambda self, pending: False)


def trims_snapshots_that_are_needed(patch: pytest.MonkeyPatch) -> None:
    """The newest snapshot is taken for the oldest."""
    take = LogPlaces.take_snapshot

    def take_first(self: LogPlaces, pending: Pending, done_from: int, decision: tuple[int, int]) -> None:
        take(self, pending, done_from, decision)
        self.snapshotted.move_to_end(pending.half.transaction_id, last=False)

    patch.setattr(LogPlaces, "take_snapshot", take_first)


def takes_half_of_a_payload(patch: pytest.MonkeyPatch) -> None:
    """The first half alone gets its payload back."""

    def load(self: Pending, halves: Sequence[tuple[int, Half]]) -> bool:
        self.half, self.dropped = dict(halves)[self.offset], None
        return True

    patch.setattr(Pending, "load", load)


@thorough
@pytest.mark.parametrize(
    "plant",
    [
        puts_what_came_back_last,
        publishes_what_is_not_in_memory,
        lets_messages_of_a_key_pass_what_is_set_aside,
        trims_snapshots_that_are_needed,
        takes_half_of_a_payload,
        forgets_carries,
        pops_notes_early,
        lets_later_halves_of_a_key_pass,
        forgets_who_stands_behind,
        commits_what_is_there_of_a_transaction,
        publishes_before_time,
        lets_the_last_decision_win,
        forgets_decisions_ahead,
        passes_halves_that_are_pending,
        takes_a_carry_for_the_decision_that_came_after_it,
        counts_answers_again,
        cancels_what_is_due,
        lets_checks_cancel,
    ],
)
def test_a_planted_defect_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    with pytest.raises(AssertionError):
        run_many(1_000)


def run_many(seeds: int) -> None:
    for seed in range(seeds):
        World(seed).run()


def test_what_was_brought_back_is_read_again_from_the_snapshot_of_its_own_life() -> None:
    World(8711).run()
