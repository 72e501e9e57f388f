"""Outlets: what writes a message that was given up to another topic. Then, and only then, its offset is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from confluent_kafka import KafkaError

from penstock.clients.cluster import ProducerClient
from penstock.consumer.assignments import Item
from penstock.consumer.handlers.results import Result

#: Takes why a message was not written, or None.
Delivered = Callable[[KafkaError | None], None]


class Outlet(Protocol):
    """Writes a message to another topic, and completes its offset once it is written."""

    def forward(self, item: Item, to: Result, complete: Callable[[], None], delivered: Delivered) -> None:
        """Have a message written; raises as `ProducerClient.produce`. `delivered` is called by `poll`."""

    def poll(self) -> None:
        """Tell what became of messages."""

    def flush(self, timeout: float) -> None:
        """Wait at most so many seconds until all that was forwarded has its report."""


class ProducerOutlet:
    """Writes with a producer, which is made at the first message where it was not made `at_once`. For one thread."""

    def __init__(self, make: Callable[[], ProducerClient], *, at_once: bool = True) -> None:
        self._make = make
        self._producer = make() if at_once else None

    def forward(self, item: Item, to: Result, complete: Callable[[], None], delivered: Delivered) -> None:  # noqa: ARG002 - an outlet's method takes the item
        """As `Outlet` says."""

        def reported(error: KafkaError | None, _message: object) -> None:
            if error is None:
                complete()
            delivered(error)

        if self._producer is None:
            self._producer = self._make()
        self._producer.produce(to.topic, to.value, to.key, headers=to.headers, on_delivery=reported)

    def poll(self) -> None:
        """As `Outlet` says."""
        if self._producer is not None:
            self._producer.poll(0)

    def flush(self, timeout: float) -> None:
        """As `Outlet` says."""
        if self._producer is not None:
            self._producer.flush(timeout)
