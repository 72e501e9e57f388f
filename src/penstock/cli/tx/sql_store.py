"""`penstock tx --sql`: the same commands on a store in a database. They need no Kafka."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigurationError, PenstockError, StoreConnectionError
from penstock.transactions.operator.administration import await_effect

if TYPE_CHECKING:
    from penstock.transactions.operator.administration import Decided
    from penstock.transactions.wire.ops import Verdict

#: Seconds that a statement may take: all that is pending may be much.
_STATEMENT_S = 60.0


class SqlOperator:
    """What `penstock tx` does on a SQL store, by the database's address. Used by one thread.

    `ConfigurationError` where it is no such address, `StoreConnectionError` where the database does not answer,
    `PenstockError` where there is no store.
    """

    def __init__(self, url: str) -> None:
        try:
            import sqlalchemy as sa

            from penstock.transactions.stores.sql.administration import SqlAdministration
            from penstock.transactions.stores.sql.database import Database
        except ImportError as error:
            raise ConfigurationError("--sql needs the extra sql: pip install 'penstock[sql]'") from error
        database = Database(url, _STATEMENT_S)
        name = database.engine.url.database or ""
        try:
            # SQLite would make the file.
            has_database = database.kind != "sqlite" or Path(name).exists()
            is_there = has_database and sa.inspect(database.engine).has_table("penstock_tx")
        except sa.exc.SQLAlchemyError as error:
            raise StoreConnectionError(
                f"the database {name} cannot be read: {type(error).__name__}; see whether it runs"
            ) from error
        if not is_there:
            database.close()
            raise PenstockError(f"there is no store of transactions in database {name}; a SqlStore makes one")
        self._administration = administration = SqlAdministration(database)
        #: Closes the connections.
        self.close = database.close
        # What a look asks for is the administration's own.
        self.pending, self.show = administration.pending, administration.show
        self.discarded, self.acts = administration.discarded, administration.acts

    def decide(self, transaction_id: str, verdict: Verdict, actor: str, why: str, timeout_s: float) -> Decided:
        """Store a decision and wait until it took effect. Raises as `SqlAdministration.decide`."""
        self._administration.decide(transaction_id, verdict, actor, why)
        return await_effect(self.show, transaction_id, verdict, timeout_s)

    def resume(self, transaction_id: str, actor: str, why: str) -> None:
        """Bring a discarded transaction back. Raises as `SqlAdministration.resume`."""
        self._administration.resume(transaction_id, actor, why)
