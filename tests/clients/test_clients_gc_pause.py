"""When Python looks for garbage while messages come."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from penstock.clients.gc_pause import CollectionThreshold


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_many_messages_at_once_raise_the_threshold_until_none_come_for_a_while() -> None:
    threshold = CollectionThreshold()

    threshold.note_in_flight(5_000, 100.0)
    raised = gc.get_threshold()
    threshold.note_in_flight(1, 104.9)
    kept = gc.get_threshold()
    threshold.note_in_flight(1, 105.1)

    assert raised == kept == (20_700, 10, 10)
    assert gc.get_threshold() == (700, 10, 10)


def test_what_the_process_sets_itself_stands() -> None:
    threshold = CollectionThreshold()
    threshold.note_in_flight(5_000, 100.0)

    gc.set_threshold(50_000, 5, 5)
    threshold.note_in_flight(1_000, 101.0)
    added_to = gc.get_threshold()
    threshold.restore()
    restored = gc.get_threshold()
    gc.set_threshold(0)
    threshold.note_in_flight(5_000, 102.0)

    assert added_to == (54_000, 5, 5)
    assert restored == (50_000, 5, 5)
    assert gc.get_threshold()[0] == 0


def test_what_two_consumers_of_a_process_add_is_summed_up_and_taken_back() -> None:
    first, second = CollectionThreshold(), CollectionThreshold()

    for messages in range(1_000, 1_010):
        first.note_in_flight(messages, 100.0)
        second.note_in_flight(messages, 100.0)
    both = gc.get_threshold()[0]
    first.restore()
    one = gc.get_threshold()[0]
    second.restore()

    assert (both, one) == (700 + 2 * 4_036, 700 + 4_036)
    assert gc.get_threshold() == (700, 10, 10)
