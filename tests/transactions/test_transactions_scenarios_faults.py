"""What must never go wrong where something dies, hangs, moves or has a wrong clock, scenario by scenario."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from transaction_tools import TIMEOUT_S, Bench, child, kill, line_of, unknown

from penstock.transactions import HalfMessage, Transaction, TransactionState, new_id
from penstock.transactions.coordinator.partitions.log_feed import LogFeed
from penstock.transactions.coordinator.state.broker_clock import BrokerClock
from penstock.transactions.wire.half import Half, encode_half
from waiting import wait_until

_HOUR_S = 3600


def killed_coordinator(bench: Bench, where: str) -> None:
    """Commit 20 messages and roll one back under a coordinator that is killed at that place."""
    producer = bench.producer()
    with child("coordinator_child.py", bench.servers, bench.topics.prefix, where) as first:
        assert line_of(first) == "started"
        for number in range(20):
            producer.send(bench.topic, key=b"%d" % number, value=b"%d" % number)
        with pytest.raises(RuntimeError, match="no"), producer.transaction(bench.topic, value=b"rolled back"):
            raise RuntimeError("no")
        assert line_of(first) == where
        kill(first)


def successor_settles(bench: Bench) -> None:
    """Start another coordinator; nothing is lost, nothing is there twice, nothing that was rolled back."""
    # Not before the dead one's session is over.
    bench.settled(bench.coordinator(), timeout=90)
    assert Counter(value for _, value in bench.visible()) == Counter(b"%d" % number for number in range(20))


def test_scenario_12_a_coordinator_killed_after_the_target_write_before_the_end_of_its_kafka_transaction(
    bench: Bench,
) -> None:
    killed_coordinator(bench, "before commit")

    # The fault happened: messages were written, and their transaction is open.
    written = bench.ends(bench.topic, "read_uncommitted")
    assert 0 <= bench.ends(bench.topic, "read_committed") < written
    successor_settles(bench)


def test_scenario_13_a_coordinator_killed_after_the_end_before_its_checkpoint(bench: Bench) -> None:
    killed_coordinator(bench, "after commit")

    # The fault happened: the transaction was committed, unknown to the dead. The markers come after the answer.
    written = bench.ends(bench.topic, "read_uncommitted")
    assert written > 0
    wait_until(lambda: bench.ends(bench.topic, "read_committed") == written)
    successor_settles(bench)


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


def test_scenario_15_a_group_down_longer_than_15_intervals_is_delivered_when_it_is_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.coordinator.checks.check_scheduler._TICK_S", 0.05)
    interval_s = 0.05
    coordinator = bench.coordinator(check_interval=interval_s)
    down = bench.producer()
    for number in range(5):
        down.send(bench.topic, value=b"%d" % number, execute=unknown)
    down.stop()

    # More often than checks may be answered nobody was there.
    waiting = bench.counted(coordinator, no_producer=5 * 16)
    assert (waiting.checks, waiting.answered_checks, waiting.pending, waiting.discarded) == (0, 0, 5, 0)
    bench.producer(check=lambda _: TransactionState.COMMIT)
    bench.settled(coordinator, committed=5)

    assert Counter(value for _, value in bench.visible()) == Counter(b"%d" % number for number in range(5))


class _Later:
    """A record as a broker would have stamped it whose clock is ahead."""

    def __init__(self, record: Any, by_s: float) -> None:
        self._record, self._by_ms = record, int(by_s * 1000)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._record, name)

    def timestamp(self) -> tuple[int, int]:
        kind, at_ms = self._record.timestamp()
        return kind, at_ms + self._by_ms


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """By how many seconds the broker's time, as coordinators read it from now on, is moved on: a list of one."""
    ahead, half, op = [0.0], LogFeed.half, LogFeed.op

    def later(record: Any) -> Any:
        return _Later(record, ahead[0])

    monkeypatch.setattr(LogFeed, "half", lambda own, record, now: half(own, later(record), now))
    monkeypatch.setattr(LogFeed, "op", lambda own, record, now: op(own, later(record), now))
    marked = BrokerClock.marked
    monkeypatch.setattr(
        BrokerClock,
        "marked",
        lambda own, ms, sent, acknowledged: marked(own, ms + int(ahead[0] * 1000), sent, acknowledged),
    )
    return ahead


