"""A producer for those who mostly look: it is made when it is called for first."""

from __future__ import annotations

from collections.abc import Callable

from penstock.transactions.writing.acked_producer import AckedProducer


class LateProducer:
    """An `AckedProducer` that is made and started when it is called for first: who only looks may write nothing.

    `make` returns it, not started. Used by one thread.
    """

    def __init__(self, make: Callable[[], AckedProducer]) -> None:
        self._make = make
        self._made: AckedProducer | None = None

    def __call__(self) -> AckedProducer:
        """Return the producer."""
        if self._made is None:
            self._made = self._make()
            self._made.start()
        return self._made

    def stop(self, timeout_s: float) -> None:
        """Stop it, if it was made."""
        if self._made is not None:
            self._made.stop(timeout_s)
