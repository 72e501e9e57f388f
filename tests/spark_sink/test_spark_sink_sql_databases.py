"""What a SQL sink does differently in one database and in another stands in the files of the databases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from penstock.database_url import parse_database_url
from penstock.spark_sink.sinks.sql import databases as room
from penstock.spark_sink.sinks.sql.databases.databases import DATABASES, database_of

FILES = sorted(Path(room.__file__).parents[1].rglob("*.py"))
#: A question for the name of a dialect: a name in quotes, or an argument that only one dialect takes.
NAMES = re.compile("|".join(f"[\"']{name}[\"']|{name}_\\w+ *=" for name in DATABASES))


def test_the_database_of_an_address_is_known() -> None:
    urls = ["sqlite:///file.db", "postgresql://somebody@host/there"]

    assert [database_of(parse_database_url(url)).title for url in urls] == ["SQLite", "PostgreSQL"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_a_databases_own_file_names_its_dialect(path: Path) -> None:
    found = NAMES.findall(path.read_text())

    assert found == [] or path.parent == Path(room.__file__).parent


@pytest.mark.parametrize("name", DATABASES)
def test_a_database_is_named_by_its_own_file_alone(name: str) -> None:
    naming = [path.name for path in FILES if re.search(f"[\"']{name}[\"']", path.read_text())]

    assert naming == [f"{name}.py"]
