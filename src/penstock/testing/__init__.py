"""Testing aids, public: a Kafka in memory whose clock you move, and an app driven on it step by step."""

from penstock.testing.app import TestApp
from penstock.testing.memory.broker import TestBroker
from penstock.testing.memory.client.consumer_client import MemoryConsumer
from penstock.testing.memory.client.producer_client import MemoryProducer
from penstock.testing.memory.clock import TestClock
from penstock.testing.memory.faults import Effect, Fault, Operation
from penstock.testing.memory.group.coordinator import Commit, Offset
from penstock.testing.memory.log.log import Place
from penstock.testing.memory.log.transaction import TestTransaction

__all__ = [
    "Commit",
    "Effect",
    "Fault",
    "MemoryConsumer",
    "MemoryProducer",
    "Offset",
    "Operation",
    "Place",
    "TestApp",
    "TestBroker",
    "TestClock",
    "TestTransaction",
]
