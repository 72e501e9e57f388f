"""The barrier with a store: only the database decides, whatever the local transaction raised."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
from transaction_tools import Bench

from penstock.transactions import (
    FileStore,
    TransactionalProducer,
    TransactionState,
    barrier,
    barrier_check,
    create_barrier_table,
)


class AnswerLostError(Exception):
    """A connection that breaks while the answer to COMMIT is on its way."""


def test_a_commit_that_raised_though_it_took_hold_is_published_and_one_that_did_not_is_rolled_back(
    bench: Bench, tmp_path: Path
) -> None:
    connect = partial(sqlite3.connect, tmp_path / "shop.db")
    with closing(connect()) as connection:
        create_barrier_table(connection)
    producer = bench.producer(check=barrier_check(connect))
    results = []

    def order(value: bytes, *, commit: bool) -> None:
        with closing(connect()) as connection, producer.transaction(bench.topic, value=value) as transaction:
            results.append(transaction)
            barrier(connection, transaction)
            if commit:
                connection.commit()
            raise AnswerLostError

    for value, commit in ((b"took hold", True), (b"did not", False)):
        with pytest.raises(AnswerLostError):
            order(value, commit=commit)
    bench.settled(bench.coordinator(), committed=1, rolled_back=1)

    assert [result.result.state for result in results] == [TransactionState.UNKNOWN] * 2
    assert [value for _, value in bench.visible()] == [b"took hold"]


def test_who_knows_that_nothing_was_committed_rolls_back_behind_a_barrier(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        create_barrier_table(connection)
        store = FileStore(str(tmp_path / "store"), bootstrap_servers="127.0.0.1:1")
        with (
            TransactionalProducer("shop", store=store) as producer,
            suppress(ValueError),
            producer.transaction("orders", value=b"") as transaction,
        ):
            barrier(connection, transaction)
            transaction.rollback()
            raise ValueError

    assert transaction.result.state is TransactionState.ROLLBACK
