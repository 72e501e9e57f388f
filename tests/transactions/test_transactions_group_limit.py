"""How many decisions share a Kafka transaction."""

from __future__ import annotations

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
    slow = run(limit, 20e-6, 20)
    quick_again = run(limit, 2e-6, 20)

    assert quick > 2 * begun
    assert slow <= 0.02 / 20e-6
    assert quick_again > 2 * slow


def test_a_broker_that_is_slow_whatever_a_group_holds_does_not_make_groups_small() -> None:
    limit = GroupLimit(0.02)

    for _ in range(50):
        limit.measured(limit.decisions, limit.decisions * 128, 0.2)

    assert limit.decisions == 500


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
