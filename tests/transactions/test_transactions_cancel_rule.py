"""A COMMIT that is taken back before its message is due: what counts, on the state machine alone."""

from __future__ import annotations

import pytest

from penstock.transactions.coordinator.state.pending import Pending
from penstock.transactions.coordinator.state.recovered_state import live_carries
from penstock.transactions.coordinator.state.state_machine import Refusal, Settlement
from penstock.transactions.wire.done_records import Done
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.records import Author, Half, Op, Verdict

DUE_MS = 1_000


def committed(deliver_at_ms: int | None = DUE_MS) -> tuple[Settlement, Half]:
    """Return what knows of one committed transaction, and its half."""
    settlement = Settlement(0, 0)
    half = Half(new_id(), "orders", "topic", None, None, b"v", (), None, deliver_at_ms)
    settlement.add_half(0, half)
    assert settlement.add_op(0, said(half, Verdict.COMMIT), 10) is None
    return settlement, half


def said(half: Half, verdict: Verdict, author: Author = Author.PRODUCER, group: str = "orders") -> Op:
    return Op(half.transaction_id, verdict, author, group, 0, (0,), 0)


def settled(settlement: Settlement, now_ms: int) -> list[Verdict | None]:
    settlement.now_ms = now_ms
    share = settlement.share(10, lambda _: None)
    if share is None:
        return []
    ends = [pending.verdict for pending in share.decided]
    settlement.apply(share)
    return ends


@pytest.mark.parametrize("author", [Author.PRODUCER, Author.OPERATOR])
def test_what_is_not_due_is_rolled_back_by_its_group_or_an_operator(author: Author) -> None:
    settlement, half = committed()

    assert settlement.add_op(1, said(half, Verdict.ROLLBACK, author), 999) is None

    assert settled(settlement, 500) == [Verdict.ROLLBACK]
    assert settlement.checkpoints() == (1, 2)
    assert not len(settlement.decisions.delays)


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
    settlement, half = committed()

    late = said(half, Verdict.ROLLBACK)._replace(**op)  # type: ignore[arg-type] # fields of an op

    assert settlement.add_op(1, late, appended_ms) is refusal
    assert settled(settlement, DUE_MS) == [Verdict.COMMIT]


def test_what_has_no_time_of_delivery_is_not_taken_back() -> None:
    settlement, half = committed(None)

    assert settlement.add_op(1, said(half, Verdict.ROLLBACK), 11) is Refusal.ALREADY_DECIDED


def test_what_is_being_published_is_not_taken_back() -> None:
    settlement, half = committed()
    settlement.now_ms = DUE_MS
    share = settlement.share(10, lambda _: None)
    assert share is not None

    assert settlement.add_op(1, said(half, Verdict.ROLLBACK), 999) is Refusal.ALREADY_DECIDED

    assert [pending.verdict for pending in share.decided] == [Verdict.COMMIT]


def test_a_commit_after_the_cancellation_is_refused() -> None:
    settlement, half = committed()
    settlement.add_op(1, said(half, Verdict.ROLLBACK), 20)

    assert settlement.add_op(2, said(half, Verdict.COMMIT), 30) is Refusal.ALREADY_DECIDED
    assert settled(settlement, 40) == [Verdict.ROLLBACK]


def test_a_carry_of_the_commit_does_not_pass_for_the_cancellation() -> None:
    settlement, half = committed()
    share = settlement.share(10, lambda _: None, settlement.pending.values())
    assert share is not None
    assert [carry.note.verdict for carry in share.carried] == [Verdict.COMMIT]

    # While that Kafka transaction is under way.
    settlement.add_op(1, said(half, Verdict.ROLLBACK), 20)
    settlement.apply(share, 0)

    assert settlement.checkpoints() == (1, 1), "the cancellation is needed until it took effect"

    anew = Settlement(*settlement.checkpoints())
    (restored,) = anew.remember([], live_carries([(0, Done([], share.carried))]))
    assert restored.verdict is Verdict.COMMIT
    assert anew.add_op(1, said(half, Verdict.ROLLBACK), 20) is None
    assert settled(anew, 5 * DUE_MS) == [Verdict.ROLLBACK]


def test_several_messages_are_taken_back_together() -> None:
    settlement, name = Settlement(0, 0), new_id()
    halves = [Half(name, "orders", f"t{n}", None, None, b"v", (), None, DUE_MS, (n, 2)) for n in (1, 2)]
    for offset, half in enumerate(halves):
        assert isinstance(settlement.add_half(offset, half), Pending)
    settlement.add_op(0, said(halves[0], Verdict.COMMIT)._replace(half_offsets=(0, 1)), 10)

    assert settlement.add_op(1, said(halves[0], Verdict.ROLLBACK)._replace(half_offsets=(0, 1)), 20) is None
    assert settled(settlement, 30) == [Verdict.ROLLBACK]
