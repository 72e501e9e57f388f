"""What all transactions of one producer share: the store, the limits, the deadlines and the counts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import StoppedError
from penstock.transactions.model import ProducerStatistics
from penstock.transactions.producer.flight.deadlines import RequestDeadlines
from penstock.transactions.producer.flight.in_flight import InFlightLimit
from penstock.transactions.store import Store
from penstock.transactions.wire.half import Half

if TYPE_CHECKING:
    from penstock.telemetry import SendSpans


class Core:
    """What all transactions of one producer share. Thread-safe.

    `has_check` tells whether its producer answers checks; `spans` makes a span of each message, where telemetry is on.
    """

    def __init__(
        self,
        store: Store,
        in_flight: InFlightLimit,
        deadlines: RequestDeadlines,
        *,
        has_check: bool,
        spans: SendSpans | None,
    ) -> None:
        self.store = store
        self._has_check = has_check
        self.spans = spans
        self.in_flight = in_flight
        self.deadlines = deadlines
        # Guards the counts below: transactions of many threads add to them.
        self._lock = threading.Lock()
        self._failed = 0
        self._lost = 0

    def traced(self, halves: Sequence[Half], spans: SendSpans) -> Sequence[Half]:
        """Return halves with the context of their spans in the headers."""
        sending = spans.sending
        return [half._replace(headers=tuple(sending(half.topic, half.headers))) for half in halves]

    def require_running(self, half: Half) -> None:
        """Raise `StoppedError` once the producer is being stopped."""
        if self.deadlines.stopping:
            raise StoppedError(
                f"transaction {half.transaction_id} for {half.topic}: the producer was stopped, and nothing of it was "
                "sent; make a new producer"
            )

    def who_settles(self, group: str) -> str:
        """Say what becomes of a transaction whose decision is lost."""
        if self._has_check:
            return f"a check of group {group} will settle it"
        return (
            f"this producer has no check: it stays pending until a producer of group {group} that has one answers, or "
            "until `penstock tx commit` or `rollback` decides"
        )

    def count_failure(self, *, lost: bool = False) -> None:
        """Count a half or a decision that is not known to be stored."""
        with self._lock:
            self._failed += 1
            self._lost += lost

    def statistics(self) -> ProducerStatistics:
        """Return the counts; those of checks are 0."""
        with self._lock:
            return ProducerStatistics(
                in_flight=self.in_flight.count,
                committed=self.in_flight.committed,
                rolled_back=self.in_flight.rolled_back,
                unknown=self.in_flight.unknown,
                failed=self._failed,
                checks=0,
                failed_checks=0,
                skipped_checks=0,
                lost_decisions=self._lost,
            )
