"""A COMMIT that is taken back before its message is due: what counts, on the state machine alone."""

from __future__ import annotations

import pytest

from penstock.transactions.coordinator.state.judgement import Refusal
from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.coordinator.state.recovered_state import live_snapshots
from penstock.transactions.coordinator.state.state_machine import PartitionState
from penstock.transactions.wire.done_records import Done
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict

DUE_MS = 1_000


def committed(deliver_at_ms: int | None = DUE_MS) -> tuple[PartitionState, Half]:
    """Return what knows of one committed transaction, and its half."""
    state = PartitionState(0, 0)
    half = Half(new_id(), "orders", "topic", None, None, b"v", (), None, deliver_at_ms)
    state.add_half(0, half)
    assert state.add_op(0, said(half, Verdict.COMMIT), 10) is None
    return state, half


def said(half: Half, verdict: Verdict, author: Author = Author.PRODUCER, group: str = "orders") -> Op:
    return Op(half.transaction_id, verdict, author, group, 0, (0,), 0)


def settled(state: PartitionState, now_ms: int) -> list[Verdict | None]:
    state.now_ms = now_ms
    batch = state.next_batch(10, lambda _: None)
    if batch is None:
        return []
    ends = [pending.verdict for pending in batch.decided]
    state.apply(batch)
    return ends


@pytest.mark.parametrize("author", [Author.PRODUCER, Author.OPERATOR])
def test_what_is_not_due_is_rolled_back_by_its_group_or_an_operator(author: Author) -> None:
    state, half = committed()

    assert state.add_op(1, said(half, Verdict.ROLLBACK, author), 999) is None

    assert settled(state, 500) == [Verdict.ROLLBACK]
    assert state.checkpoints() == (1, 2)
    assert not len(state.queue.delays)


@pytest.mark.parametrize(
    ("op", "appended_ms", "refusal"),
    [
        ({"author": Author.CHECK}, 20, Refusal.ALREADY_DECIDED),
        ({"author": Author.COORDINATOR}, 20, Refusal.ALREADY_DECIDED),
        ({"verdict": Verdict.DISCARD}, 20, Refusal.ALREADY_DECIDED),
        ({"verdict": Verdict.COMMIT}, 20, Refusal.ALREADY_DECIDED),
        ({"group": "others"}, 20, Refusal.WRONG_GROUP),
        ({}, DUE_MS, Refusal.ALREADY_DECIDED),
    ],
)
def test_nobody_else_takes_it_back_and_nobody_when_it_is_due(
    op: dict[str, object], appended_ms: int, refusal: Refusal
) -> None:
    state, half = committed()

    late = said(half, Verdict.ROLLBACK)._replace(**op)  # type: ignore[arg-type] # fields of an op

    assert state.add_op(1, late, appended_ms) is refusal
    assert settled(state, DUE_MS) == [Verdict.COMMIT]


def test_what_has_no_time_of_delivery_is_not_taken_back() -> None:
    state, half = committed(None)

    assert state.add_op(1, said(half, Verdict.ROLLBACK), 11) is Refusal.ALREADY_DECIDED


def test_what_is_being_published_is_not_taken_back() -> None:
    state, half = committed()
    state.now_ms = DUE_MS
    batch = state.next_batch(10, lambda _: None)
    assert batch is not None

    assert state.add_op(1, said(half, Verdict.ROLLBACK), 999) is Refusal.ALREADY_DECIDED

    assert [pending.verdict for pending in batch.decided] == [Verdict.COMMIT]


def test_a_commit_after_the_cancellation_is_refused() -> None:
    state, half = committed()
    state.add_op(1, said(half, Verdict.ROLLBACK), 20)

    assert state.add_op(2, said(half, Verdict.COMMIT), 30) is Refusal.ALREADY_DECIDED
    assert settled(state, 40) == [Verdict.ROLLBACK]


def test_a_carry_of_the_commit_does_not_pass_for_the_cancellation() -> None:
    state, half = committed()
    batch = state.next_batch(10, lambda _: None, state.pending.values())
    assert batch is not None
    assert [snapshot.note.verdict for snapshot in batch.snapshots] == [Verdict.COMMIT]

    # While that Kafka transaction is under way.
    state.add_op(1, said(half, Verdict.ROLLBACK), 20)
    state.apply(batch, 0)

    assert state.checkpoints() == (1, 1), "the cancellation is needed until it took effect"

    anew = PartitionState(*state.checkpoints())
    (restored,) = anew.remember([], live_snapshots([(0, Done([], batch.snapshots))]))
    assert restored.verdict is Verdict.COMMIT
    assert anew.add_op(1, said(half, Verdict.ROLLBACK), 20) is None
    assert settled(anew, 5 * DUE_MS) == [Verdict.ROLLBACK]


def test_several_messages_are_taken_back_together() -> None:
    state, name = PartitionState(0, 0), new_id()
    halves = [Half(name, "orders", f"t{n}", None, None, b"v", (), None, DUE_MS, (n, 2)) for n in (1, 2)]
    for offset, half in enumerate(halves):
        assert isinstance(state.add_half(offset, half), Pending)
    state.add_op(0, said(halves[0], Verdict.COMMIT)._replace(half_offsets=(0, 1)), 10)

    assert state.add_op(1, said(halves[0], Verdict.ROLLBACK)._replace(half_offsets=(0, 1)), 20) is None
    assert settled(state, 30) == [Verdict.ROLLBACK]
