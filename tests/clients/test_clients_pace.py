"""Limits of Kafka transactions follow the measured times (`penstock.clients.transactional.settings`)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.clients.transactional.settings import Pace


@given(st.lists(st.floats(0, 100)), st.floats(0.1, 10), st.floats(1, 60))
def test_a_limit_is_never_shorter_than_on_brokers_that_are_well_and_never_longer_than_the_user_allows(
    steps: list[float], well_s: float, most_s: float
) -> None:
    pace = Pace(most_s)
    for took_s in steps:
        pace.note(took_s)

    assert well_s <= pace.limit(well_s) <= max(well_s, most_s)


def test_a_limit_grows_with_a_slow_step_at_once_and_shrinks_with_quick_ones() -> None:
    pace = Pace(30.0)
    pace.note(2.0)
    slow = pace.limit(1.0)
    for _ in range(50):
        pace.note(0.01)

    assert (slow, pace.limit(1.0)) == (8.0, 1.0)
