"""Transactional messages on Kafka: half, op and done logs, a producer, a coordinator, checks.

A message is stored as a *half* before the local transaction runs and becomes visible, exactly once to read_committed
readers, only after its decision is COMMIT. What is not decided is asked of the producer group.
"""

from penstock.transactions.coordinator import Coordinator
from penstock.transactions.ids import new_id
from penstock.transactions.model import (
    CoordinatorStatistics,
    HalfMessage,
    ProducerStatistics,
    TransactionResult,
    TransactionState,
)
from penstock.transactions.producer import Transaction, TransactionalProducer

__all__ = [
    "Coordinator",
    "CoordinatorStatistics",
    "HalfMessage",
    "ProducerStatistics",
    "Transaction",
    "TransactionResult",
    "TransactionState",
    "TransactionalProducer",
    "new_id",
]
