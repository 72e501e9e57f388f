"""Operators of a SQL store: whose clock counts, and what is written down."""

from __future__ import annotations

import time

import pytest
from conformance.store_cases import NO_CHECKS, SqlBench, settled

from penstock.errors import TransactionRefusedError
from penstock.transactions import new_id
from penstock.transactions.wire.ops import Verdict

COMMIT, ROLLBACK, UNKNOWN, DISCARD = Verdict.COMMIT, Verdict.ROLLBACK, Verdict.UNKNOWN, Verdict.DISCARD


def test_ages_and_times_are_by_the_databases_clock_not_the_operators(
    sql_bench: SqlBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql_bench.prepare(sql_bench.half(b"young"))
    sql_bench.send(COMMIT, sql_bench.half(b"late", deliver_at_ms=int(time.time() * 1000) + 1_800_000))
    administration, now = sql_bench.sql_store.administration(), time.time()

    for off_s in (-3600.0, 3600.0):
        monkeypatch.setattr(time, "time", lambda off_s=off_s: now + off_s)
        shown = administration.pending()

        assert all(0 <= one.age_s < 600 for one in shown)
        assert [one.waits_for for one in shown] == ["", "its time"]


def test_an_operator_decides_once_and_it_is_written_down(sql_bench: SqlBench) -> None:
    coordinator = sql_bench.coordinator(**NO_CHECKS)
    yes, no = (sql_bench.prepare(sql_bench.half(text)).halves[0].transaction_id for text in (b"yes", b"no"))
    administration = sql_bench.sql_store.administration()

    administration.decide(yes, COMMIT, "ann@host")
    administration.decide(no, ROLLBACK, "ann@host")
    settled(coordinator, committed=1, rolled_back=1)
    with pytest.raises(TransactionRefusedError, match="COMMIT was decided before"):
        administration.decide(yes, ROLLBACK, "bob@host")
    with pytest.raises(TransactionRefusedError, match="no such transaction"):
        administration.decide(new_id(), COMMIT, "bob@host")

    assert sql_bench.seen() == [b"yes"]
    acts = sql_bench.database.rows("SELECT actor, what, tx FROM penstock_audit ORDER BY number")
    assert acts[:3] == [("ann@host", "commit", yes), ("ann@host", "rollback", no), ("bob@host", "rollback", yes)]
