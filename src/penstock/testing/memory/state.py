"""What the broker in memory and its clients share."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

from penstock.testing.memory.clock import TestClock
from penstock.testing.memory.faults import Faults
from penstock.testing.memory.group.coordinator import Coordinator
from penstock.testing.memory.log.topics import Topics


@dataclass(frozen=True, slots=True)
class BrokerState:
    """The parts of one broker. The lock guards all of them."""

    clock: TestClock
    lock: threading.RLock
    topics: Topics
    coordinator: Coordinator
    faults: Faults
    chance: random.Random
    max_fetch: int
