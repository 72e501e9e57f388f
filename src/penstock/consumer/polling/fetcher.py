"""The fetcher: it takes from the client what is there, as much as back-pressure allows, and gives it to the router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.clients.cluster import Clock, ConsumerClient
from penstock.clients.gc_pause import CollectionThreshold, collection_put_off
from penstock.consumer.assignments import Assignments
from penstock.consumer.polling.flow_control.back_pressure import BackPressure
from penstock.consumer.polling.group.membership import Membership
from penstock.consumer.polling.health.fetch_errors import FetchErrors
from penstock.consumer.polling.router import Router

if TYPE_CHECKING:
    from confluent_kafka import KafkaError
    from confluent_kafka import Message as ClientMessage

#: Seconds to wait before asking again when everything is full for a moment.
SATURATED_S = 0.002
#: Messages in a batch that are worth a step of their own.
_MUCH = 500

#: Called for each fetch, where telemetry is on: topic, messages by partition, seconds.
Polled = Callable[[str, dict[int, int], float], None]


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Fetcher:
    """On the poll thread only."""

    membership: Membership
    clock: Clock
    assignments: Assignments
    back_pressure: BackPressure
    router: Router
    errors: FetchErrors
    polled: Polled | None
    #: Seconds within which what comes is taken together, unless much is there. Each batch wakes the poll thread and
    #: workers; where its results wait for a transaction anyway, fewer and larger ones cost a third less.
    gather_s: float = 0.0
    collection_threshold: CollectionThreshold = field(default_factory=CollectionThreshold, init=False)
    _taken_at: float = field(default=float("-inf"), init=False)
    _took_much: bool = field(default=False, init=False)

    def fetch(self, poll_timeout: Callable[[float], float]) -> None:
        """Take what is there; wait for a first message where nothing is.

        `poll_timeout` returns for how many seconds, given the time on the engine's clock.
        """
        client = self.membership.client
        begun = self.clock.monotonic()
        if not self._took_much and (left_s := self._taken_at + self.gather_s - begun) > 0:
            self.clock.sleep(left_s)
            begun += left_s
        if not self.back_pressure.apply(client, self.assignments.all(), begun):
            self.clock.sleep(SATURATED_S)
            return
        most = self.back_pressure.fetch_limit
        if not self._take([], client, most, begun):
            first = client.poll(poll_timeout(begun))
            if first is not None:
                self._take([first], client, most, begun)

    def _take(self, batch: list[ClientMessage], client: ConsumerClient, most: int, begun: float) -> bool:
        """Route a batch with what else is there; return whether there was anything."""
        # What is fetched lives until it is handled. Looking through thousands of new messages for garbage, again and
        # again while they come, finds none and took a fifth of the time.
        with collection_put_off():
            batch += client.consume(most - len(batch), 0)
            if batch:
                self._taken_at, self._took_much = self.clock.monotonic(), len(batch) >= _MUCH
                in_flight = self.back_pressure.in_flight + len(batch)
                self.collection_threshold.note_in_flight(in_flight, self._taken_at)
                self.route(batch)
        if batch and self.polled is not None:
            self._report(self.polled, self.clock.monotonic() - begun)
        return bool(batch)

    def route(self, batch: list[ClientMessage]) -> None:
        """Put messages on their lanes, and see to the errors among them: one that ends the consumer is raised."""
        errors: list[tuple[KafkaError, str | None, int | None]] = []
        # In C: a step of the interpreter for each message would be a fiftieth of its way. An error is true; compared
        # with None it raises, for `KafkaError` takes what it is compared with for a number.
        if any(map(type(batch[0]).error, batch)):
            errors = [
                (error, message.topic(), message.partition())
                for message in batch
                if (error := message.error()) is not None
            ]
            batch = [message for message in batch if message.error() is None]
        if batch:
            self.router.route(batch, self.clock.monotonic())  # type: ignore[arg-type] # fetched messages have a place
        for error, topic, partition in errors:
            if self.errors.take(error, topic, partition):
                self.membership.client_ended()

    def _report(self, polled: Polled, seconds: float) -> None:
        topics: dict[str, dict[int, int]] = {}
        for (topic, partition), count in self.router.take_counts().items():
            topics.setdefault(topic, {})[partition] = count
        for topic, counts in topics.items():
            polled(topic, counts, seconds)
