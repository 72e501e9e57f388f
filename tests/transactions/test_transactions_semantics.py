"""The table of semantics in the design, row by row, on a real broker. Each test is named after its row."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from transaction_tools import INTERVAL_S, TIMEOUT_S, Bench, decide, prepared, unknown

from penstock.errors import HalfNotStoredError
from penstock.transactions import HalfMessage, Outgoing, Transaction, TransactionState
from penstock.transactions.coordinator.publishing.publisher import Publisher
from penstock.transactions.operator.kafka_operator import KafkaAdministration
from penstock.transactions.wire.done_records import decode_done
from penstock.transactions.wire.half import decode_half
from penstock.transactions.wire.ops import Author, Op, Verdict, decode_ops
from waiting import wait_until

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN


@pytest.fixture(autouse=True)
def _logs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing deleted from logs that a slow test has yet to read."""
    monkeypatch.setattr("penstock.transactions.coordinator.partitions.log_upkeep.UPKEEP_S", 600.0)


def ops_of(bench: Bench) -> list[Op]:
    """Return the decisions in the op log."""
    ops = [op for record in bench.messages(bench.topics.op) for op in decode_ops(record.value())]
    return [op for op in ops if op.verdict is not Verdict.TICK]


def ends_of(bench: Bench) -> dict[str, Verdict]:
    """Return how transactions ended, as a committed reader of the done log sees it."""
    notes = [note for record in bench.messages(bench.topics.done) for note in decode_done(record.value()).notes]
    return {note.transaction_id: note.verdict for note in notes if note.verdict is not Verdict.UNKNOWN}


