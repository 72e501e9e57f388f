"""Processes that are killed at the worst moment: nothing lost, nothing twice, nothing that was rolled back."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from transaction_tools import Bench, child, kill, line_of

from penstock.transactions import HalfMessage, TransactionState
from penstock.transactions.publisher import InDoubtError, Publisher
from waiting import wait_until


@pytest.mark.parametrize("where", ["before commit", "after commit"])
def test_a_coordinator_killed_around_the_end_of_its_kafka_transaction_loses_and_doubles_nothing(
    bench: Bench, where: str
) -> None:
    producer = bench.producer()
    with child("coordinator_child.py", bench.servers, bench.topics.prefix, where) as first:
        assert line_of(first) == "started"
        for number in range(20):
            producer.send(bench.topic, key=b"%d" % number, value=b"%d" % number)
        with pytest.raises(RuntimeError, match="no"), producer.transaction(bench.topic, value=b"rolled back"):
            raise RuntimeError("no")

        assert line_of(first) == where
        kill(first)

    # The fault happened: messages were written, and their transaction is open, or was committed unknown to the dead.
    written = bench.ends(bench.topic, "read_uncommitted")
    assert written > 0
    if where == "before commit":
        assert bench.ends(bench.topic, "read_committed") < written
    else:
        # The markers come after the answer: that they come shows that there was a commit.
        wait_until(lambda: bench.ends(bench.topic, "read_committed") == written)
    coordinator = bench.coordinator()
    # Not before the dead one's session is over.
    bench.settled(coordinator, timeout=90)
    assert Counter(value for _, value in bench.visible()) == Counter(b"%d" % number for number in range(20))


def test_a_producer_killed_between_local_commit_and_decision_is_settled_by_a_sibling(
    bench: Bench, tmp_path: Path
) -> None:
    file = tmp_path / "orders.db"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE orders (transaction_id TEXT PRIMARY KEY)")
    database.close()
    coordinator = bench.coordinator()
    with child("producer_child.py", bench.servers, bench.topics.prefix, bench.topic, str(file)) as service:
        transaction_id = line_of(service)
        kill(service)
    # The fault happened: the order is in the database, no decision is in the op log, nothing is visible.
    assert bench.messages(bench.topics.op) == []
    assert bench.visible() == []

    def check(half: HalfMessage) -> TransactionState:
        connection = sqlite3.connect(file)
        found = connection.execute("SELECT 1 FROM orders WHERE transaction_id = ?", (half.transaction_id,)).fetchone()
        connection.close()
        return TransactionState.COMMIT if found and half.transaction_id == transaction_id else TransactionState.ROLLBACK

    bench.producer(check=check)
    bench.settled(coordinator, committed=1)

    assert bench.visible() == [(b"42", b"order")]


def test_the_count_of_answered_checks_survives_the_coordinator(bench: Bench) -> None:
    asked: list[int] = []

    def check(half: HalfMessage) -> TransactionState:
        asked.append(half.check_count)
        return TransactionState.UNKNOWN

    producer = bench.producer(check=check)
    first = bench.coordinator(check_max=4)
    producer.send(bench.topic, value=b"v", execute=lambda _: TransactionState.UNKNOWN)
    bench.counted(first, answered_checks=2)
    first.stop()
    second = bench.coordinator(check_max=4)
    bench.settled(second, discarded=1)

    assert first.statistics().answered_checks + second.statistics().answered_checks == 4
    # A check that is slow to be answered is asked again under its number; it counts once.
    assert set(asked) == {0, 1, 2, 3}


@pytest.fixture
def doubtful_ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every third end of a Kafka transaction is in doubt: it was committed, or it was not sent at all."""
    commit, ends = Publisher._commit, []

    def in_doubt(self: Publisher, producer: object) -> None:
        ends.append("known")
        if len(ends) % 3 == 0:
            ends[-1] = "committed" if len(ends) % 2 else "lost"
            if ends[-1] == "committed":
                commit(self, producer)  # type: ignore[arg-type] # passed on as it came
            raise InDoubtError("the answer was lost")
        commit(self, producer)  # type: ignore[arg-type] # passed on as it came

    monkeypatch.setattr(Publisher, "_commit", in_doubt)
    return ends


def test_an_end_in_doubt_is_settled_from_the_done_log(bench: Bench, doubtful_ends: list[str]) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    for number in range(12):
        # One by one, so that there are many Kafka transactions to end.
        producer.send(bench.topic, key=b"%d" % (number % 5), value=b"%d" % number)
        statistics = bench.settled(coordinator, committed=number + 1)

    assert {"committed", "lost"} <= set(doubtful_ends)
    assert statistics.recoveries >= 2
    assert Counter(value for _, value in bench.visible()) == Counter(b"%d" % number for number in range(12))


def test_a_restart_reads_on_from_the_checkpoints_and_the_logs_do_not_grow(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.settling._TEND_S", 0.2)
    first, producer = bench.coordinator(), bench.producer()
    for number in range(50):
        producer.send(bench.topic, key=b"%d" % number, value=b"%d" % number)
    bench.settled(first, committed=50)
    wait_until(lambda: not bench.messages(bench.topics.half) and not bench.messages(bench.topics.op))
    first.stop()

    second = bench.coordinator()
    producer.send(bench.topic, value=b"last")
    statistics = bench.settled(second, committed=1)

    assert (statistics.committed, statistics.refused) == (1, 0)
    assert len(bench.visible()) == 51
    wait_until(lambda: len(bench.messages(bench.topics.done)) <= bench.topics.partitions)
