"""The flights: read as the package documents them, and carried to the senders as they were."""

from __future__ import annotations

from pathlib import Path

from demo.flights import Flight, read_flights, read_schedule, write_schedule


def test_january_has_the_flights_that_the_package_documents() -> None:
    flights = read_flights(whole_year=False)

    assert len(flights) == 27_004
    assert sum(not flight.departed for flight in flights) == 521
    assert sum(flight.tail is None for flight in flights) == 155
    assert [flight.sequence for flight in flights] == list(range(27_004))
    assert flights[0] == Flight(0, "N14228", "IAH", 2, departed=True)


def test_a_schedule_written_for_the_senders_reads_back_as_it_was(tmp_path: Path) -> None:
    flights = [Flight(0, "é,\n", "A", -3, departed=True), Flight(1, None, "B", 0, departed=False)]

    write_schedule(tmp_path, flights)

    assert list(read_schedule(tmp_path)) == flights
