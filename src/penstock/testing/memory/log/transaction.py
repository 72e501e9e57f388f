"""A producer's transaction on the broker in memory, driven by hand: records first, then the markers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from confluent_kafka import Message

from penstock.errors import StoppedError
from penstock.testing.memory.log.log import Headers, LoggedTransaction, Outcome


class TestTransaction:
    """A Kafka transaction: made by `TestBroker.transaction`.

    As a context manager it commits, or aborts when an exception passes through. Without one it stays open until
    `commit` or `abort`, and readers of committed messages wait before its first record.
    """

    __test__ = False  # pytest would take the name for a test case

    def __init__(self, append: Callable[..., Message], lock: threading.RLock) -> None:
        self._append = append
        self._lock = lock
        self._logged = LoggedTransaction()

    def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> Message:
        """Append a record and return it; `StoppedError` where the transaction has ended."""
        with self._lock:
            self._require_open()
            return self._append(topic, value, key, headers, partition=partition, owner=self._logged)

    def commit(self) -> None:
        """End it: its records are read."""
        self._end(Outcome.COMMITTED)

    def abort(self) -> None:
        """End it: its records are never read by who reads committed messages only."""
        self._end(Outcome.ABORTED)

    def _end(self, outcome: Outcome) -> None:
        with self._lock:
            self._require_open()
            self._logged.end(outcome)

    def _require_open(self) -> None:
        if self._logged.outcome is not Outcome.OPEN:
            raise StoppedError(f"this transaction has ended: {self._logged.outcome.name}; begin another")

    def __enter__(self) -> Self:
        """Return the open transaction."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit, or abort when an exception passes through; what was ended by hand stays as it is."""
        if self._logged.outcome is Outcome.OPEN:
            self._end(Outcome.COMMITTED if kind is None else Outcome.ABORTED)
