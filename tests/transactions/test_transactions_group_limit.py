"""How many decisions share a Kafka transaction."""

from __future__ import annotations

import random
import statistics

import pytest
from transaction_tools import Bench

from penstock.transactions import coordinator
from penstock.transactions.group_limit import GroupLimit


def run(limit: GroupLimit, cost_s: float, groups: int, size_bytes: int = 128) -> int:
    """Fill so many groups to the limit, where each decision costs so much, and return the limit then."""
    for _ in range(groups):
        decisions = limit.decisions
        limit.measured(decisions, decisions * size_bytes, 0.004 + decisions * cost_s)
    return limit.decisions


def test_groups_grow_and_shrink_with_their_time() -> None:
    limit = GroupLimit(0.02)
    begun = limit.decisions

    quick = run(limit, 2e-6, 20)
    slow = run(limit, 20e-6, 40)
    quick_again = run(limit, 2e-6, 40)

    assert quick > 2 * begun
    assert slow <= 1.2 * 0.016 / 20e-6
    assert quick_again > 2 * slow


def test_the_target_latency_of_a_coordinator_sizes_its_groups(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[GroupLimit] = []

    class Noted(GroupLimit):
        def __init__(self, target_s: float) -> None:
            super().__init__(target_s)
            made.append(self)

    monkeypatch.setattr(coordinator, "GroupLimit", Noted)
    for target_latency in (0.01, 0.2):
        bench.coordinator(target_latency=target_latency).stop()

    short, long = (run(limit, 20e-6, 60) for limit in made)

    # What ends within the target: 0.006 s, and 0.196 s, of 20 microseconds each; and no group is kept below 500.
    assert short == 500
    assert 0.6 * 9_800 < long < 1.2 * 9_800


def test_a_broker_that_is_slow_whatever_a_group_holds_gets_large_groups() -> None:
    limit = GroupLimit(0.02)

    for _ in range(50):
        limit.measured(limit.decisions, limit.decisions * 128, 0.2)

    assert limit.decisions > 5_000


@pytest.mark.parametrize(
    ("fixed_s", "each_s", "ideal"), [(0.004, 20e-6, 800), (0.005, 8e-6, 1_875), (0.05, 20e-6, 2_500)]
)
def test_groups_find_the_size_that_the_costs_speak_for_whatever_the_noise(
    fixed_s: float, each_s: float, ideal: int
) -> None:
    limit = GroupLimit(0.02)
    dice = random.Random(7)  # noqa: S311 - the same noise each time
    found = []

    for _ in range(300):
        decisions = limit.decisions
        limit.measured(decisions, decisions * 128, (fixed_s + decisions * each_s) * dice.lognormvariate(0, 0.2))
        found.append(limit.decisions)

    assert 0.6 * ideal < statistics.median(found[100:]) < 1.6 * ideal


def test_groups_that_are_not_full_say_nothing_about_the_limit() -> None:
    limit = GroupLimit(0.02)
    begun = limit.decisions

    for took_s in (0.001, 1.0):
        limit.measured(3, 3 * 128, took_s)

    assert limit.decisions == begun


def test_large_messages_make_groups_small() -> None:
    limit = GroupLimit(0.02)

    few = run(limit, 2e-6, 20, size_bytes=1 << 20)

    assert few == 4
