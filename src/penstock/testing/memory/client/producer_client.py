"""The producer client in memory: the part of confluent-kafka's `Producer` that penstock calls.

A message is in the log when `produce` returns. `poll` and `flush` report the delivery, as in the real client. After a
refusal with a fatal error the producer accepts nothing more, also as the real one. `poll` raises that error once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from confluent_kafka import KafkaError, KafkaException, Message

from penstock.clients.cluster import DeliveryCallback
from penstock.errors import TopicNotFoundError
from penstock.testing.memory import codes
from penstock.testing.memory.faults import Effect, Operation
from penstock.testing.memory.state import BrokerState


class MemoryProducer:
    """A producer on the broker in memory, made by `TestBroker.producer`. Safe to use from any thread."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._reports: deque[tuple[DeliveryCallback | None, KafkaError | None, Message]] = deque()
        self._waiting = 0
        # The fatal error, and whether it was raised.
        self._failure: KafkaError | None = None
        self._is_raised = False

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        headers: Sequence[tuple[str, str | bytes | None]] = (),
        partition: int = -1,
        on_delivery: DeliveryCallback | None = None,
    ) -> None:
        """Queue a message; `BufferError` if a fault says so, `KafkaException` after a fatal error."""
        state = self._state
        with state.lock:
            if self._failure is not None:
                raise KafkaException(KafkaError(codes.FATAL))
            if state.faults.take(Operation.QUEUE) is not None:
                raise BufferError("Local: Queue full")
            fault = state.faults.take(Operation.PRODUCE)
            if fault is not None and fault.effect is Effect.REFUSED:
                fault = replace(fault, error=self._refusal(fault.error))
            self._waiting += 1
            message = Message(topic=topic, partition=max(0, partition), key=key, value=value)

            def write() -> KafkaError | None:
                nonlocal message
                try:
                    message = state.produce(topic, value, key=key, headers=headers, partition=partition)
                except TopicNotFoundError:
                    return KafkaError(codes.UNKNOWN_TOPIC_OR_PARTITION)
                return None

            state.coordinator.deliver(fault, write, lambda error: self._reports.append((on_delivery, error, message)))

    def _refusal(self, error: KafkaError) -> KafkaError:
        """Return the error to report for a refused message."""
        if not error.fatal():
            return error
        self._failure = error
        return KafkaError(codes.PURGE_QUEUE)

    def purge(self) -> None:
        """Do nothing: produced messages are in the log already, and the next poll reports them."""

    def poll(self, timeout: float = 0) -> int:
        """Call the due delivery callbacks. If there are none, move the clock by `timeout` and look once more.

        `KafkaException`, once, after a fatal error.
        """
        served = self._serve()
        if not served and self._waiting and timeout > 0:
            self._state.clock.sleep(timeout)
            served = self._serve()
        return served

    def flush(self, timeout: float = -1) -> int:
        """Move the clock until everything is delivered or `timeout` is over. Return how many messages are left."""
        self._serve()
        deadline = self._state.clock.monotonic() + timeout if timeout >= 0 else float("inf")
        while self._waiting and (now := self._state.clock.monotonic()) < deadline:
            with self._state.lock:
                until = min(deadline, self._state.coordinator.next_due())
            if until == float("inf"):
                break
            self._state.clock.sleep(until - now)
            self._serve()
        return self._waiting

    def _serve(self) -> int:
        with self._state.lock:
            if self._failure is not None and not self._is_raised:
                self._is_raised = True
                raise KafkaException(self._failure)
            self._state.coordinator.tick(self._state.clock.monotonic())
            due, self._reports = self._reports, deque()
            self._waiting -= len(due)
        for callback, error, message in due:
            if callback is not None:
                callback(error, message)
        return len(due)
