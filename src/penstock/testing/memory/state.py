"""What the broker in memory and its clients share."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka import Message

from penstock.testing.memory.clock import TestClock
from penstock.testing.memory.faults import Faults
from penstock.testing.memory.group.coordinator import Coordinator
from penstock.testing.memory.log.log import PartitionLog, Place


@dataclass(frozen=True, slots=True)
class BrokerState:
    """The parts of one broker. The lock guards all of them."""

    clock: TestClock
    lock: threading.RLock
    #: Every log by topic and partition, and what appends a record.
    logs: dict[Place, PartitionLog]
    append: Callable[..., Message]
    coordinator: Coordinator
    faults: Faults
    chance: random.Random
    max_fetch: int
