"""Public test tools: run an app step by step on a Kafka in memory, move its clock, and make it fail on demand."""

from penstock.testing.app import TestApp
from penstock.testing.memory.broker import TestBroker
from penstock.testing.memory.clock import TestClock
from penstock.testing.memory.faults import Effect, Fault, Operation

__all__ = ["Effect", "Fault", "Operation", "TestApp", "TestBroker", "TestClock"]
