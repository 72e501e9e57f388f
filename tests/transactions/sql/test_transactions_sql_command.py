"""`penstock tx --sql`: a store in a database, looked at and decided on without Kafka."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from conformance.store_cases import SqlBench, settled

from commands import Command, commands
from penstock.errors import ConfigurationError
from penstock.transactions import SqlStore, new_id
from penstock.transactions.wire.ops import Verdict


@pytest.fixture
def tx(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `penstock tx ARGUMENTS...`, and knows of no broker."""
    return partial(commands(monkeypatch, capsys), "tx")


def test_a_store_in_a_database_is_shown_and_decided_on(sql_bench: SqlBench, tx: Command) -> None:
    url = sql_bench.database.url
    coordinator = sql_bench.coordinator(transaction_timeout=600.0)
    yes, no = (sql_bench.prepare(sql_bench.half(text)).halves[0].transaction_id for text in (b"yes", b"no"))

    listed, shown = tx("ls", "--sql", url), tx("show", yes, "--sql", url)
    committed = tx("commit", yes, "--sql", url, "--reason", "by phone")
    dropped = tx("discard", no, "--sql", url)
    resumed = tx("resume", no, "--sql", url)
    second = tx("resume", no, "--sql", url)
    rolled_back = tx("rollback", no, "--sql", url)
    late = tx("commit", no, "--sql", url)

    assert (listed.code, shown.code) == (0, 0), listed.err
    assert "2 pending transactions" in listed.out
    assert {yes, no} <= set(listed.out.split())
    assert "waits for   a decision" in shown.out
    assert f"messages    to {sql_bench.topic}" in shown.out
    assert (committed.code, dropped.code, resumed.code, second.code, rolled_back.code) == (0, 0, 0, 1, 0)
    assert "committed: visible" in committed.out
    assert "moved to the discarded topic" in dropped.out
    assert "brought back" in resumed.out
    assert late.code == 1
    settled(coordinator, committed=1, discarded=1, rolled_back=1)
    assert sql_bench.seen() == [b"yes"]
    acts = sql_bench.database.rows("SELECT actor, what, tx FROM penstock_audit ORDER BY number")
    assert [(what, identity) for _, what, identity in acts][:4] == [
        ("commit", yes),
        ("discard", no),
        ("resume", no),
        ("resume", no),
    ]
    assert acts[0][0].endswith(": by phone")


@pytest.mark.thorough
def test_what_was_discarded_is_listed_and_shown_with_who_did_so_and_leaves_the_list_when_it_is_resumed(
    sql_bench: SqlBench, tx: Command
) -> None:
    url = sql_bench.database.url
    coordinator = sql_bench.coordinator(transaction_timeout=600.0)
    gone, done = (sql_bench.prepare(sql_bench.half(text)).halves[0].transaction_id for text in (b"gone", b"done"))
    assert tx("discard", gone, "--sql", url, "--reason", "nobody knows").code == 0
    assert tx("commit", done, "--sql", url, "--reason", "by phone").code == 0
    settled(coordinator, committed=1, discarded=1)

    listed, of_others = (tx("ls", "--discarded", "--sql", url, "--group", group) for group in ("orders", "others"))
    shown, after = tx("show", gone, "--sql", url), tx("show", done, "--sql", url)
    unknown = tx("show", new_id(), "--sql", url)
    tx("resume", gone, "--sql", url)
    left = tx("ls", "--discarded", "--sql", url)

    assert listed.code == 0, listed.err
    assert "1 discarded message in the database" in listed.out
    assert {gone, "orders", sql_bench.topic, "operator"} <= set(listed.out.split())
    assert "0 discarded messages" in of_others.out
    assert "reason      by an operator\n  check count 0\n" in shown.out
    assert "  discard  " in shown.out
    assert f"{done}\n  state       settled\n" in after.out
    assert "by phone" in after.out
    assert (unknown.code, "never was" in unknown.err) == (1, True)
    assert "0 discarded messages" in left.out


