"""What an operator sees and does on a SQL store, and what is written down of it."""

from __future__ import annotations

import time

import pytest
from conformance.sql_cases import SqlBench
from conformance.store_cases import counted, settled

from penstock.errors import TransactionError, TransactionRefusedError
from penstock.transactions import TransactionState, new_id
from penstock.transactions.wire.ops import Verdict

COMMIT, ROLLBACK, UNKNOWN, DISCARD = Verdict.COMMIT, Verdict.ROLLBACK, Verdict.UNKNOWN, Verdict.DISCARD
NO_CHECKS = {"transaction_timeout": 600.0}


def test_an_operator_sees_what_waits_and_for_what(sql_bench: SqlBench) -> None:
    undecided = sql_bench.prepare(sql_bench.half(key=b"k", order_key=b"k")).halves[0]
    held = sql_bench.send(COMMIT, sql_bench.half(key=b"k", order_key=b"k")).halves[0]
    late = sql_bench.send(COMMIT, sql_bench.half(deliver_at_ms=1 << 42)).halves[0]
    administration = sql_bench.sql_store.administration()

    shown = administration.pending()

    assert [one.transaction_id for one in shown] == [half.transaction_id for half in (undecided, held, late)]
    assert [one.decided for one in shown] == [None, TransactionState.COMMIT, TransactionState.COMMIT]
    assert [one.held_by for one in shown] == [None, undecided.transaction_id, None]
    assert [one.waits_for for one in shown] == ["", "", "its time"]
    assert {(one.group, one.topics) for one in shown} == {("orders", (sql_bench.topic,))}
    again = administration.show(held.transaction_id)
    assert again is not None
    assert again.held_by == undecided.transaction_id
    assert administration.show(new_id()) is None


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


def test_a_discarded_transaction_is_resumed_once_with_a_fresh_count_and_can_commit(sql_bench: SqlBench) -> None:
    coordinator = sql_bench.coordinator(check_max=2)
    administration = sql_bench.sql_store.administration()
    with sql_bench.answering(lambda _: UNKNOWN):
        prepared = sql_bench.send(None, sql_bench.half(b"v", key=b"k"))
        settled(coordinator, discarded=1)
    transaction_id = prepared.halves[0].transaction_id
    sql_bench.decide(prepared, COMMIT)
    counted(coordinator, refused=1)

    administration.resume(transaction_id, "ann@host")
    with pytest.raises(TransactionError, match="resumed already"):
        administration.resume(transaction_id, "ann@host")
    with sql_bench.answering(lambda request: COMMIT if request.check_number == 2 else UNKNOWN) as asked:
        settled(coordinator, committed=1)

    assert {request.check_number for request in asked} == {1, 2}
    assert sql_bench.seen() == [b"v"]
    assert sql_bench.seen(sql_bench.discarded) == [b"v"]


def test_a_resumed_transaction_is_published_though_the_done_log_knows_that_it_was_discarded(
    sql_bench: SqlBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.stores.relay.coordinator._TRIM_S", 600.0)
    coordinator = sql_bench.coordinator(**NO_CHECKS)
    administration = sql_bench.sql_store.administration()
    transaction_id = sql_bench.prepare(sql_bench.half(b"v")).halves[0].transaction_id
    administration.decide(transaction_id, DISCARD, "ann@host")
    settled(coordinator, discarded=1)
    # Nobody publishes meanwhile, and nothing is truncated.
    sql_bench.reopen()
    administration = sql_bench.sql_store.administration()
    administration.resume(transaction_id, "ann@host")
    administration.decide(transaction_id, COMMIT, "ann@host")
    sql_bench.reopen()

    # It opens, and finds the discarded one in the done log.
    settled(sql_bench.coordinator(**NO_CHECKS))

    assert sql_bench.seen() == [b"v"]
