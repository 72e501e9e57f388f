"""Testing aids, public: an app driven by hand on a Kafka in memory, whose clock you move and which fails on demand."""

from penstock.testing.app import TestApp
from penstock.testing.memory.broker import TestBroker
from penstock.testing.memory.clock import TestClock
from penstock.testing.memory.faults import Effect, Fault, Operation

__all__ = ["Effect", "Fault", "Operation", "TestApp", "TestBroker", "TestClock"]
