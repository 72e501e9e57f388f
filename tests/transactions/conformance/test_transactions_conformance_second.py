"""Every store: who decides when another decision stands already."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.store_cases import BUT_SQL, KafkaBench, StoreBench

from penstock.errors import TransactionRefusedError
from penstock.transactions import Transaction, TransactionState
from penstock.transactions.wire.half import CheckRequest
from penstock.transactions.wire.ops import Author, Verdict

pytestmark = BUT_SQL


def decided(bench: StoreBench, tx: Transaction, verdict: Verdict, author: Author = Author.CHECK) -> None:
    """Have a check answered, or an operator decide, while the local transaction runs."""
    stored = tx._prepared
    assert stored is not None
    place = (getattr(stored, "partition", 0), getattr(stored, "offsets", (0,))[0])
    bench.store.answer(CheckRequest(stored.halves[0], *place, 1), verdict, author)


def overtaken(bench: StoreBench, standing: Verdict, author: Author, **options: Any) -> TransactionState:
    """Send a message whose COMMIT comes after that decision, and return the answer."""

    def local(tx: Transaction) -> TransactionState:
        decided(bench, tx, standing, author)
        return TransactionState.COMMIT

    with bench.producer(**options) as producer:
        return producer.send(bench.topic, value=b"v", execute=local).state


@pytest.mark.parametrize("author", [Author.CHECK, Author.OPERATOR])
def test_a_commit_that_comes_second_is_reported_at_once_where_the_store_knows_it(
    store_bench: StoreBench, author: Author
) -> None:
    store_bench.coordinator(transaction_timeout=600.0)

    assert overtaken(store_bench, Verdict.COMMIT, author) is TransactionState.COMMIT
    if isinstance(store_bench, KafkaBench):
        # It is in the log; that an earlier one is there is known only to who reads that.
        assert overtaken(store_bench, Verdict.ROLLBACK, author) is TransactionState.COMMIT
        with pytest.raises(TransactionRefusedError, match="settled as ROLLBACK"):
            overtaken(store_bench, Verdict.ROLLBACK, author, wait="published", publish_timeout=60.0)
    else:
        with pytest.raises(TransactionRefusedError, match="its COMMIT was refused: ROLLBACK"):
            overtaken(store_bench, Verdict.ROLLBACK, author)


def test_a_rollback_that_comes_second_lets_the_users_own_exception_through(store_bench: StoreBench) -> None:
    store_bench.coordinator(transaction_timeout=600.0)

    def local(tx: Transaction) -> TransactionState:
        decided(store_bench, tx, Verdict.COMMIT)
        raise RuntimeError("no stock")

    with store_bench.producer() as producer, pytest.raises(RuntimeError, match="no stock"):
        producer.send(store_bench.topic, value=b"v", execute=local)
