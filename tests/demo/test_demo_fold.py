"""The state in which order matters, and what the handler notices."""

from __future__ import annotations

import pytest

from penstock.demo.checks.fold import AircraftState, FlightFold, PoisonFlightError, Totals, plain_states, plain_totals
from penstock.demo.flights import Flight
from penstock.message import Message

FLIGHTS = [
    Flight(0, "a", "BOS", 5, departed=True),
    Flight(1, "a", "MIA", 9, departed=True),
    Flight(2, "a", "ORD", 0, departed=False),
    Flight(3, "a", "IAH", -2, departed=True),
    Flight(4, None, "LAX", 1, departed=True),
    Flight(5, "b", "SFO", 1, departed=True),
]


def handled(fold: FlightFold, *flights: Flight) -> FlightFold:
    for flight in flights:
        fold.handle(Message.of(flight.to_json(), key=flight.key))
    return fold


def departed() -> list[Flight]:
    return [flight for flight in FLIGHTS if flight.departed]


def test_the_plain_loop_folds_departed_flights_with_an_aircraft() -> None:
    states = plain_states(FLIGHTS, poison=5)

    assert states == {"a": AircraftState(3, "IAH", 0, 2, 3)}


def test_another_order_gives_another_state() -> None:
    state = AircraftState()

    for flight in (FLIGHTS[0], FLIGHTS[3], FLIGHTS[1]):
        state.depart(flight)

    assert state != plain_states(FLIGHTS, poison=-1)["a"]


def test_totals_keep_flights_without_an_aircraft_under_the_empty_name() -> None:
    totals = plain_totals(FLIGHTS)

    assert totals == {"a": Totals(3, 12), "": Totals(1, 1), "b": Totals(1, 1)}


def test_the_handler_reaches_the_states_of_the_plain_loop() -> None:
    fold = handled(FlightFold(poison=-1), *departed())

    assert fold.states() == plain_states(FLIGHTS, poison=-1)
    assert (fold.folded, fold.finished) == (5, 5)
    assert (fold.duplicates, fold.cancelled_seen, fold.order_violations) == (0, 0, 0)


def test_a_duplicate_a_cancelled_flight_and_a_wrong_order_are_counted() -> None:
    twice = handled(FlightFold(poison=-1), FLIGHTS[4], FLIGHTS[4])
    cancelled = handled(FlightFold(poison=-1), FLIGHTS[2])
    swapped = handled(FlightFold(poison=-1), FLIGHTS[1], FLIGHTS[0])

    assert twice.duplicates == 1
    assert cancelled.cancelled_seen == 1
    assert swapped.order_violations == 1


def test_the_poison_flight_is_refused_every_time_and_never_folded() -> None:
    fold = FlightFold(poison=0)

    for _ in range(3):
        with pytest.raises(PoisonFlightError, match="flight 0 of the schedule"):
            handled(fold, FLIGHTS[0])

    assert fold.poison_attempts == 3
    assert (fold.folded, fold.states()) == (0, {})


def test_an_ignored_flight_is_finished_but_not_folded() -> None:
    fold = handled(FlightFold(poison=-1, ignored=frozenset({5})), *departed())

    assert (fold.finished, fold.folded) == (5, 4)
    assert fold.states() != plain_states(FLIGHTS, poison=-1)