def test_scenario_16_an_immunity_of_600_s_no_check_before_and_all_checks_after(
    bench: Bench, moved: list[float]
) -> None:
    asked: Counter[bytes | None] = Counter()

    def check(half: HalfMessage) -> TransactionState:
        asked[half.value] += 1
        return TransactionState.UNKNOWN if (half.value or b"").startswith(b"immune") else TransactionState.COMMIT

    def plain_is_checked(name: bytes) -> None:
        # What has no immunity is asked about: so would be all else that is due.
        producer.send(bench.topic, value=name, execute=unknown)
        wait_until(lambda: asked[name])

    coordinator, producer = bench.coordinator(check_max=3), bench.producer(check=check)
    for number in range(10):
        producer.send(bench.topic, value=b"immune %d" % number, check_immunity=600, execute=unknown)

    plain_is_checked(b"at once")
    moved[0] = 540.0
    plain_is_checked(b"after nine minutes")
    assert set(asked) == {b"at once", b"after nine minutes"}
    moved[0] = 601.0
    statistics = bench.settled(coordinator, discarded=10, committed=2)

    # None of them was spent on the time of immunity.
    assert statistics.answered_checks == 10 * 3 + 2
    assert {asked[b"immune %d" % number] >= 3 for number in range(10)} == {True}


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

    # Whoever asks this process for the time is wrong by an hour, and so is what the producer writes.
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


@pytest.mark.parametrize("count", [3_000, pytest.param(50_000, marks=[pytest.mark.chaos, pytest.mark.timeout(600)])])
def test_scenario_18_pending_halves_with_one_checker_hanging_others_proceed_and_the_checkpoint_moves(
    bench: Bench, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if count < 20_000:
        # Whose logs are short has no need to write down again what is pending.
        monkeypatch.setattr("penstock.transactions.coordinator.partitions.half_partition.GAP", 1_000)
    monkeypatch.setattr("penstock.transactions.coordinator.partitions.log_upkeep.UPKEEP_S", 0.5)
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


def test_scenario_19_keyed_order_under_mixed_outcomes_across_coordinator_rebalances(bench: Bench) -> None:
    chance = random.Random(19)  # noqa: S311 - the same mix each time
    answers: dict[bytes | None, TransactionState] = {}
    producer = bench.producer(check=lambda half: answers[half.value], order="half")
    running = [bench.coordinator()]
    bench.counted(running[0], partitions=2)
    rebalances = 0
    wanted: dict[bytes, list[bytes]] = {b"%d" % key: [] for key in range(6)}

    def send(number: int) -> None:
        key, value = b"%d" % chance.randrange(6), b"%d" % number
        commits = chance.random() < 0.6
        answers[value] = TransactionState.COMMIT if commits else TransactionState.ROLLBACK
        state = TransactionState.UNKNOWN if chance.random() < 0.3 else answers[value]

        def execute(_: Transaction) -> TransactionState:
            return state

        producer.send(bench.topic, key=key, value=value, execute=execute)
        if commits:
            wanted[key].append(value)

    for wave in range(4):
        for number in range(wave * 40, wave * 40 + 40):
            send(number)
        # One more coordinator shares the work, or one of two leaves it to the other.
        if len(running) == 1:
            running.append(bench.coordinator())
            wait_until(lambda: [one.statistics().partitions for one in running] == [1, 1], 60)
        else:
            running.pop(0).stop()
            wait_until(lambda: running[0].statistics().partitions == 2, 60)
        rebalances += 1

    expected = sum(map(len, wanted.values()))
    wait_until(lambda: len(bench.visible()) >= expected, 90)
    assert rebalances == 4
    seen: dict[bytes | None, list[bytes | None]] = {key: [] for key in wanted}
    for key, value in bench.visible():
        seen[key].append(value)
    assert seen == wanted
