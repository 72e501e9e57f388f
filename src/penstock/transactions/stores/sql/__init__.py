"""What of the transactions lives in SQL: statements on the user's own connections, and the store in a database."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.transactions.stores.sql.store import SqlStore

__all__ = ["SqlStore"]


def __getattr__(name: str) -> Any:
    """Load the store when it is asked for: it needs SQLAlchemy, the barrier does not."""
    if name != "SqlStore":
        raise AttributeError(f"module 'penstock.transactions.sql' has no attribute {name!r}")
    from penstock.transactions.stores.sql.store import SqlStore

    return SqlStore
