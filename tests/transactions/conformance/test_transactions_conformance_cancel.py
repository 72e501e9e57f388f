"""Every store: a message that is to be published later can be taken back until it is due."""

from __future__ import annotations

import contextlib
import time

import pytest
from conformance.store_cases import NO_CHECKS, StoreBench, settled

from penstock.errors import TransactionError, TransactionRefusedError
from penstock.transactions import new_id
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until

WAIT_S = 60.0
FAR_MS = 4_000_000_000_000


def later(seconds: float) -> int:
    return int((time.time() + seconds) * 1000)


def test_what_waits_for_its_time_is_taken_back_and_never_published(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator(**NO_CHECKS)
    halves = [store_bench.half(b"%d" % number, deliver_at_ms=FAR_MS) for number in range(3)]
    for half in halves:
        store_bench.send(Verdict.COMMIT, half)
    wait_until(lambda: coordinator.statistics().delayed == 3)

    # A second call does no harm while the outcome is known.
    for half in (halves[1], halves[2], halves[1]):
        store_bench.store.cancel(half.transaction_id, "orders", WAIT_S)

    wait_until(lambda: coordinator.statistics().rolled_back == 2)
    statistics = coordinator.statistics()
    assert (statistics.delayed, statistics.pending, statistics.committed) == (1, 1, 0)
    assert store_bench.seen() == []


def test_what_was_cancelled_stays_so_after_a_restart_past_its_time(store_bench: StoreBench) -> None:
    store_bench.coordinator(**NO_CHECKS)
    # A slow machine takes longer until it is cancelled.
    for delay_s in (3, 15, 60):
        due = time.time() + delay_s
        values = [b"cancelled %d" % delay_s, b"other %d" % delay_s]
        cancelled, other = (store_bench.half(value, deliver_at_ms=int(due * 1000)) for value in values)
        for half in (cancelled, other):
            store_bench.send(Verdict.COMMIT, half)
        with contextlib.suppress(TransactionRefusedError):
            store_bench.store.cancel(cancelled.transaction_id, "orders", WAIT_S)
            break
    store_bench.reopen()
    wait_until(lambda: time.time() > due, 120)
    settled(store_bench.coordinator(**NO_CHECKS))
    wait_until(lambda: other.value in store_bench.seen())

    assert cancelled.value not in store_bench.seen()


def test_what_is_published_undecided_unknown_or_another_groups_is_not_cancelled(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator(**NO_CHECKS)
    published, undecided = store_bench.half(b"published", deliver_at_ms=later(-1)), store_bench.half(b"undecided")
    waiting = store_bench.half(b"waiting", deliver_at_ms=FAR_MS)
    store_bench.send(Verdict.COMMIT, published)
    store_bench.send(Verdict.COMMIT, waiting)
    prepared = store_bench.prepare(undecided._replace(deliver_at_ms=FAR_MS))
    wait_until(lambda: coordinator.statistics().committed == 1)
    cancel = store_bench.store.cancel

    with pytest.raises(TransactionError, match=r"published|settled"):
        cancel(published.transaction_id, "orders", WAIT_S)
    with pytest.raises(TransactionRefusedError, match="not decided yet"):
        cancel(undecided.transaction_id, "orders", WAIT_S)
    with pytest.raises(TransactionError, match="never was"):
        cancel(new_id(), "orders", WAIT_S)
    with pytest.raises(TransactionError, match="of group others"):
        cancel(waiting.transaction_id, "others", WAIT_S)

    assert coordinator.statistics().rolled_back == 0
    store_bench.decide(prepared, Verdict.COMMIT)
    wait_until(lambda: coordinator.statistics().delayed == 2)


def test_what_waits_for_nothing_but_a_coordinator_is_not_cancelled(store_bench: StoreBench) -> None:
    at_once, due = store_bench.half(b"at once"), store_bench.half(b"due", deliver_at_ms=later(-1))
    for half in (at_once, due):
        store_bench.send(Verdict.COMMIT, half)

    for half in (at_once, due):
        with pytest.raises(TransactionRefusedError, match="published, or about to be"):
            store_bench.store.cancel(half.transaction_id, "orders", 1.0)
    settled(store_bench.coordinator(**NO_CHECKS), committed=2)

    assert store_bench.seen() == [b"at once", b"due"]
