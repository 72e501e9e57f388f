"""Partitions on their way to a coordinator: attempts that hang, fail, or come too late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest
from confluent_kafka import KafkaError, KafkaException
from half_partition import context_of, recovered_at

from penstock.clients.bounded_calls import LeftBehind
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.logs.recovered_partition import HALF, RecoveredPartition
from penstock.transactions.stores.kafka.logs.recovery import _ABANDON_AFTER_S, Recoveries, Step
from penstock.transactions.wire.topics import StoreTopics
from waiting import wait_until

Outcome = Callable[[], None]


class Attempts:
    """Each attempt takes a test's next step, and returns its number as the half position."""

    def __init__(self, *outcomes: Outcome) -> None:
        self._outcomes = iter(outcomes)
        self.made = 0

    def __call__(self, partitions: Iterable[int], step: Step) -> dict[int, RecoveredPartition]:
        self.made += 1
        number = self.made
        step(f"step of attempt {number}")
        next(self._outcomes, well)()
        return {partition: recovered_at(number, 0) for partition in partitions}


def well() -> None:
    """It is found out at once."""


def raises(error: Exception) -> Outcome:
    def fail() -> None:
        raise error

    return fail


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What hangs goes on once it is set."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def left() -> LeftBehind:
    return LeftBehind("the coordinator of a test")


def context_with(left: LeftBehind) -> CoordinatorContext:
    context = context_of(StoreTopics("test", 1))
    context.left = left
    return context


def found(taking: Recoveries, later_s: float = 0.0) -> dict[int, int]:
    """Return the half positions that are found, waiting for the first."""

    def look() -> dict[int, int]:
        return {number: one.starts[HALF] for number, one in taking.found(time.monotonic() + later_s)}

    return wait_until(look, 30)


def test_an_attempt_that_hangs_is_left_behind_and_another_begins(release: threading.Event, left: LeftBehind) -> None:
    taking = Recoveries(context_with(left), Attempts(lambda: release.wait(60) and None))
    begun = time.monotonic()
    taking.begin([1])
    wait_until(lambda: taking.slow_call(time.monotonic())[0] == "step of attempt 1")
    assert taking.slow_call(time.monotonic() + 5)[1] >= 5

    assert taking.found(begun + _ABANDON_AFTER_S - 1) == []
    assert left.hanging == 0
    taking.found(time.monotonic() + _ABANDON_AFTER_S)

    assert left.hanging == 1
    assert found(taking) == {1: 2}
    release.set()
    wait_until(lambda: left.hanging == 0)
    assert taking.found(time.monotonic()) == [], "what came too late does not count"


def test_a_failure_of_the_broker_is_tried_again_and_a_mistake_is_raised(left: LeftBehind) -> None:
    away = KafkaException(KafkaError(KafkaError._TRANSPORT))
    taking = Recoveries(context_with(left), Attempts(raises(away), raises(away), well, raises(ZeroDivisionError())))
    taking.begin([1])
    assert found(taking) == {1: 3}

    taking.begin([2])
    with pytest.raises(ZeroDivisionError):
        found(taking)


def test_a_partition_that_was_taken_away_is_not_reported_and_one_that_came_back_is_taken_over_again(
    release: threading.Event, left: LeftBehind
) -> None:
    attempts = Attempts(lambda: release.wait(60) and None, lambda: release.wait(60) and None)
    taking = Recoveries(context_with(left), attempts)
    taking.begin([1, 2, 3])
    taking.forget(1)
    taking.forget(2)
    taking.begin([2])
    wait_until(lambda: attempts.made == 2)
    release.set()

    positions = found(taking)
    while len(positions) < 2:
        positions |= found(taking)
    assert set(positions) == {2, 3}
    assert positions[2] != positions[3]
