"""Every store: an operator's view and decisions, and resumed transactions."""

from __future__ import annotations

import pytest
from conformance.store_cases import NO_CHECKS, SqlBench, StoreBench, counted, settled

from penstock.errors import TransactionError, TransactionRefusedError
from penstock.transactions import TransactionState, new_id
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until

COMMIT, ROLLBACK, UNKNOWN = Verdict.COMMIT, Verdict.ROLLBACK, Verdict.UNKNOWN


def test_an_operator_sees_what_waits_and_for_what(store_bench: StoreBench) -> None:
    undecided = store_bench.prepare(store_bench.half(key=b"k", order_key=b"k")).halves[0]
    held = store_bench.send(COMMIT, store_bench.half(key=b"k", order_key=b"k")).halves[0]
    late = store_bench.send(COMMIT, store_bench.half(key=b"k", deliver_at_ms=1 << 42)).halves[0]
    store_bench.send(ROLLBACK, store_bench.half(b"gone"))
    coordinator = store_bench.coordinator(**NO_CHECKS)
    counted(coordinator, delayed=1, held_by_key=1, rolled_back=0)

    shown = store_bench.pending()
    shown = {name: shown[name] for name in shown if name in {one.transaction_id for one in (undecided, held, late)}}

    assert [value.decided for value in shown.values()] == [None, TransactionState.COMMIT, TransactionState.COMMIT]
    assert [value.held_by for value in shown.values()] == [None, undecided.transaction_id, None]
    assert [value.waits_for for value in shown.values()] == ["", "", "its time"]
    assert {(value.group, value.topics) for value in shown.values()} == {("orders", (store_bench.topic,))}
    assert [value.deliver_at_ms for value in shown.values()] == [None, None, 1 << 42]
    assert all(0 <= value.age_s < 600 for value in shown.values())


def test_an_operator_decides_once(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator(**NO_CHECKS)
    yes, no = (store_bench.prepare(store_bench.half(text)).halves[0].transaction_id for text in (b"yes", b"no"))
    later = store_bench.send(COMMIT, store_bench.half(b"later", deliver_at_ms=1 << 42)).halves[0].transaction_id
    counted(coordinator, delayed=1)

    store_bench.decide_as_operator(yes, COMMIT)
    store_bench.decide_as_operator(no, ROLLBACK)
    # What is committed and not due is taken back.
    store_bench.decide_as_operator(later, ROLLBACK)
    settled(coordinator, committed=1, rolled_back=2)
    with pytest.raises(TransactionError):
        store_bench.decide_as_operator(yes, ROLLBACK)
    with pytest.raises(TransactionError):
        store_bench.decide_as_operator(new_id(), COMMIT)

    assert store_bench.seen() == [b"yes"]


@pytest.mark.thorough
def test_what_was_committed_by_its_producer_is_not_discarded(store_bench: StoreBench) -> None:
    identity = store_bench.send(COMMIT, store_bench.half(b"v")).halves[0].transaction_id

    with pytest.raises(TransactionRefusedError, match="COMMIT was decided before"):
        store_bench.decide_as_operator(identity, Verdict.DISCARD)

    settled(store_bench.coordinator(**NO_CHECKS), committed=1)
    assert store_bench.seen() == [b"v"]


def test_a_discarded_transaction_comes_back_whole_and_once_with_a_fresh_count_and_can_commit(
    store_bench: StoreBench,
) -> None:
    coordinator = store_bench.coordinator(check_max=2)
    first = store_bench.half(b"1", key=b"k", part=(1, 2), headers=(("h", b"1"),))
    second = first._replace(value=b"2", part=(2, 2))
    with store_bench.answering(lambda _: UNKNOWN):
        prepared = store_bench.send(None, first, second)
        with pytest.raises(TransactionError):
            store_bench.resume(first.transaction_id)
        settled(coordinator, discarded=1)
    store_bench.decide(prepared, COMMIT)
    counted(coordinator, refused=1)

    def resume() -> None:
        # That it is settled may be not durable yet.
        store_bench.until_it_can(lambda: store_bench.resume(first.transaction_id), "on its way")

    resume()
    with store_bench.answering(lambda request: COMMIT if request.check_number == 2 else UNKNOWN) as asked:
        settled(coordinator, committed=1)
    with pytest.raises(TransactionError, match=r"before|already"):
        resume()

    assert {request.check_number for request in asked} == {1, 2}
    assert [(m.key(), m.value(), m.headers()) for m in store_bench.messages()] == [
        (b"k", b"1", [("h", b"1")]),
        (b"k", b"2", [("h", b"1")]),
    ]
    assert store_bench.seen(store_bench.discarded) == [b"1", b"2"]


@pytest.mark.thorough
def test_each_life_of_a_transaction_is_distinguished_in_the_done_log(
    store_bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is truncated, and each coordinator begins with what its predecessors wrote there.
    monkeypatch.setattr("penstock.transactions.stores.shard_coordinator._TRIM_INTERVAL_S", 600.0)
    monkeypatch.setattr("penstock.transactions.stores.kafka.coordinator.log_upkeep.UPKEEP_S", 600.0)
    identity = store_bench.prepare(store_bench.half(b"v")).halves[0].transaction_id
    # A database tells a discard from a commit there, and not from an earlier discard.
    for life in (1,) if isinstance(store_bench, SqlBench) else (1, 2):
        store_bench.coordinator(**NO_CHECKS)
        store_bench.decide_as_operator(identity, Verdict.DISCARD)
        wait_until(lambda life=life: len(store_bench.seen(store_bench.discarded)) == life)  # type: ignore[misc] # bound at once
        store_bench.reopen()
        store_bench.until_it_can(lambda: store_bench.resume(identity), "on its way")
        store_bench.reopen()
    coordinator = store_bench.coordinator(**NO_CHECKS)
    store_bench.decide_as_operator(identity, COMMIT)

    settled(coordinator, committed=1)

    assert store_bench.seen() == [b"v"]
