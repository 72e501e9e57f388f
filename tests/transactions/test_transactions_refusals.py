"""ReadyQueue and records that must not count: second, unknown, foreign, forged."""

from __future__ import annotations

import pytest
from transaction_tools import Bench, decide, prepared

from penstock.transactions import Coordinator, new_id
from penstock.transactions.wire.ops import Author, Verdict


@pytest.fixture
def coordinator(bench: Bench) -> Coordinator:
    """A coordinator that asks nobody during the test."""
    return bench.coordinator(transaction_timeout=600)


def test_a_decision_for_a_half_that_never_was_is_refused_and_holds_nothing(
    bench: Bench, coordinator: Coordinator
) -> None:
    stored = prepared(bench.producer(), bench.topic)

    decide(bench, stored, Verdict.COMMIT, transaction_id=new_id(), half_offsets=(1 << 60,))
    decide(bench, stored, Verdict.COMMIT, transaction_id=new_id(), half_offsets=())
    decide(bench, stored, Verdict.COMMIT)
    bench.settled(coordinator, committed=1, refused=2)

    assert bench.visible() == [(None, b"v")]


def test_a_late_answer_of_an_earlier_check_does_not_count_twice(bench: Bench, coordinator: Coordinator) -> None:
    stored = prepared(bench.producer(), bench.topic)

    for number in (1, 1, 3, 2, 0):
        decide(bench, stored, Verdict.UNKNOWN, author=Author.CHECK, check_number=number)
    decide(bench, stored, Verdict.COMMIT)
    statistics = bench.settled(coordinator, committed=1)

    assert (statistics.answered_checks, statistics.refused) == (2, 0)
