"""Tables of Delta and Iceberg with one interface: made, read and changed as by a program without penstock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from penstock.spark_sink import DeltaSink, IcebergSink


class Lake(ABC):
    """One table in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def sink(self, key: Sequence[str] = (), *, name: str = "q", **settings: Any) -> DeltaSink | IcebergSink:
        """Return a sink that fills it."""

    @abstractmethod
    def rows(self) -> pa.Table:
        """Return a reader's view."""

    @abstractmethod
    def make(self, schema: pa.Schema) -> None:
        """Make it before a sink does."""

    @abstractmethod
    def append(self, rows: pa.Table) -> None:
        """Add rows, as another writer."""

    @abstractmethod
    def maintain(self) -> None:
        """Do what those who keep tables do: shorten the log, forget former versions."""

    def found(self, *columns: str) -> list[tuple[Any, ...]]:
        """Return some columns of all rows, sorted."""
        return sorted(tuple(row[name] for name in columns) for row in self.rows().to_pylist())


class DeltaLake(Lake):
    """A table of Delta."""

    def sink(self, key: Sequence[str] = (), *, name: str = "q", **settings: Any) -> DeltaSink:
        return DeltaSink(str(self.folder / "table"), key, name=name, **settings)

    def rows(self) -> pa.Table:
        return DeltaTable(self.folder / "table").to_pyarrow_table()

    def make(self, schema: pa.Schema, **settings: Any) -> None:
        DeltaTable.create(self.folder / "table", schema, **settings)

    def append(self, rows: pa.Table) -> None:
        write_deltalake(self.folder / "table", rows, mode="append")

    def maintain(self) -> None:
        DeltaTable(self.folder / "table").create_checkpoint()


class IcebergLake(Lake):
    """A table of Iceberg, in a catalogue on SQLite."""

    @property
    def catalog(self) -> dict[str, str]:
        """Properties of its catalogue."""
        uri, warehouse = f"sqlite:///{self.folder / 'catalog.db'}", f"file://{self.folder}"
        return {"name": "lake", "type": "sql", "uri": uri, "warehouse": warehouse}

    def sink(self, key: Sequence[str] = (), *, name: str = "q", **settings: Any) -> IcebergSink:
        return IcebergSink("db.events", self.catalog, key, name=name, **settings)

    @contextmanager
    def table(self) -> Iterator[Table]:
        """Have the table in the block."""
        with load_catalog(**self.catalog) as catalog:
            yield catalog.load_table("db.events")

    def rows(self) -> pa.Table:
        with self.table() as table:
            return table.scan().to_arrow()

    def make(self, schema: pa.Schema, **settings: Any) -> None:
        with load_catalog(**self.catalog) as catalog:
            catalog.create_namespace("db")
            catalog.create_table("db.events", schema, **settings)

    def append(self, rows: pa.Table) -> None:
        with self.table() as table:
            table.append(rows)

    def maintain(self) -> None:
        with self.table() as table:
            former = {snapshot.snapshot_id for snapshot in table.snapshots()} - {table.metadata.current_snapshot_id}
            table.maintenance.expire_snapshots().by_ids(list(former)).commit()


LAKES: dict[str, type[Lake]] = {"delta": DeltaLake, "iceberg": IcebergLake}
