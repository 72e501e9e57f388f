"""`penstock sink`: ledgers and their changes. `spark_sink/conformance` has the effect on rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from offsets_tools import rows

from commands import Command
from penstock.devbroker import DevBroker
from penstock.spark_sink import KafkaSink, LedgerEntry, SqlSink
from penstock.spark_sink.ledger.rules import BATCHES

ORDERS = {("orders", 0): LedgerEntry(20, 10, "id", "query", 3), ("orders", 1): LedgerEntry(5)}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database with the ledger of two queries; one fills two tables."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    for table in ("orders", "totals"):
        SqlSink(url, table).write_ledger("shop", ORDERS)
    SqlSink(url, "orders").write_ledger("other", {("payments", 0): LedgerEntry(7, 7)})
    SqlSink(url, "windows").write_ledger("windows", {BATCHES: LedgerEntry(3, 2, None, "query", 2)})
    return url


def test_what_ledgers_have_is_listed_and_shown(penstock_command: Command, url: str) -> None:
    listed = penstock_command("sink", "ls", "--sql", url)
    (summary,) = json.loads(penstock_command("sink", "ls", "--sql", url, "--target", "totals", "--json").out)["queries"]
    shown = json.loads(penstock_command("sink", "show", "shop", "--sql", url, "--json").out)

    assert rows(listed.out) == [
        ["other", "orders", "payments", "1", "7", "-", "-"],
        ["shop", "orders", "orders", "2", "25", "3", "query"],
        ["shop", "totals", "orders", "2", "25", "3", "query"],
        ["windows", "windows", "(batches)", "1", "3", "2", "query"],
    ]
    assert summary == {"query": "shop", "target": "totals", "topics": ["orders"], "partitions": 2} | {
        "next_offsets": 25,
        "batch_id": 3,
        "query_id": "query",
    }
    assert shown["partitions"][0] == {"target": "orders", "topic": "orders", "partition": 0, "next_offset": 20} | {
        "planned_start": 10,
        "batch_id": 3,
        "query_id": "query",
        "topic_id": "id",
    }


def test_a_reset_says_what_comes_again_and_what_is_left_out_and_changes_only_what_is_chosen(
    penstock_command: Command, url: str
) -> None:
    arguments = ("sink", "reset", "shop", "--sql", url, "--to", "orders:0@12,orders:1@9", "--target", "orders")
    tried = penstock_command(*arguments, "--dry-run")
    unchanged = SqlSink(url, "orders").ledger()["shop"]
    outcome = penstock_command(*arguments)
    forgotten = penstock_command("sink", "reset", "shop", "--sql", url, "--forget", "--topic", "orders:1", "--json")

    assert rows(tried.out) == rows(outcome.out)
    assert rows(outcome.out) == [
        ["orders", "orders", "0", "20", "12", "8", "0"],
        ["orders", "orders", "1", "5", "9", "0", "4"],
    ]
    assert "a dry run: nothing was changed" in tried.out
    assert unchanged == ORDERS
    assert "with a new checkpoint_location" in outcome.out
    assert [row["target"] for row in json.loads(forgotten.out)["partitions"]] == ["orders", "totals"]
    assert SqlSink(url, "orders").ledger()["shop"] == {("orders", 0): LedgerEntry(12, 12, "id")}
    assert SqlSink(url, "totals").ledger()["shop"] == {("orders", 0): ORDERS["orders", 0]}


def test_a_query_is_renamed_where_the_new_name_has_nothing(penstock_command: Command, url: str) -> None:
    refused = penstock_command("sink", "rename", "shop", "other", "--sql", url)
    outcome = penstock_command("sink", "rename", "shop", "shop-2", "--sql", url)

    assert refused.code == 1
    assert "has entries of 'other'" in refused.err
    assert outcome.code == 0
    assert SqlSink(url, "orders").ledger().keys() == {"other", "shop-2"}
    assert SqlSink(url, "totals").ledger() == {"shop-2": ORDERS}


def test_the_sinks_of_an_app_lead_to_their_ledgers(
    penstock_command: Command, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_with_sinks.py").write_text(
        "import penstock\nfrom penstock.spark_sink import SqlSink\n"
        "app = penstock.App('shop', bootstrap_servers='127.0.0.1:1')\n"
        f"app.sink('orders', sink=SqlSink('{url}', 'totals'), name='shop')(lambda frame: frame)\n"
        f"app.sink('payments', sink=SqlSink('{url}', 'orders', name='other'), name='own')(lambda frame: frame)\n"
        "app.sink('payments', name='plain', checkpoint_location='c')(lambda frame, batch_id: None)\n"
    )
    monkeypatch.chdir(tmp_path)

    listed = penstock_command("sink", "ls", "--app", "shop_with_sinks:app")

    assert [row[:2] for row in rows(listed.out)] == [["shop", "totals"], ["other", "orders"]], listed.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("ls", 2, "name one ledger"),
        ("ls --sql {url} --kafka", 2, "name one ledger"),
        ("ls --kafka", 2, "--bootstrap-servers is missing"),
        ("ls --sql sqlite:////no/such.db", 1, "there is no file"),
        ("ls --sql postgresql://h:1/shop", 1, "access was refused by table of any sink at"),
        ("ls --delta /no/such", 1, "there is no table /no/such; correct --delta"),
        ("show nobody --sql {url}", 1, "no query 'nobody': it has 'other', 'shop', 'windows'"),
        ("reset windows --sql {url} --to shop:0@2", 2, "and no offsets; give --forget"),
        ("reset shop --sql {url}", 2, "give either --to, or --forget"),
        ("reset shop --sql {url} --to orders:0@3 --forget", 2, "give either --to, or --forget"),
        ("reset shop --sql {url} --to latest", 2, "write TOPIC:PARTITION@OFFSET"),
        ("reset shop --sql {url} --to orders:7@1", 2, r"orders:7, of which the ledger has no entry"),
        ("reset shop --sql {url} --to orders:0@3 --topic payments", 1, "no entry of payments"),
    ],
)
def test_what_cannot_be_done_is_refused(
    penstock_command: Command, url: str, arguments: str, code: int, said: str
) -> None:
    outcome = penstock_command("sink", *arguments.format(url=url).split())

    assert outcome.code == code
    assert said in outcome.err
    assert SqlSink(url, "orders").ledger()["shop"] == ORDERS


def test_a_ledger_in_kafka_is_changed(on_broker: Command, broker: DevBroker, new_topic: Callable[..., str]) -> None:
    servers, topic, ledger = broker.bootstrap_servers, new_topic(), new_topic(partitions=16)
    sink = KafkaSink(servers, name=f"{topic}'s copy", ledger_topic=ledger)
    sink.write_ledger(sink.name, {(topic, 0): LedgerEntry(1, None, None, "query", 3)})

    def penstock(*arguments: str) -> Any:
        return json.loads(on_broker("sink", *arguments, "--kafka", "--ledger-topic", ledger, "--json").out)

    (listed,) = penstock("ls")["queries"]
    (changed,) = penstock("reset", sink.name, "--to", f"{topic}:0@4")["partitions"]
    entry = sink.ledger()[sink.name][topic, 0]
    penstock("reset", sink.name, "--forget")

    assert (listed["query"], listed["next_offsets"], listed["batch_id"]) == (sink.name, 1, 3)
    assert (changed["becomes"], changed["left_out"]) == (4, 3)
    assert (entry.end, entry.start, entry.query_id) == (4, 4, None)
    assert sink.ledger() == {}
