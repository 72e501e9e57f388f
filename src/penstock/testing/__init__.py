"""Testing aids, public: a Kafka in memory whose clock you move, and an app driven on it step by step."""

from __future__ import annotations

from penstock.testing.broker import TestBroker
from penstock.testing.clock import TestClock
from penstock.testing.consumer_client import MemoryConsumer
from penstock.testing.coordinator import Commit, Offset
from penstock.testing.faults import Effect, Fault, Operation
from penstock.testing.producer_client import MemoryProducer
from penstock.testing.transaction import TestTransaction

__all__ = [
    "Commit",
    "Effect",
    "Fault",
    "MemoryConsumer",
    "MemoryProducer",
    "Offset",
    "Operation",
    "TestBroker",
    "TestClock",
    "TestTransaction",
]
