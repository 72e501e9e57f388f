"""Testing aids, public: a Kafka in memory whose clock you move, and an app driven on it step by step."""

from __future__ import annotations

from penstock.testing.app import TestApp
from penstock.testing.assignor import Place
from penstock.testing.broker import TestBroker
from penstock.testing.clock import TestClock
from penstock.testing.consumer_client import MemoryConsumer
from penstock.testing.coordinator import Commit, Offset
from penstock.testing.dice import Dice
from penstock.testing.faults import Effect, Fault, Operation
from penstock.testing.judge import InvariantBroken
from penstock.testing.producer_client import MemoryProducer
from penstock.testing.simulation import SimulatedFailure, Simulation
from penstock.testing.transaction import TestTransaction

__all__ = [
    "Commit",
    "Dice",
    "Effect",
    "Fault",
    "InvariantBroken",
    "MemoryConsumer",
    "MemoryProducer",
    "Offset",
    "Operation",
    "Place",
    "SimulatedFailure",
    "Simulation",
    "TestApp",
    "TestBroker",
    "TestClock",
    "TestTransaction",
]
