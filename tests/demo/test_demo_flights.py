"""The flights: read as the package documents them."""

from __future__ import annotations

from demo.flights import Flight, read_flights


def test_january_has_the_flights_that_the_package_documents() -> None:
    flights = read_flights(whole_year=False)

    assert len(flights) == 27_004
    assert sum(not flight.departed for flight in flights) == 521
    assert sum(flight.tail is None for flight in flights) == 155
    assert [flight.sequence for flight in flights] == list(range(27_004))
    assert flights[0] == Flight(0, "N14228", "IAH", 2, departed=True)
