"""What must never go wrong with transactional messages, scenario by scenario, on a real broker."""

from __future__ import annotations

import random
import sqlite3
import struct
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from transaction_tools import TIMEOUT_S, Bench, child, decide, kill, line_of, prepared, unknown

from penstock.transactions import Coordinator, HalfMessage, Transaction, TransactionState, new_id
from penstock.transactions.coordinator.partitions.log_feed import LogFeed
from penstock.transactions.coordinator.state.broker_clock import BrokerClock
from penstock.transactions.stores.kafka.store import StoredHalves
from penstock.transactions.wire.half import Half, encode_half
from penstock.transactions.wire.ops import Author, Op, Verdict, encode_op
from waiting import wait_until

_HOUR_S = 3600


@pytest.fixture
def silent(bench: Bench) -> Coordinator:
    """A coordinator that asks nobody during the test."""
    return bench.coordinator(transaction_timeout=600)


def test_scenario_01_a_commit_is_visible_once(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    with producer.transaction(bench.topic, key=b"k", value=b"v", headers={"a": b"1", "none": None}):
        assert bench.visible() == []
    bench.settled(coordinator, committed=1)

    (message,) = bench.messages()
    assert (message.key(), message.value(), message.headers()) == (b"k", b"v", [("a", b"1"), ("none", None)])


def test_scenario_02_a_rollback_is_never_visible(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    with pytest.raises(RuntimeError, match="no stock"), producer.transaction(bench.topic, value=b"v"):
        raise RuntimeError("no stock")
    bench.settled(coordinator, rolled_back=1)

    # Nor was it ever written and then aborted.
    assert bench.messages(isolation="read_uncommitted") == []
    assert producer.statistics().rolled_back == 1


def test_scenario_03_unknown_is_committed_by_a_check(bench: Bench) -> None:
    asked: list[HalfMessage] = []

    def check(half: HalfMessage) -> TransactionState:
        asked.append(half)
        return TransactionState.COMMIT

    coordinator, producer = bench.coordinator(), bench.producer(check=check)

    result = producer.send(bench.topic, key=b"k", value=b"v", headers=[("h", b"1")], execute=unknown)
    bench.settled(coordinator, committed=1)

    assert result.state is TransactionState.UNKNOWN
    # A check that is slow to be answered is asked again under its number.
    assert set(asked) == {HalfMessage(bench.topic, b"k", b"v", (("h", b"1"),), result.transaction_id, 0)}
    assert bench.visible() == [(b"k", b"v")]


def test_scenario_04_unknown_is_rolled_back_by_a_check(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer(check=lambda _: TransactionState.ROLLBACK)

    producer.send(bench.topic, value=b"v", execute=unknown)
    bench.settled(coordinator, rolled_back=1)

    assert bench.visible() == []


@pytest.mark.parametrize("broken", [False, True], ids=["unknown", "raising"])
def test_scenario_05_always_unknown_is_discarded_after_exactly_15_answered_checks(
    bench: Bench, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Time to read the op log between two checks; it bounds how fast they can follow each other.
    monkeypatch.setattr("penstock.transactions.coordinator.checks.check_scheduler._TICK_S", 0.05)
    counts: list[int] = []

    def check(half: HalfMessage) -> TransactionState:
        counts.append(half.check_count)
        if broken:
            raise RuntimeError("the database is down")
        return TransactionState.UNKNOWN

    coordinator, producer = bench.coordinator(check_interval=0.05), bench.producer(check=check)

    result = producer.send(bench.topic, key=b"k", value=b"v", execute=unknown)
    statistics = bench.settled(coordinator, discarded=1)

    # A check that is slow to be answered is asked again under its number; it counts once.
    assert set(counts) == set(range(15))
    assert (statistics.answered_checks, statistics.committed) == (15, 0)
    assert bench.visible() == []
    (discarded,) = bench.messages(bench.topics.discarded)
    assert (discarded.key(), discarded.value()) == (b"k", b"v")
    headers = dict(discarded.headers())
    assert headers["penstock-tx"] == result.transaction_id.encode()
    assert headers["penstock-topic"] == bench.topic.encode()
    assert headers["penstock-reason"] == b"checks exhausted"


def test_scenario_06_120_messages_with_a_five_way_mix_of_outcomes(bench: Bench) -> None:
    def check(half: HalfMessage) -> TransactionState:
        # The first two were decided by the producer; where a check overtakes that, it must say the same.
        said = {0: TransactionState.COMMIT, 1: TransactionState.ROLLBACK, 2: TransactionState.COMMIT}
        said[3] = TransactionState.ROLLBACK
        return said.get(int(half.value or b"") % 5, TransactionState.UNKNOWN)

    coordinator, producer = bench.coordinator(check_max=2), bench.producer(check=check)

    for number in range(120):
        with producer.transaction(bench.topic, key=b"%d" % (number % 7), value=b"%d" % number) as tx:
            if number % 5 == 1:
                tx.rollback()
            elif number % 5:
                tx.unknown()
    statistics = bench.settled(coordinator, committed=48, rolled_back=48, discarded=24)

    assert (statistics.committed, statistics.rolled_back, statistics.discarded) == (48, 48, 24)
    assert Counter(value for _, value in bench.visible()) == Counter(b"%d" % n for n in range(120) if n % 5 in (0, 2))
    discarded = Counter(value for _, value in bench.visible(bench.topics.discarded))
    assert discarded == Counter(b"%d" % n for n in range(120) if n % 5 == 4)


def test_scenario_07_a_duplicate_commit_makes_one_message(bench: Bench, silent: Coordinator) -> None:
    stored = prepared(bench.producer(), bench.topic)

    decide(bench, stored, Verdict.COMMIT)
    decide(bench, stored, Verdict.COMMIT)
    bench.settled(silent, committed=1, refused=1)

    assert bench.visible() == [(None, b"v")]


@pytest.mark.parametrize("settled_first", [False, True], ids=["at once", "long after"])
def test_scenario_08_a_commit_after_a_rollback_is_refused(
    bench: Bench, silent: Coordinator, settled_first: bool
) -> None:
    stored = prepared(bench.producer(), bench.topic)

    decide(bench, stored, Verdict.ROLLBACK)
    if settled_first:
        bench.settled(silent, rolled_back=1)
    decide(bench, stored, Verdict.COMMIT)
    statistics = bench.settled(silent, refused=1)

    assert (statistics.committed, statistics.rolled_back) == (0, 1)
    assert bench.visible() == []


@pytest.mark.parametrize("settled_first", [False, True], ids=["at once", "long after"])
def test_scenario_09_a_rollback_after_a_commit_is_refused(
    bench: Bench, silent: Coordinator, settled_first: bool
) -> None:
    stored = prepared(bench.producer(), bench.topic)

    decide(bench, stored, Verdict.COMMIT)
    if settled_first:
        bench.settled(silent, committed=1)
    decide(bench, stored, Verdict.ROLLBACK)
    statistics = bench.settled(silent, refused=1)

    assert (statistics.committed, statistics.rolled_back) == (1, 0)
    assert bench.visible() == [(None, b"v")]


def test_scenario_10_a_late_commit_that_races_a_check_makes_one_message(bench: Bench) -> None:
    """The producer decides while its half is being checked: ten times just before the answer, ten times just after."""
    leave = {number: threading.Event() for number in range(20)}
    left = {number: threading.Event() for number in range(20)}

    def check(half: HalfMessage) -> TransactionState:
        number = int(half.value or b"")
        leave[number].set()
        if number % 2:
            left[number].wait(60)
        return TransactionState.COMMIT

    coordinator, producer = bench.coordinator(), bench.producer(check=check, check_workers=8)

    def late(number: int) -> None:
        with producer.transaction(bench.topic, key=b"%d" % number, value=b"%d" % number):
            leave[number].wait(60)
        left[number].set()

    threads = [threading.Thread(target=late, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    # Both decisions of each were stored; the one that came second was refused. A check that was asked twice is a third.
    statistics = bench.settled(coordinator, committed=20, refused=20)

    assert statistics.committed == 20
    assert Counter(value for _, value in bench.visible()) == Counter(b"%d" % number for number in range(20))


@pytest.mark.parametrize(
    "wrong",
    [{"group": "others"}, {"half_offsets": (0, 1)}, {"author": Author.OPERATOR, "group": "x"}, {"transaction_id": ""}],
    ids=["another group", "other offsets", "a stranger as an operator", "an unknown id"],
)
def test_scenario_11_a_decision_for_an_unknown_id_or_of_another_group_is_refused(
    bench: Bench, silent: Coordinator, wrong: dict[str, Any]
) -> None:
    stored = prepared(bench.producer(), bench.topic)
    if "transaction_id" in wrong:
        wrong = {"transaction_id": new_id()}

    decide(bench, stored, Verdict.ROLLBACK, **wrong)
    waiting = bench.counted(silent, refused=1)
    assert (waiting.pending, waiting.rolled_back) == (1, 0)
    decide(bench, stored, Verdict.COMMIT)
    statistics = bench.settled(silent, committed=1, refused=1)

    assert statistics.rolled_back == 0
    assert bench.visible() == [(None, b"v")]


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


def test_scenario_20_records_forged_by_hand_are_refused_and_counted(bench: Bench, silent: Coordinator) -> None:
    producer = bench.producer()
    stored = prepared(producer, bench.topic)
    half = stored.halves[0]
    good = [
        ("penstock-tx", new_id().encode()),
        ("penstock-group", b"orders"),
        ("penstock-topic", bench.topic.encode()),
    ]
    forged: list[list[tuple[str, bytes | None]]] = [
        [],
        [("penstock-tx", b"\xff\xfe")],
        [*good, ("penstock-tx", new_id().encode())],
        [*good, ("penstock-part", b"3/2")],
        [*good, ("penstock-partition", b"-1")],
        [*good, ("penstock-check-immunity-ms", b"9" * 30)],
        [good[0], good[1], ("penstock-topic", bench.topics.op.encode())],
        [good[0], good[1], ("penstock-topic", b"__consumer_offsets")],
        [good[0], good[1], ("penstock-topic", b"no topic at all!")],
        # Another half under the id of a pending one.
        [("penstock-tx", half.transaction_id.encode()), *good[1:]],
    ]

    for headers in forged:
        bench.write(bench.topics.half, stored.partition, b"k", b"forged", headers)
    for value in (None, b"", b"\x01", struct.pack(">I", 7) * 40, encode_op(_op(stored))[:-1]):
        bench.write(bench.topics.op, stored.partition, None, value)
    # It claims to belong to another half partition than the one it stands in.
    decide(bench, stored, Verdict.ROLLBACK, half_partition=stored.partition + 1)
    decide(bench, stored, Verdict.COMMIT)
    producer.send(bench.topic, value=b"after")
    statistics = bench.settled(silent, committed=2, forged=len(forged) + 6)

    assert (statistics.forged, statistics.rolled_back) == (len(forged) + 6, 0)
    assert sorted(bench.visible()) == [(None, b"after"), (None, b"v")]


def _op(stored: StoredHalves) -> Op:
    half = stored.halves[0]
    return Op(half.transaction_id, Verdict.COMMIT, Author.PRODUCER, half.group, stored.partition, stored.offsets, 0)
