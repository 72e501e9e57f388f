"""The SQL store in the conformance suite."""

from __future__ import annotations

from typing import Any

from conformance.store_cases import StoreBench

from databases import TestDatabase
from penstock.transactions import Coordinator
from penstock.transactions.stores.sql import SqlStore


class SqlBench(StoreBench):
    """The store in a database of the test's own."""

    def __init__(self, servers: str, topic: str, database: TestDatabase) -> None:
        super().__init__(servers, topic)
        self.database = database
        # One: the suite asks for an order of decisions where keys differ.
        self.shards = 1

    def make_store(self) -> SqlStore:
        return SqlStore(self.database.url, bootstrap_servers=self.servers, prefix=self.prefix, shards=self.shards)

    @property
    def sql_store(self) -> SqlStore:
        """The store, started."""
        store = self.store
        assert isinstance(store, SqlStore)
        return store

    def make_coordinator(self, **options: Any) -> Coordinator:
        return Coordinator(store=self.sql_store, **options)
