"""The seam between producers and the place where halves and decisions are kept.

`KafkaStore` keeps them in topics. Another store implements the same three protocols; the producer and its checks do
not know which one they speak to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.transactions.records import Author, CheckRequest, Half, Verdict


class Prepared(Protocol):
    """A half that is stored."""

    @property
    def half(self) -> Half:
        """The half itself."""


class CheckSource(Protocol):
    """The questions to one producer group. Used by one thread."""

    def take(self, timeout_s: float) -> Sequence[CheckRequest]:
        """Return the questions that are there, waiting at most `timeout_s` seconds for the first."""

    def close(self) -> None:
        """Give the source up; another producer of the group gets its questions."""


class Store(Protocol):
    """Where halves and decisions are kept. Thread-safe."""

    def start(self) -> None:
        """Connect, and create what is absent."""

    def stop(self, timeout_s: float) -> None:
        """Finish what is being written, at most `timeout_s` seconds, and disconnect."""

    def require_target(self, topic: str, partition: int | None) -> None:
        """Raise `TopicNotFoundError` or `ConfigurationError` unless a message can be published there."""

    def prepare(self, half: Half) -> Prepared:
        """Store a half and return once it is durable, or raise `HalfNotStoredError`."""

    def decide(self, prepared: Prepared, verdict: Verdict) -> None:
        """Store the producer's decision and return once it is durable, or raise `DecisionNotStoredError`."""

    def answer(self, request: CheckRequest, verdict: Verdict, author: Author) -> None:
        """Store the answer to a check and return once it is durable, or raise `DecisionNotStoredError`."""

    def checks(self, group: str) -> CheckSource:
        """Return the questions to a producer group."""


__all__ = ["CheckSource", "Prepared", "Store"]
