"""The options for a store of transactions in Kafka, a database or a folder, and the operator's access to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import Reading
from penstock.errors import ConfigurationError, PenstockError, StoreConnectionError

if TYPE_CHECKING:
    from penstock.transactions.operator.administration import Administration
    from penstock.transactions.stores.sql.database import Database

#: The timeout of a statement in seconds. It is long, because the pending transactions can be many.
_STATEMENT_S = 60.0

Sql = Annotated[
    str | None,
    typer.Option(
        "--sql", help="A store in a database instead of Kafka: sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME."
    ),
]


@dataclass(frozen=True)
class Store(Reading):
    """The place of a store: Kafka, a database or a folder. A store outside of Kafka needs no broker."""

    sql: Sql = None
    file: Annotated[
        Path | None, typer.Option("--file", help="The folder of a file store instead of Kafka; it is only read.")
    ] = None
    prefix: Annotated[str, typer.Option(help="First part of the names of the store's topics.")] = "penstock"

    @property
    def name(self) -> str:
        """The name of the store in messages."""
        return "the database" if self.sql is not None else str(self.file or self.prefix)

    @contextmanager
    def open(self, wait_s: float = 15.0) -> Iterator[Administration]:
        """Yield the operator's access to the store, and close it; it waits about `wait_s` seconds for brokers."""
        require_one_store(self.sql, self.file)
        if self.file is not None:
            from penstock.transactions.stores.file.administration import FolderReading
            from penstock.transactions.wire.topics import StoreTopics

            kafka = None if self.named_servers is None else (self.servers, self.settings, StoreTopics(self.prefix))
            yield FolderReading(self.file, kafka)
        elif self.sql is not None:
            with database(self.sql) as opened:
                from penstock.transactions.stores.sql.administration import SqlAdministration

                _require_tables(opened)
                yield SqlAdministration(opened)
        elif self.named_servers is None:
            raise ConfigurationError(
                "--bootstrap-servers is missing; or name a store in a database with --sql, or in a folder with --file"
            )
        else:
            from penstock.transactions.stores.kafka.administration import KafkaAdministration

            self.admin(f"the transactions of {self.prefix} cannot be read")
            with KafkaAdministration(self.servers, self.prefix, self.settings, wait_s=wait_s) as in_kafka:
                yield in_kafka

    def require_kafka(self, option: str) -> None:
        """Raise `ConfigurationError` for an option that only a store in Kafka supports."""
        if self.sql is not None or self.file is not None:
            raise ConfigurationError(f"{option} is for a store in Kafka: omit it, or --sql and --file")


def require_one_store(sql: str | None, file: Path | None) -> None:
    """Raise `ConfigurationError` if two stores are named."""
    if sql is not None and file is not None:
        raise ConfigurationError("--sql and --file name two stores; omit one of them")


@contextmanager
def database(url: str) -> Iterator[Database]:
    """Connect to a database for the block; `StoreConnectionError` if it does not answer."""
    try:
        import sqlalchemy as sa

        from penstock.transactions.connections import cause_of
        from penstock.transactions.stores.sql.database import Database
    except ImportError as error:
        raise ConfigurationError("--sql needs the extra sql: pip install 'penstock[sql]'") from error
    found = Database(url, _STATEMENT_S)
    try:
        yield found
    except sa.exc.SQLAlchemyError as error:
        raise StoreConnectionError(
            f"the database {found.engine.url.database or ''} cannot be used: {cause_of(error)}; check its "
            "address, that it runs, and the permissions of this user"
        ) from error
    finally:
        found.close()


def _require_tables(opened: Database) -> None:
    import sqlalchemy as sa

    name = opened.engine.url.database or ""
    # SQLite would create the file.
    has_database = opened.kind != "sqlite" or Path(name).exists()
    if not has_database or not sa.inspect(opened.engine).has_table("penstock_tx"):
        raise PenstockError(
            f"there is no store of transactions in database {name}; a SqlStore creates it, or "
            "`penstock tx create-tables --sql URL`"
        )