def test_row_half_not_stored(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()
    ran: list[str] = []

    with pytest.raises(HalfNotStoredError, match="did not run"):
        producer.send(bench.topic, value=bytes(2_000_000), execute=lambda tx: ran.append(tx.transaction_id))
    with (
        pytest.raises(HalfNotStoredError, match="did not run"),
        producer.transaction_of([Outgoing(bench.topic, b"small"), Outgoing(bench.topic, bytes(2_000_000))]),
    ):
        ran.append("the second")
    # The first half of the second is stored; of neither is it known to the client that it is not.
    bench.settled(coordinator, rolled_back=1)

    assert ran == []
    assert {(op.verdict, op.author) for op in ops_of(bench)} == {(Verdict.ROLLBACK, Author.PRODUCER)}
    assert bench.visible() == []


class Listener:
    """A local transaction that ends as it is told, and is never known to a check."""

    def execute_local_transaction(self, message: HalfMessage, argument: object) -> TransactionState | None:
        assert message.check_count == 0
        if argument == "raise":
            raise RuntimeError("no stock")
        assert isinstance(argument, TransactionState)
        return argument

    def check_local_transaction(self, half: HalfMessage) -> TransactionState:
        assert half.value
        return UNKNOWN


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_row_states(bench: Bench, raises: bool) -> None:
    # No coordinator runs: what is in the op log was written by the producer.
    producer = bench.producer(listener=Listener())
    if raises:
        with pytest.raises(RuntimeError, match="no stock"), producer.transaction(bench.topic, value=b"v"):
            raise RuntimeError("no stock")
        assert producer.send_in_transaction(Outgoing(bench.topic, b"v"), "raise").state is UNKNOWN
        assert [op.verdict for op in ops_of(bench)] == [Verdict.ROLLBACK]
        return
    stored: list[TransactionState] = []
    for state in (COMMIT, ROLLBACK, UNKNOWN):

        def execute(_: Transaction, state: TransactionState = state) -> TransactionState:
            return state

        stored.append(producer.send(bench.topic, key=b"k", value=b"v", execute=execute).state)
        stored.append(producer.send_in_transaction(Outgoing(bench.topic, b"v", b"k"), state).state)

    assert stored == [COMMIT, COMMIT, ROLLBACK, ROLLBACK, UNKNOWN, UNKNOWN]
    assert [op.verdict for op in ops_of(bench)] == [Verdict.COMMIT] * 2 + [Verdict.ROLLBACK] * 2


def test_row_decision(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    stored = prepared(bench.producer(), bench.topic)
    sent = bench.producer().send(bench.topic, value=b"durable")

    # Durable once it is acknowledged: it is in the log before any coordinator runs.
    assert [op.transaction_id for op in ops_of(bench)] == [sent.transaction_id]
    decide(bench, stored, Verdict.COMMIT)
    decide(bench, stored, Verdict.ROLLBACK)
    decide(bench, stored, Verdict.COMMIT)
    statistics = bench.settled(bench.coordinator(transaction_timeout=600), committed=2, refused=2)

    assert (statistics.rolled_back, statistics.refused) == (0, 2)
    assert "the first decision stands" in caplog.text
    assert Counter(bench.visible()) == Counter([(None, b"v"), (None, b"durable")])


def test_row_commit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = bench.topics.half, bench.topics.op
    commit, go_on, halted = Publisher._commit, threading.Event(), threading.Event()
    holding = threading.Event()

    def halting(self: Publisher) -> None:
        if holding.is_set() and not halted.is_set():
            halted.set()
            go_on.wait(50)
        commit(self)

    # Time for all looks while the Kafka transaction is open, on a slow machine, too.
    monkeypatch.setattr("penstock.clients.transactional.producer_settings.TRANSACTION_TIMEOUT_MS", 60_000)
    monkeypatch.setattr("penstock.transactions.coordinator.publishing.publisher_slot.PUBLISH_LIMIT_S", 60.0)
    # Nor does a Kafka transaction of positions alone come in between.
    monkeypatch.setattr("penstock.transactions.coordinator.partitions.half_partition._IDLE_S", 600.0)
    monkeypatch.setattr(Publisher, "_commit", halting)
    coordinator, producer = bench.coordinator(), bench.producer()
    producer.send(bench.topic, key=b"k", value=b"first")
    bench.settled(coordinator, committed=1)
    # The group tells positions once their marker is written, which the end of the transaction does not wait for.
    wait_until(lambda: max(bench.positions("read_uncommitted", *logs)) > 0)
    before = bench.positions("read_uncommitted", *logs)
    holding.set()

    result = producer.send(bench.topic, key=b"k", value=b"second")
    assert halted.wait(30)
    written = bench.messages(isolation="read_uncommitted")
    visible_then = bench.ends(bench.topic, "read_committed")
    done_then = bench.ends(bench.topics.done, "read_committed")
    done_written = bench.ends(bench.topics.done, "read_uncommitted")
    positions_then = bench.positions("read_uncommitted", *logs)
    go_on.set()
    bench.settled(coordinator, committed=2)

    # Message and completion were written, the positions too, and nothing of it counted before all of it did.
    assert [message.value() for message in written] == [b"first", b"second"]
    assert (visible_then < bench.ends(bench.topic, "read_committed"), done_then < done_written) == (True, True)
    assert positions_then == before
    assert [value for _, value in bench.visible()] == [b"first", b"second"]
    assert ends_of(bench)[result.transaction_id] is Verdict.COMMIT
    assert sum(bench.positions("read_committed", *logs)) >= sum(before) + 2


def test_row_rollback(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    with producer.transaction(bench.topic, value=b"v") as tx:
        tx.rollback()
    bench.settled(coordinator, rolled_back=1)

    assert bench.messages(isolation="read_uncommitted") == []
    assert ends_of(bench) == {tx.transaction_id: Verdict.ROLLBACK}


def test_row_undecided(bench: Bench) -> None:
    asked: list[tuple[int, float]] = []

    def check(half: HalfMessage) -> TransactionState:
        asked.append((half.check_count, time.monotonic()))
        return UNKNOWN

    coordinator = bench.coordinator(check_max=3)
    silent = bench.producer()
    sent = time.monotonic()
    silent.send(bench.topic, value=b"v", execute=unknown)
    # Nobody answers: no check counts, and the alarm is raised.
    waiting = bench.counted(coordinator, no_producer=3)
    assert (waiting.checks, waiting.answered_checks) == (0, 0)
    assert time.monotonic() - sent >= TIMEOUT_S
    bench.producer(check=check)
    statistics = bench.settled(coordinator, discarded=1)

    assert statistics.answered_checks == 3
    first = {count: min(at for number, at in asked if number == count) for count in range(3)}
    assert set(first) == {number for number, _ in asked}
    # The broker stamps in whole milliseconds.
    assert min(first[1] - first[0], first[2] - first[1]) >= INTERVAL_S - 0.05


def test_row_who_answers(bench: Bench) -> None:
    answered: list[tuple[str, str]] = []
    busy, most = Counter[str](), Counter[str]()
    lock = threading.Lock()

    def checker(name: str) -> Callable[[HalfMessage], TransactionState]:
        def check(half: HalfMessage) -> TransactionState:
            with lock:
                answered.append((name, half.transaction_id))
                busy[name] += 1
                most[name] = max(most[name], busy[name])
            # A slow check: so that one worker has several at a time, if it may.
            time.sleep(0.01)
            with lock:
                busy[name] -= 1
            return COMMIT

        return check

    sender = bench.producer()
    for name in ("first", "second"):
        bench.producer(check=checker(name), check_workers=2)
    ids = [sender.send(bench.topic, key=b"%d" % n, value=b"v", execute=unknown).transaction_id for n in range(60)]
    bench.await_checkers(2)
    coordinator = bench.coordinator(check_interval=30)
    bench.settled(coordinator, committed=60)

    # Both took part, each was asked once, and nobody ran more checks at a time than it has workers.
    assert {name for name, _ in answered} == {"first", "second"}
    assert Counter(identity for _, identity in answered) == Counter(ids)
    assert max(most.values()) <= 2


def test_row_immunity(bench: Bench) -> None:
    immunity = TIMEOUT_S + 3 * INTERVAL_S
    asked: list[tuple[bytes | None, int, float]] = []

    def check(half: HalfMessage) -> TransactionState:
        asked.append((half.value, half.check_count, time.time()))
        return UNKNOWN

    coordinator, producer = bench.coordinator(check_max=1), bench.producer(check=check)

    sent = time.time()
    producer.send(bench.topic, value=b"immune", check_immunity=immunity, execute=unknown)
    producer.send(bench.topic, value=b"plain", execute=unknown)
    statistics = bench.settled(coordinator, discarded=2)

    # The broker's clock, which gives the birth, is this machine's, in whole milliseconds.
    assert min(at for value, _, at in asked if value == b"immune") >= sent + immunity - 0.01
    assert min(at for value, _, at in asked if value == b"plain") >= sent + TIMEOUT_S - 0.01
    assert {(value, count) for value, count, _ in asked} == {(b"immune", 0), (b"plain", 0)}
    assert statistics.answered_checks == 2


@pytest.mark.parametrize("policy", ["topic", "commit", "rollback", "call"])
def test_row_exhausted(bench: Bench, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    called: list[HalfMessage] = []

    def call(half: HalfMessage) -> TransactionState:
        called.append(half)
        return ROLLBACK

    answers = [UNKNOWN]
    coordinator = bench.coordinator(check_max=2, discard=call if policy == "call" else policy)
    producer = bench.producer(check=lambda _: answers[-1])

    result = producer.send(bench.topic, value=b"v", execute=unknown)
    counted = {"topic": "discarded", "commit": "committed", "rollback": "rolled_back", "call": "rolled_back"}[policy]
    statistics = bench.settled(coordinator, **{counted: 1})

    assert statistics.answered_checks == 2
    becomes = {"topic": "moved to the discarded topic", "commit": "published"}.get(policy, "rolled back")
    said = f"{result.transaction_id} of group orders is undecided after 2 checks: by the discard policy it is"
    assert f"{said} {becomes}" in caplog.text
    assert {half.check_count for half in called} == ({2} if policy == "call" else set())
    assert bench.visible() == ([(None, b"v")] if policy == "commit" else [])
    if policy != "topic":
        assert bench.messages(bench.topics.discarded) == []
        return
    assert bench.visible(bench.topics.discarded) == [(None, b"v")]
    answers.append(COMMIT)
    with KafkaAdministration(bench.servers, bench.topics.prefix) as store:
        store.resume(result.transaction_id, "a test")
    bench.settled(coordinator, committed=1)
    assert bench.visible() == [(None, b"v")]


def test_row_check_state(bench: Bench) -> None:
    late = threading.Event()

    def check(half: HalfMessage) -> TransactionState:
        if half.check_count == 3:
            late.set()
        return UNKNOWN

    coordinator, producer = bench.coordinator(check_max=1_000), bench.producer(check=check)
    with producer.transaction(bench.topic, value=b"v") as tx:
        assert tx._flight is not None
        (before,) = bench.messages(bench.topics.half)
        assert late.wait(60)
        (after,) = bench.messages(bench.topics.half)
    statistics = bench.settled(coordinator, committed=1)

    # After three checks the half stands where it stood, and the late decision names that place.
    assert (before.partition(), before.offset()) == (after.partition(), after.offset())
    decision = next(op for op in ops_of(bench) if op.verdict is Verdict.COMMIT)
    assert decision.half_offsets == (before.offset(),)
    assert (statistics.refused, statistics.answered_checks >= 3) == (0, True)
    assert bench.visible() == [(None, b"v")]


def test_row_late_decision(bench: Bench) -> None:
    coordinator = bench.coordinator(check_max=1)
    producer = bench.producer(check=lambda _: UNKNOWN)

    # After discard: refused. (Racing a check: scenario 10.)
    with producer.transaction(bench.topic, value=b"v"):
        bench.settled(coordinator, discarded=1)
    statistics = bench.counted(coordinator, refused=1)

    assert (statistics.committed, statistics.discarded) == (0, 1)
    assert bench.visible() == []


def test_row_unknown_id_wrong_group_forged_header(bench: Bench) -> None:
    coordinator = bench.coordinator(transaction_timeout=600)
    producer = bench.producer()
    stored = prepared(producer, bench.topic)

    decide(bench, stored, Verdict.COMMIT, transaction_id="018f4e9c-5c1e-7abc-8def-0123456789ab")
    decide(bench, stored, Verdict.COMMIT, group="others")
    bench.write(bench.topics.half, 0, None, b"forged", [("penstock-tx", b"nonsense")])
    waiting = bench.counted(coordinator, refused=2, forged=1)
    assert (waiting.pending, waiting.committed) == (1, 0)
    decide(bench, stored, Verdict.COMMIT)
    bench.settled(coordinator, committed=1)

    assert bench.visible() == [(None, b"v")]


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_row_several_messages(bench: Bench, new_topic: Callable[..., str], commits: bool) -> None:
    coordinator, producer, other = bench.coordinator(), bench.producer(), new_topic()

    with producer.transaction_of() as tx:
        tx.add(bench.topic, key=b"a", value=b"1")
        tx.add(other, key=b"b", value=b"2")
        tx.add(bench.topic, key=b"c", value=b"3")
        tx.prepare()
        if not commits:
            tx.rollback()
    statistics = bench.settled(coordinator, committed=int(commits), rolled_back=int(not commits))

    assert (statistics.committed, statistics.groups) == ((1, 1) if commits else (0, statistics.groups))
    assert Counter(bench.visible()) == Counter([(b"a", b"1"), (b"c", b"3")] if commits else [])
    assert bench.visible(other) == ([(b"b", b"2")] if commits else [])


def test_row_delayed(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()
    bench.counted(coordinator, partitions=2)
    due = time.time() + 8

    result = producer.send(bench.topic, value=b"later", deliver_at=due)
    producer.send(bench.topic, value=b"now")
    bench.counted(coordinator, committed=1, delayed=1)
    # Committed now: the decision is stored, and no check asks for it.
    assert result.state is COMMIT
    bench.settled(coordinator, committed=2)

    late = next(message for message in bench.messages() if message.value() == b"later")
    assert late.timestamp()[1] >= due * 1000 - 50
    assert coordinator.statistics().checks == 0


@pytest.mark.parametrize("order", ["commit", "half"])
def test_row_order(bench: Bench, order: str) -> None:
    coordinator, producer = bench.coordinator(transaction_timeout=600), bench.producer(order=order)
    first = producer.transaction(bench.topic, key=b"k", value=b"first")

    with first:
        for number in range(20):
            producer.send(bench.topic, key=b"k", value=b"%d" % number)
        producer.send(bench.topic, key=b"other", value=b"free")
        bench.counted(coordinator, committed=21 if order == "commit" else 1)
        held = bench.counted(coordinator, held_by_key=20).held_by_key if order == "half" else 0
    bench.settled(coordinator, committed=22)

    later = [b"%d" % number for number in range(20)]
    seen = [value for key, value in bench.visible() if key == b"k"]
    assert seen == ([*later, b"first"] if order == "commit" else [b"first", *later])
    assert held == (20 if order == "half" else 0)


def test_row_clocks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    monkeypatch.setattr(time, "time_ns", lambda: int((real() - 3600) * 1e9))
    coordinator, producer = bench.coordinator(), bench.producer()

    before = real()
    stored = prepared(producer, bench.topic)
    after = real()
    age = wait_until(lambda: coordinator.statistics().oldest_pending_age)

    (record,) = [m for m in bench.messages(bench.topics.half) if m.offset() == stored.offsets[0]]
    assert decode_half(record.key(), record.value(), record.headers()).value == b"v"
    # Born when the broker appended it, and as old as the broker's time says, whatever this process takes for the time.
    assert before - 0.05 <= record.timestamp()[1] / 1000 <= after + 0.05
    assert age <= real() - before + 0.05
