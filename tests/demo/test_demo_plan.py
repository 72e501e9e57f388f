"""Which flights are chosen for what, and what is said when there are too few."""

from __future__ import annotations

import pytest

from penstock.demo.flights import Flight
from penstock.demo.options import DemoOptions
from penstock.demo.senders.plan import SENDERS, left_unknown, plan
from penstock.demo.senders.schedule import share_of
from penstock.errors import ConfigurationError

FLIGHTS = [Flight(n, f"N{n % 40}", "BOS", 0, departed=n % 7 != 0) for n in range(400)]


def test_one_flight_in_fifty_is_left_to_a_check() -> None:
    unknown = [flight for flight in FLIGHTS if left_unknown(flight)]

    assert len(unknown) == 8
    assert {flight.departed for flight in unknown} == {True, False}


@pytest.mark.parametrize("seed", range(20))
def test_the_chosen_flights_departed_and_differ(seed: int) -> None:
    chosen = plan(FLIGHTS, seed)

    killed = FLIGHTS[chosen.killed]
    assert FLIGHTS[chosen.poison].departed
    assert killed.departed
    assert chosen.poison != chosen.killed
    assert share_of(killed, SENDERS) == 0
    assert not left_unknown(killed)


def test_a_seed_chooses_the_same_poison_again_and_another_seed_another() -> None:
    assert plan(FLIGHTS, 1) == plan(FLIGHTS, 1)
    assert len({plan(FLIGHTS, seed).poison for seed in range(10)}) > 1


@pytest.mark.parametrize("flights", [[], [Flight(0, None, "BOS", 0, departed=True)], FLIGHTS[:1]])
def test_too_few_flights_get_a_sentence(flights: list[Flight]) -> None:
    with pytest.raises(ConfigurationError, match="give a file with more flights"):
        plan(flights, 1)


def test_all_and_input_exclude_each_other(tmp_path: object) -> None:
    with pytest.raises(ConfigurationError, match="--all and --input exclude each other"):
        DemoOptions(whole_year=True, input="flights.csv")  # type: ignore[arg-type]  # any path serves
