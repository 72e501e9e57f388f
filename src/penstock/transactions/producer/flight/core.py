"""What all transactions of one producer share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.transactions.producer.flight.deadlines import RequestDeadlines
from penstock.transactions.producer.flight.in_flight import InFlightLimit
from penstock.transactions.store import Store

if TYPE_CHECKING:
    from penstock.telemetry import SendSpans


@dataclass(frozen=True, slots=True)
class Core:
    """What all transactions of one producer share. Thread-safe."""

    store: Store
    group: str
    in_flight: InFlightLimit
    deadlines: RequestDeadlines
    #: Connects at the first use.
    open: Callable[[], object]
    #: Whether this producer answers checks.
    has_check: bool
    #: Makes a span of each message, where telemetry is on.
    spans: SendSpans | None
    #: Targets that event loops asked for before. A set's steps are single ones.
    known: set[tuple[str, int | None]] = field(default_factory=set)

    def require(self, places: set[tuple[str, int | None]]) -> None:
        """Connect, and raise unless all targets exist."""
        self.open()
        for place in places:
            self.store.require_target(*place)

    def who_settles(self) -> str:
        """Say what becomes of a transaction whose decision is lost."""
        if self.has_check:
            return f"a check of group {self.group} will settle it"
        return (
            f"this producer has no check: it stays pending until a producer of group {self.group} that has one "
            "answers, or until `penstock tx commit` or `rollback` decides"
        )
