"""Transactional messages on Kafka: half, op and done logs, a producer, a coordinator, checks.

A message is stored as a *half* before the local transaction runs. It becomes visible, exactly once to read_committed
readers, only after its decision is COMMIT. If no decision comes, the coordinator sends a check to the producer group.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.outgoing import Outgoing, UserHeaders
from penstock.transactions.barriers import (
    BarrierCheck,
    HasId,
    barrier,
    barrier_check,
    clean_barrier,
    create_barrier_table,
)
from penstock.transactions.inboxes import create_inbox_table, inbox
from penstock.transactions.model import (
    CoordinatorStatistics,
    DiscardPolicy,
    HalfMessage,
    PendingTransaction,
    ProducerStatistics,
    TransactionResult,
    TransactionState,
    Wait,
)
from penstock.transactions.producer.check_responder import Check
from penstock.transactions.producer.producer import TransactionalProducer
from penstock.transactions.producer.sender import AsyncExecute, Execute
from penstock.transactions.producer.submission import Submission
from penstock.transactions.producer.transaction import Run, Transaction, TransactionListener
from penstock.transactions.store import Store
from penstock.transactions.stores.coordinator import Coordinator
from penstock.transactions.stores.relayed_store import RelayedStore
from penstock.transactions.wire.ids import new_id

if TYPE_CHECKING:
    from penstock.transactions.stores.file.store import FileStore
    from penstock.transactions.stores.sql.store import SqlStore

__all__ = [
    "AsyncExecute",
    "BarrierCheck",
    "Check",
    "Coordinator",
    "CoordinatorStatistics",
    "DiscardPolicy",
    "Execute",
    "FileStore",
    "HalfMessage",
    "HasId",
    "Outgoing",
    "PendingTransaction",
    "ProducerStatistics",
    "RelayedStore",
    "Run",
    "SqlStore",
    "Store",
    "Submission",
    "Transaction",
    "TransactionListener",
    "TransactionResult",
    "TransactionState",
    "TransactionalProducer",
    "UserHeaders",
    "Wait",
    "barrier",
    "barrier_check",
    "clean_barrier",
    "create_barrier_table",
    "create_inbox_table",
    "inbox",
    "new_id",
]

#: Names that are loaded at their first use: `SqlStore` needs SQLAlchemy, and few programs use either.
_HOME_OF = {
    "FileStore": "penstock.transactions.stores.file.store",
    "SqlStore": "penstock.transactions.stores.sql.store",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock.transactions' has no attribute {name!r}")
    return getattr(import_module(home), name)
