"""Scenarios in which a part dies, hangs, moves or has a wrong clock, and nothing may go wrong."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from confluent_kafka import Producer
from transaction_tools import TIMEOUT_S, Bench, child, kill, line_of, unknown

from penstock.transactions import HalfMessage, TransactionState, new_id
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.logs import recovery
from penstock.transactions.wire.half import Half, encode_half
from waiting import wait_until

_HOUR_S = 3600


class OrderedLoad:
    """Sends with `order="half"` and mixed outcomes; knows the visible messages of each key, in order."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.wanted: dict[bytes, list[bytes]] = {}
        self._chance = random.Random(11)  # noqa: S311 - the same mix each time
        self._rolled_back: set[bytes | None] = set()
        self._producer = bench.producer(check=self._check, order="half")
        self._count = 0

    def _check(self, half: HalfMessage) -> TransactionState:
        # Also asked where a decision comes late.
        return TransactionState.ROLLBACK if half.value in self._rolled_back else TransactionState.COMMIT

    def send(self, count: int = 1) -> None:
        """Send so many messages of five keys."""
        for number in range(self._count, self._count + count):
            key, value = b"%d" % (number % 5), b"%d" % number
            outcome = self._chance.choice(("commit", "commit", "rollback", "unknown"))
            if outcome == "rollback":
                self._rolled_back.add(value)
            else:
                self.wanted.setdefault(key, []).append(value)
            with self._producer.transaction(self.bench.topic, key=key, value=value, partition=0) as transaction:
                {"commit": lambda: None, "rollback": transaction.rollback, "unknown": transaction.unknown}[outcome]()
        self._count += count

    def require_published(self) -> None:
        """Wait until as many messages as are wanted can be seen, and judge each key's order."""
        expected = sum(map(len, self.wanted.values()))
        # Not before a dead coordinator's session is over.
        wait_until(lambda: len(self.bench.visible()) >= expected, 120)
        seen: dict[bytes | None, list[bytes | None]] = {}
        for key, value in self.bench.visible():
            seen.setdefault(key, []).append(value)
        assert seen == self.wanted


def killed_coordinator(bench: Bench, where: str, *instance: str) -> OrderedLoad:
    """Have a coordinator killed at that place, in a Kafka transaction that holds several of some keys."""
    load = OrderedLoad(bench)
    load.send(40)
    with child("coordinator_child.py", bench.servers, bench.topics.prefix, where, *instance) as first:
        assert line_of(first) == "started"
        assert line_of(first) == where
        load.send(20)
        kill(first)
    return load


