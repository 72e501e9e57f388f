"""Where commands find a store of transactions: the options that say so, and what an operator can do there."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.cli.options.connection import SERVERS_OPTION
from penstock.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock.cli.tx.file_store import FileOperator
    from penstock.cli.tx.sql_store import SqlOperator
    from penstock.transactions.stores.kafka.administration import KafkaAdministration

    Operator = KafkaAdministration | SqlOperator | FileOperator

#: As for every command, but a store that is not in Kafka needs no broker.
Servers = Annotated[str | None, SERVERS_OPTION]
Sql = Annotated[
    str | None,
    typer.Option("--sql", help="A store in a database instead: sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME."),
]
File = Annotated[Path | None, typer.Option("--file", help="A file store instead, by its folder: to look at.")]
Prefix = Annotated[str, typer.Option(help="First part of the names of the store's topics.")]


class StoreLocation(NamedTuple):
    """Where the store is: in Kafka, in a database, or in a folder."""

    bootstrap_servers: str | None
    prefix: str
    sql: str | None
    file: Path | None
    #: Settings of the Kafka clients.
    config: dict[str, str]

    @property
    def name(self) -> str:
        """What the store is called."""
        return "the database" if self.sql is not None else str(self.file or self.prefix)

    def open(self, wait_s: float = 15.0) -> AbstractContextManager[Operator]:
        """Return what can be done there, for a `with` block that closes it.

        Brokers that do not answer at once are waited for about `wait_s` seconds.
        """
        if self.sql is not None and self.file is not None:
            raise ConfigurationError("--sql and --file name two stores; leave one of them out")
        if self.file is not None:
            from penstock.cli.tx.file_store import FileOperator

            return nullcontext(FileOperator(self.file, self.bootstrap_servers, self.prefix, self.config))
        if self.sql is not None:
            from penstock.cli.tx.sql_store import SqlOperator

            return closing(SqlOperator(self.sql))
        if self.bootstrap_servers is None:
            raise ConfigurationError(
                "--bootstrap-servers is missing; or name a store in a database by --sql, or one in a folder by --file"
            )
        from penstock.transactions.stores.kafka.administration import KafkaAdministration

        return KafkaAdministration(self.bootstrap_servers, self.prefix, self.config, wait_s=wait_s)

    def require_kafka(self, option: str) -> None:
        """Refuse an option for what only a store in Kafka can tell or do."""
        if self.sql is not None or self.file is not None:
            raise ConfigurationError(f"{option} is for a store in Kafka: leave it out, or --sql and --file")
