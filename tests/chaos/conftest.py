"""Brokers for faults of a group: a shared one, and a separate one for each test that harms its broker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.fleet import KIP848_BROKER, Fleet
from penstock.devbroker import DevBroker

NewFleet = Callable[[int], Fleet]


@pytest.fixture(scope="session")
def patient_broker() -> Iterator[DevBroker]:
    """A broker without faults. It soon notices that a member of the newer protocol is gone."""
    with DevBroker(config=KIP848_BROKER) as running:
        yield running


@pytest.fixture(scope="session")
def fleet_numbers() -> Iterator[int]:
    """Numbers that make topic names unique in a run."""
    return itertools.count(1)


@pytest.fixture
def new_fleet(patient_broker: DevBroker, fleet_numbers: Iterator[int], tmp_path: Path) -> Iterator[NewFleet]:
    """Return a function that makes the test's fleet: `new_fleet(partitions)`."""
    yield from _fleets(patient_broker, f"chaos-{next(fleet_numbers)}", tmp_path)


@pytest.fixture
def fragile_fleet(tmp_path: Path) -> Iterator[NewFleet]:
    """The same, with its own broker."""
    with DevBroker(config=KIP848_BROKER) as broker:
        yield from _fleets(broker, "chaos", tmp_path)


def _fleets(broker: DevBroker, topic: str, folder: Path) -> Iterator[NewFleet]:
    made: list[Fleet] = []

    def make(partitions: int) -> Fleet:
        assert not made, "a test has one fleet"
        broker.create_topic(topic, partitions)
        made.append(Fleet(broker, topic, partitions, folder))
        return made[0]

    try:
        yield make
    finally:
        for one in made:
            one.close()
