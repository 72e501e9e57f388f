"""Which flight may be sent next, with some of them undecided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.demo.flights import Flight
from penstock.demo.senders.schedule import Share, share_of


def flight(sequence: int, tail: str | None) -> Flight:
    return Flight(sequence, tail, "BOS", 0, departed=True)


def test_an_aircraft_with_an_undecided_flight_waits_and_the_others_go_on() -> None:
    published: set[int] = set()
    share = Share([flight(0, "a"), flight(1, "a"), flight(2, "b")], published)
    first = share.take()
    assert first is not None

    share.hold(first)

    assert share.take() == flight(2, "b")
    assert share.take() is None
    assert not share.finished


def test_a_published_flight_lets_its_aircraft_go_on() -> None:
    published: set[int] = set()
    share = Share([flight(0, "a"), flight(1, "a")], published)
    first = share.take()
    assert first is not None
    share.hold(first)
    assert share.take() is None

    published.add(0)

    assert share.take() == flight(1, "a")
    assert share.finished


def test_after_a_restart_an_aircraft_waits_for_the_last_flight_that_was_recorded() -> None:
    published: set[int] = set()
    share = Share([flight(5, "a")], published, {"a": 4})

    before = share.take()
    published.add(4)

    assert before is None
    assert share.take() == flight(5, "a")


def test_flights_without_an_aircraft_never_wait() -> None:
    share = Share([flight(0, None), flight(1, None)], set())
    first = share.take()
    assert first is not None

    share.hold(first)

    assert share.take() == flight(1, None)


@given(
    tails=st.lists(st.sampled_from("abc"), max_size=30),
    undecided=st.sets(st.integers(0, 29)),
    settle_after=st.integers(1, 5),
)
def test_every_flight_is_given_out_once_and_none_before_its_predecessor_is_published(
    tails: list[str], undecided: set[int], settle_after: int
) -> None:
    published: set[int] = set()
    waiting: list[int] = []
    taken: list[Flight] = []
    share = Share([flight(sequence, tail) for sequence, tail in enumerate(tails)], published)

    while not share.finished:
        current = share.take()
        if current is None or len(waiting) > settle_after:
            published.add(waiting.pop(0))
        if current is not None:
            earlier = [other.sequence for other in taken if other.tail == current.tail]
            assert all(sequence in published for sequence in earlier)
            taken.append(current)
            if current.sequence in undecided:
                share.hold(current)
                waiting.append(current.sequence)
            else:
                published.add(current.sequence)

    assert sorted(one.sequence for one in taken) == list(range(len(tails)))


def test_all_flights_of_an_aircraft_are_in_one_share() -> None:
    numbers = {share_of(flight(sequence, "N14228"), 32) for sequence in range(100)}
    without_tail = {share_of(flight(sequence, None), 32) for sequence in range(100)}

    assert len(numbers) == 1
    assert without_tail == set(range(32))