def test_an_unpublished_decision_says_what_it_waits_for(sql_bench: SqlBench, tx: Command) -> None:
    identity = sql_bench.prepare(sql_bench.half()).halves[0].transaction_id

    place = ("--sql", sql_bench.database.url)

    waits = tx("commit", identity, *place, "--timeout", "0.1")
    other = sql_bench.prepare(sql_bench.half()).halves[0].transaction_id
    discarded = tx("discard", other, *place, "--timeout", "0.1")

    assert waits.code == 0
    assert "stored, but it has not taken effect; it waits for a coordinator" in waits.out
    assert "stored, but it has not taken effect; it waits for a coordinator" in discarded.out
    assert Verdict.COMMIT.name in tx("ls", *place).out


def test_an_outbox_without_tables_names_the_command_that_makes_them(tmp_path: Path, tx: Command) -> None:
    url, other = f"sqlite:///{tmp_path / 'shop.db'}", f"sqlite:///{tmp_path / 'other.db'}"

    def send(place: str) -> None:
        store = SqlStore(place, bootstrap_servers="127.0.0.1:1")
        with sa.create_engine(place).begin() as connection:
            store.outbox(connection).send("orders", value=b"v")

    with pytest.raises(ConfigurationError, match="penstock tx create-tables --sql URL"):
        send(url)
    made, again = tx("create-tables", "--sql", url), tx("create-tables", "--sql", url)
    send(url)
    listed = tx("ls", "--sql", url)
    statements = json.loads(tx("create-tables", "--sql", other, "--dry-run", "--json").out)["statements"]
    is_untouched = not (tmp_path / "other.db").exists()
    with sa.create_engine(other).begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    send(other)

    assert (made.code, again.code) == (0, 0), made.err
    assert "1 pending transaction" in listed.out
    assert is_untouched
    assert "1 pending transaction" in tx("ls", "--sql", other).out


@pytest.mark.parametrize("kind", ["postgresql+psycopg", "mysql+pymysql"])
def test_the_statements_for_an_administrator_are_those_of_the_database(tx: Command, kind: str) -> None:
    outcome = tx("create-tables", "--sql", f"{kind}://ann@nowhere.example/shop", "--dry-run")

    assert outcome.code == 0, outcome.err
    assert "CREATE TABLE penstock_tx (\n    id " in outcome.out
    assert ("CREATE SEQUENCE" in outcome.out) == kind.startswith("postgresql")
    assert ("penstock_number" in outcome.out) == kind.startswith("mysql")
    assert outcome.out.count("INSERT INTO") == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("ls",), 2, "--bootstrap-servers is missing"),
        (("ls", "--sql", "oracle://host/shop"), 2, "which penstock does not know"),
        (("ls", "--sql", "sqlite:///FOLDER/none.db"), 1, "there is no store"),
        (("ls", "--file", "FOLDER", "--discarded"), 2, "use --prefix instead of --file"),
        (("ls", "--sql", "sqlite:///FOLDER/none.db", "--file", "FOLDER"), 2, "name two stores"),
        (("show", "ID", "--sql", "sqlite:///FOLDER/none.db", "--payload"), 2, "--payload"),
        (("resume", "ID", "--sql", "sqlite:///FOLDER/none.db", "--again"), 2, "--again"),
        (("commit", "nonsense", "--sql", "sqlite:///FOLDER/none.db"), 2, "no transaction id"),
    ],
)
def test_what_cannot_be_is_said_and_no_file_is_made(
    tmp_path: Path, tx: Command, arguments: tuple[str, ...], code: int, message: str
) -> None:
    given = [argument.replace("FOLDER", str(tmp_path)).replace("ID", new_id()) for argument in arguments]

    outcome = tx(*given)

    assert outcome.code == code
    assert message in outcome.err
    assert list(tmp_path.iterdir()) == []
