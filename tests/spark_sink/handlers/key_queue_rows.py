"""Rows, routes and queues made by hand, for tests of the order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.consumer import Handler, retry
from penstock.consumer.handlers.handler import orderings_of
from penstock.consumer.handlers.route import Route
from penstock.message import FixedRecord, Record
from penstock.spark_sink.sinks.handlers.execution.key_queues import KeyQueues

Place = tuple[str, int]


def nothing(_: object) -> None:
    """A handler that is not called: the tests say what came of a call."""


def row(
    key: bytes | None, offset: int, topic: str = "orders", value: bytes = b"", headers: tuple[Any, ...] = ()
) -> Record:
    return FixedRecord(topic, 0, offset, key, value, headers, None)


def routes_of(handlers: Mapping[str, Handler]) -> dict[str, Route]:
    orderings = orderings_of(handlers, 1)
    return {topic: Route(one, orderings[topic], one.function) for topic, one in handlers.items()}


def waits(seconds: float = 1.0, attempts: int = 3) -> Any:
    return retry(attempts, wait=lambda _: seconds)


@dataclass
class Letters:
    """Takes dead letters."""

    places: list[Place] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)

    def __call__(self, record: Record, _route: Route, _error: BaseException, attempts: int) -> None:
        self.places.append((record.topic(), record.offset()))
        self.attempts.append(attempts)


def queues_of(
    rows: list[Record],
    handlers: Mapping[str, Handler],
    letters: Callable[..., None] | None = None,
    *,
    max_parked: int = 1000,
    max_parked_bytes: int = 1 << 30,
) -> tuple[KeyQueues, Iterator[Record]]:
    taken = iter(rows)
    return KeyQueues(
        taken, routes_of(handlers), letters or Letters(), max_parked=max_parked, max_parked_bytes=max_parked_bytes
    ), taken
