"""Halves of a transaction that do not fit together, or never come."""

from __future__ import annotations

from functools import partial

import pytest
from transaction_tools import Bench

from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.core.commit_batch import CommitBatch
from penstock.transactions.core.decisions import Refusal
from penstock.transactions.core.state import PartitionState
from penstock.transactions.wire.half import Half, encode_half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict

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


@pytest.mark.parametrize("stranger", [part(1, 2), part(2, 3), part(2, 2, group="others")])
def test_parts_that_contradict_each_other_can_only_be_rolled_back(stranger: Half) -> None:
    state = PartitionState(0, 0)
    state.add_half(0, part(1, 2))

    assert state.add_half(1, stranger) is Refusal.DUPLICATE_ID
    state.add_half(2, part(2, 2))
    assert state.add_op(0, op(Verdict.COMMIT, 0, 2), 0) is Refusal.INCOMPLETE
    assert state.add_op(1, op(Verdict.ROLLBACK, 0, author=Author.COORDINATOR), 0) is None
    assert settle(state).decided[0].verdict is Verdict.ROLLBACK


def test_a_discarded_transaction_of_several_that_comes_back_before_its_discard_is_applied_comes_back_whole() -> None:
    state = PartitionState(0, 0)
    for at in (0, 1):
        state.add_half(at, part(at + 1, 2))
    state.add_op(0, op(Verdict.DISCARD, 0, 1, author=Author.COORDINATOR), 0)
    batch = state.next_batch(10, lambda _: None)
    assert batch is not None

    # It is visible to all before the coordinator has taken in that it is committed.
    for at in (2, 3):
        state.add_half(at, part(at - 1, 2)._replace(resumed="place"))
    state.add_op(1, op(Verdict.COMMIT, 2, 3), 0)
    state.apply(batch)

    again = settle(state).decided[0]
    assert (again.verdict, [half.value for half in again.halves]) == (Verdict.COMMIT, [b"1", b"2"])


def test_an_incomplete_transaction_is_rolled_back_without_a_check(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = partial(CheckPolicy, incomplete_s=0.5)
    monkeypatch.setattr("penstock.transactions.stores.store_coordinator.CheckPolicy", policy)
    lost = Half(new_id(), "orders", bench.topic, None, None, b"1", (), None, part=(1, 2))
    bench.write(bench.topics.half, 0, None, b"1", encode_half(lost))
    coordinator = bench.coordinator()

    now = bench.settled(coordinator, rolled_back=1)

    assert (now.checks, now.no_producer, now.discarded) == (0, 0, 0)
    assert bench.visible() == []
