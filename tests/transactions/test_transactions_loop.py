"""How long a round of the coordinator waits for records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.transactions.stores.kafka.coordinator.coordinator import KafkaCoordinator
from penstock.transactions.stores.store_coordinator import CoordinatorOptions


@pytest.mark.parametrize(
    ("state", "has_work", "at_least_s", "at_most_s"),
    [
        # Nothing to do, or nothing that could be done: a gate that is shut, a producer that is made, a back-off.
        ({}, False, 0.05, 0.05),
        ({"is_ready": lambda _: False}, True, 0.05, 0.05),
        ({"is_idle": False, "is_ready": lambda _: False}, True, 0.001, 0.01),
        # What is ready and does not begin waits for payloads.
        ({}, True, 0.001, 0.01),
        ({"is_in_flight": True}, True, 0.0, 0.0),
        # The next Kafka transaction begins at once.
        ({"take_result": lambda _: True}, True, 0.0, 0.0),
    ],
)
def test_a_backlog_that_cannot_be_published_does_not_keep_a_core_busy(
    state: dict[str, Any], has_work: bool, at_least_s: float, at_most_s: float
) -> None:
    waited: list[float] = []
    coordinator_of(state, has_work, waited)._round()

    assert at_least_s <= waited[0] <= at_most_s


def coordinator_of(state: dict[str, Any], has_work: bool, waited: list[float]) -> KafkaCoordinator:
    """Return a coordinator whose engine is in that state, and which notes how long it waits."""
    nothing = SimpleNamespace(**dict.fromkeys(("poll", "begin", "look_now_and_then"), lambda _: None))
    usual = {"is_in_flight": False, "is_idle": True, "is_busy": False, "decisions": 1}
    more = {"take_result": lambda _: False, "is_ready": lambda _: True, "is_crowded": lambda _: False}
    engine: Any = SimpleNamespace(**{**vars(nothing), **usual, **more, **state})
    nothing.counts = {}
    engine.targets, engine.groups, engine.recoveries = nothing, 0, 0
    engine.slow_call = lambda: ("", 0.0)

    partition = SimpleNamespace(
        state=SimpleNamespace(has_work=has_work, queue=SimpleNamespace(ready=1, all=()), pending=()),
        feed=SimpleNamespace(waiting=0),
        is_given_up=False,
        note_progress=lambda _: None,
    )

    def read(timeout_s: float, *_: object, **__: object) -> list[object]:
        waited.append(timeout_s)
        return []

    membership: Any = SimpleNamespace(
        owned={0: partition},
        serve=lambda: None,
        was_cut_off=lambda: False,
        recoveries=SimpleNamespace(slow_call=lambda _: ("", 0.0), partitions=()),
        logs=SimpleNamespace(read=read, limit_waiting=lambda *_: None),
    )
    place: dict[str, Any] = {"prefix": "store", "partitions": 1, "target_latency": 0.02, "instance": None}
    made = KafkaCoordinator("127.0.0.1:1", CoordinatorOptions(), **place, config={"log_level": 0})
    made._membership, made._engine = membership, engine
    made._upkeep, made._checks, made._payloads = Mock(), Mock(), Mock()
    made._status_at = float("inf")  # its status is written elsewhere
    return made
