"""The judges of the history of publishing handlers find planted faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chaos.publishing import (
    Seen,
    SeenBatch,
    by_key,
    faults_of_at_least_once,
    faults_of_exactly_once,
    is_batched,
    parts_of,
)

#: Messages 0 to 7 of two keys; those of the key k1 came in two batches.
COUNT, KEYS = 8, 2


def results(number: int, writer: str = "m0", call: str | None = None) -> list[Seen]:
    made_by = call or ("batch" if is_batched(number, KEYS) else f"call{number}")
    key = b"k%d" % (number % KEYS)
    return [Seen(key, number, part, writer, made_by) for part in range(parts_of(number))]


ALL = [result for number in range(COUNT) for result in results(number)]
BATCHES = [SeenBatch("m0", "batch", (1, 3)), SeenBatch("m0", "batch", (5, 7))]

Change = Callable[[list[Seen]], object]


def without(number: int) -> Change:
    return lambda seen: seen.remove(results(number)[0])


def kinds(faults: list[str]) -> str:
    return "; ".join(faults)


def test_a_history_in_which_all_is_seen_once_and_in_order_is_well() -> None:
    assert faults_of_exactly_once(ALL, BATCHES, COUNT, KEYS) == []
    assert faults_of_at_least_once(ALL, BATCHES, COUNT, KEYS) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (without(4), "1 results that are missing"),
        (lambda seen: seen.append(Seen(b"k0", 6, 9, "m0", "call6")), "1 results that nobody should have written"),
        (lambda seen: seen.append(seen[0]), "1 results twice"),
        (lambda seen: seen.reverse(), "out of order"),
        (lambda seen: seen.__setitem__(-1, seen[-1]._replace(writer="m1")), "was torn"),
        (lambda seen: seen.__setitem__(seen.index(results(2)[0]), results(2, "m1")[0]), "are of several calls"),
    ],
)
def test_each_fault_of_exactly_once_is_found_and_named(change: Change, fault: str) -> None:
    seen = list(ALL)
    change(seen)

    assert fault in kinds(faults_of_exactly_once(seen, BATCHES, COUNT, KEYS))


def test_a_message_in_two_batches_or_in_none_is_found() -> None:
    assert "1 is in 2 batches" in kinds(faults_of_exactly_once(ALL, [*BATCHES, BATCHES[0]], COUNT, KEYS))
    assert "1 is in 0 batches" in kinds(faults_of_exactly_once(ALL, BATCHES[1:], COUNT, KEYS))


def test_what_its_producer_wrote_twice_may_have_results_twice_but_not_none() -> None:
    twice = [*ALL, *(one for one in ALL if one.number == 1)]
    without = [one for one in ALL if one.number != 1]

    assert faults_of_exactly_once(twice, [*BATCHES, BATCHES[0]], COUNT, KEYS, BATCHES[0].numbers) == []
    assert "1, which was fed twice, has no result" in faults_of_exactly_once(without, BATCHES[1:], COUNT, KEYS, [1])
    assert "2 messages are in no batch" in kinds(faults_of_at_least_once(ALL, BATCHES[1:], COUNT, KEYS))


def test_a_member_that_begins_again_from_a_commit_is_well_at_least_once() -> None:
    first = by_key(ALL)[b"k0"]
    again = [result for number in (4, 6) for result in results(number, "m1")]
    other = by_key(ALL)[b"k1"]

    assert faults_of_at_least_once([*first, *again, *other], BATCHES, COUNT, KEYS) == []
    # The one that was put out has more on its way when its successor begins.
    assert faults_of_at_least_once([*first[:-1], *again, first[-1], *other], BATCHES, COUNT, KEYS) == []
    assert faults_of_exactly_once([*first, *again, *other], BATCHES, COUNT, KEYS) != []


def test_a_replay_that_begins_in_the_middle_of_a_message_is_found() -> None:
    first, other = by_key(ALL)[b"k0"], by_key(ALL)[b"k1"]
    again = [*results(2, "m1")[1:], *results(4, "m1")]

    wrong = kinds(faults_of_at_least_once([*first, *again, *other], BATCHES, COUNT, KEYS))
    assert "begins in the middle of a message" in wrong


def test_a_result_that_jumped_over_another_is_found_at_least_once() -> None:
    first, other = by_key(ALL)[b"k0"], by_key(ALL)[b"k1"]
    jumped = [one for one in first if one.number != 2] + results(2)

    assert "came before what is before it" in kinds(faults_of_at_least_once([*jumped, *other], BATCHES, COUNT, KEYS))
    assert "1 results that are missing" in kinds(faults_of_at_least_once(first[1:] + other, BATCHES, COUNT, KEYS))