def test_scenario_12_a_coordinator_killed_after_the_target_write_before_the_end_of_its_kafka_transaction(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()
    end = recovery.end_transactions

    def noting_end(context: CoordinatorContext, ids: Iterable[str]) -> set[str]:
        ended = end(context, ids)
        found.update(ended)
        return ended

    monkeypatch.setattr(recovery, "end_transactions", noting_end)
    load = killed_coordinator(bench, "before commit")

    # The fault happened: messages were written, and their transaction is open.
    assert 0 <= bench.ends(bench.topic, "read_committed") < bench.ends(bench.topic, "read_uncommitted")
    bench.coordinator()
    load.send(20)
    load.require_published()
    # It did not wait for the time limit of the transaction that was left open: it ended that itself.
    assert found


def test_scenario_13_a_coordinator_killed_after_the_end_before_its_checkpoint(bench: Bench) -> None:
    load = killed_coordinator(bench, "after commit", "same")

    # The fault happened: the transaction was committed, unknown to the dead. The markers come after the answer.
    written = bench.ends(bench.topic, "read_uncommitted")
    assert written > 0
    wait_until(lambda: bench.ends(bench.topic, "read_committed") == written)
    bench.coordinator(instance="same")
    load.send(20)
    load.require_published()


@pytest.mark.thorough
def test_send_order_per_key_holds_while_coordinators_come_and_go(bench: Bench) -> None:
    load, enough = OrderedLoad(bench), threading.Event()
    running = [bench.coordinator()]

    def send() -> None:
        # At a pace that lets all that happens to the coordinators happen meanwhile.
        while not enough.wait(0.02):
            load.send()

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    for _ in range(3):
        running.append(bench.coordinator())
        wait_until(lambda: running[-1].statistics().partitions > 0)
        running.pop(0).stop()
    enough.set()
    sender.join(60)
    assert not sender.is_alive()

    load.require_published()


def test_scenario_14_a_producer_killed_after_its_local_commit_is_answered_for_by_a_sibling(
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
    # The fault happened: the order is in the database, nothing is visible.
    assert bench.visible() == []

    def check(half: HalfMessage) -> TransactionState:
        connection = sqlite3.connect(file)
        found = connection.execute("SELECT 1 FROM orders WHERE transaction_id = ?", (half.transaction_id,)).fetchone()
        connection.close()
        return TransactionState.COMMIT if found and half.transaction_id == transaction_id else TransactionState.ROLLBACK

    bench.producer(check=check)
    bench.settled(coordinator, committed=1)

    assert bench.visible() == [(b"42", b"order")]


@pytest.mark.usefixtures("logs_are_kept")
@pytest.mark.parametrize("off_s", [-_HOUR_S, _HOUR_S], ids=["behind", "ahead"])
def test_scenario_17_clocks_an_hour_off_make_checks_neither_early_nor_late(
    bench: Bench, off_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked_at = time.time, list[float]()

    def check(asked: HalfMessage) -> TransactionState:
        # The warm one may be asked about again, late.
        if asked.value == b"v":
            asked_at.append(time.monotonic())
        return TransactionState.COMMIT

    # The clock of this process is wrong by an hour, and so are the producer's times.
    monkeypatch.setattr(time, "time", lambda: real() + off_s)
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + off_s) * 1e9))
    coordinator, producer = bench.coordinator(), bench.producer(check=check)
    bench.counted(coordinator, partitions=2)
    producer.send(bench.topic, value=b"warm", execute=unknown)
    bench.settled(coordinator, committed=1)
    half = Half(new_id(), "orders", bench.topic, None, None, b"v", (), None)
    raw = Producer({"bootstrap.servers": bench.servers, "enable.idempotence": True})
    sent = time.monotonic()
    stamp = int((real() + off_s) * 1000)
    raw.produce(bench.topics.half, b"v", None, 0, headers=encode_half(half), timestamp=stamp)
    assert raw.flush(30) == 0
    bench.settled(coordinator, committed=2)

    (stored,) = [m for m in bench.messages(bench.topics.half) if m.value() == b"v"]
    assert abs(stored.timestamp()[1] / 1000 - real()) < _HOUR_S / 2, "the broker gives the birth"
    # An hour early it would come at once; an hour late it would not come in this test.
    assert min(asked_at) - sent >= TIMEOUT_S - 0.05
    assert Counter(bench.visible()) == Counter([(None, b"warm"), (None, b"v")])


def store_halves(bench: Bench, count: int, group: str) -> None:
    """Store halves by hand, as fast as a client can; the first one is `b"0"`, all are in one half partition."""
    raw = Producer(
        {
            "bootstrap.servers": bench.servers,
            "linger.ms": 20,
            "queue.buffering.max.messages": 200_000,
            "enable.idempotence": True,
        }
    )
    for number in range(count):
        half = Half(new_id(), group, bench.topic, None, None, b"%d" % number, (), None)
        raw.produce(bench.topics.half, b"%d" % number, None, 0, headers=encode_half(half))
    assert raw.flush(120) == 0


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(3_000, marks=pytest.mark.thorough),
        pytest.param(50_000, marks=[pytest.mark.chaos, pytest.mark.timeout(600)]),
    ],
)
def test_scenario_18_pending_halves_with_one_checker_hanging_others_proceed_and_the_checkpoint_moves(
    bench: Bench, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if count < 20_000:
        # Whose logs are short has no need to write down again what is pending.
        monkeypatch.setattr("penstock.transactions.core.snapshot.GAP", 1_000)
    monkeypatch.setattr("penstock.transactions.stores.kafka.coordinator.log_upkeep.UPKEEP_S", 0.5)
    release, hanging = threading.Event(), threading.Event()

    def check(half: HalfMessage) -> TransactionState:
        if half.value == b"0":
            hanging.set()
            release.wait(500)
        return TransactionState.COMMIT

    store_halves(bench, count, "orders")
    others = bench.producer("others")
    bench.producer(check=check)
    bench.await_checkers(1)
    # So long that nothing here is asked twice but what is lost.
    coordinator = bench.coordinator(check_interval=30.0)
    assert hanging.wait(120)
    others.send(bench.topic, value=b"of another group")
    bench.counted(coordinator, timeout=500, committed=count)

    assert not release.is_set()
    assert coordinator.statistics().pending == 1
    # The half that hangs was the first: the log below the others' is given up although it is pending.
    wait_until(lambda: len(bench.messages(bench.topics.half)) <= count // 2, 60)
    release.set()
    bench.settled(coordinator, committed=count + 1)
    wanted = {b"of another group", *(b"%d" % number for number in range(count))}
    seen = Counter(value for _, value in bench.visible())
    assert set(seen) == wanted
    assert set(seen.values()) == {1}
