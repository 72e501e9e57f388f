"""Transactional messages on Kafka: half, op and done logs, a producer, a coordinator, checks.

A message is stored as a *half* before the local transaction runs and becomes visible, exactly once to read_committed
readers, only after its decision is COMMIT. What is not decided is asked of the producer group.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.transactions.messages import Outgoing
from penstock.transactions.model import (
    CoordinatorStatistics,
    HalfMessage,
    ProducerStatistics,
    TransactionResult,
    TransactionState,
)
from penstock.transactions.producer.listeners import (
    LocalTransactionExecutor,
    TransactionCheckListener,
    TransactionListener,
)
from penstock.transactions.producer.producer import TransactionalProducer
from penstock.transactions.producer.transaction import Transaction, TransactionOfSeveral
from penstock.transactions.stores.coordinator import Coordinator
from penstock.transactions.wire.ids import new_id

if TYPE_CHECKING:
    from penstock.transactions.barriers import barrier, barrier_check, clean_barrier, create_barrier_table
    from penstock.transactions.stores.file import FileStore
    from penstock.transactions.stores.sql import SqlStore

__all__ = [
    "Coordinator",
    "CoordinatorStatistics",
    "FileStore",
    "HalfMessage",
    "LocalTransactionExecutor",
    "Outgoing",
    "ProducerStatistics",
    "SqlStore",
    "Transaction",
    "TransactionCheckListener",
    "TransactionListener",
    "TransactionOfSeveral",
    "TransactionResult",
    "TransactionState",
    "TransactionalProducer",
    "barrier",
    "barrier_check",
    "clean_barrier",
    "create_barrier_table",
    "new_id",
]

#: What is loaded when it is asked for, since it needs what not everybody installs.
_HOME_OF = {
    "FileStore": "penstock.transactions.stores.file",
    "SqlStore": "penstock.transactions.stores.sql",
    "barrier": "penstock.transactions.barriers",
    "barrier_check": "penstock.transactions.barriers",
    "clean_barrier": "penstock.transactions.barriers",
    "create_barrier_table": "penstock.transactions.barriers",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module it lives in."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock.transactions' has no attribute {name!r}")
    return getattr(import_module(home), name)
