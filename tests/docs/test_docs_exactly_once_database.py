"""The handlers of the page on inboxes count once, though their app crashes before the group has their offsets."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, blocks

import penstock
from penstock.testing import TestApp


def test_the_programs_of_the_page_write_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"penstock": penstock, "app": penstock.App("shop", bootstrap_servers="memory:0")}
    for block in blocks(ROOT / "docs" / "exactly-once-database.md"):
        if block.language == "python":
            exec(compile(block.text, block.place, "exec"), names)  # noqa: S102 - our own page
    with closing(sqlite3.connect("shop.db")) as connection, connection:
        connection.execute("CREATE TABLE accounts (id TEXT, balance INTEGER)")
        connection.execute("INSERT INTO accounts VALUES ('alice', 0)")
        connection.execute("CREATE TABLE pages (url BLOB, clicks INTEGER)")
        connection.execute("INSERT INTO pages VALUES (x'2f', 0)")

    with TestApp(names["app"]) as test:
        for _ in range(3):
            test.send("payments", json.dumps({"account": "alice", "amount": 5}), key="alice")
            test.send("clicks", "v", key="/")
        test.settle()
        test.crash()
        test.restart()
        test.advance(1)
        again = test.statistics().handled

    with closing(sqlite3.connect("shop.db")) as connection:
        assert connection.execute("SELECT balance FROM accounts").fetchall() == [(15,)]
        assert connection.execute("SELECT clicks FROM pages").fetchall() == [(3,)]
    assert again == 6
