"""A store in Kafka beyond the suite of all stores: its logs, its checks, and coordinators that share it."""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from transaction_tools import Bench, decide, ops_of, prepared, unknown

from kafka_proxy import KafkaProxy
from penstock.clients.transactional.settings import Pace
from penstock.transactions import HalfMessage, TransactionState, new_id
from penstock.transactions.publishing.publisher import Publisher
from penstock.transactions.wire.done_records import decode_done
from penstock.transactions.wire.ops import Author, Op, Verdict, encode_op
from waiting import wait_until

COMMIT, UNKNOWN = TransactionState.COMMIT, TransactionState.UNKNOWN

pytestmark = pytest.mark.usefixtures("logs_are_kept")


def test_message_completion_and_positions_take_effect_in_one_kafka_transaction(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = bench.topics.half, bench.topics.op
    commit, go_on, halted = Publisher._commit, threading.Event(), threading.Event()
    holding = threading.Event()

    def halting(self: Publisher) -> None:
        if holding.is_set() and not halted.is_set():
            halted.set()
            go_on.wait(50)
        commit(self)

    # Time for all looks while the Kafka transaction is open, on a slow machine, too.
    monkeypatch.setattr(Pace, "limit", lambda _, well_s, *_times: max(well_s, 60.0))
    # Nor does a Kafka transaction of positions alone come in between.
    monkeypatch.setattr("penstock.transactions.stores.kafka.coordinator.half_partition._IDLE_COMMIT_AFTER_S", 600.0)
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
    notes = [note for record in bench.messages(bench.topics.done) for note in decode_done(record.value()).notes]
    assert (result.transaction_id, Verdict.COMMIT) in {(note.transaction_id, note.verdict) for note in notes}
    assert sum(bench.positions("read_committed", *logs)) >= sum(before) + 2


def test_any_live_producer_of_the_group_answers_one_per_check_on_as_many_workers_as_it_has(bench: Bench) -> None:
    answered: list[tuple[str, str]] = []
    busy, most = Counter[str](), Counter[str]()
    lock, go_on = threading.Lock(), threading.Event()

    def checker(name: str) -> Callable[[HalfMessage], TransactionState]:
        def check(half: HalfMessage) -> TransactionState:
            with lock:
                answered.append((name, half.transaction_id))
                busy[name] += 1
                most[name] = max(most[name], busy[name])
            # So that one worker has several at a time, if it may.
            go_on.wait(60)
            with lock:
                busy[name] -= 1
            return COMMIT

        return check

    sender = bench.producer()
    for name in ("first", "second"):
        bench.producer(check=checker(name), check_workers=2)
    ids = [sender.send(bench.topic, key=b"%d" % n, value=b"v", execute=unknown).transaction_id for n in range(60)]
    bench.await_checkers(2)
    coordinator = bench.coordinator(check_interval=600)
    wait_until(lambda: busy == {"first": 2, "second": 2})
    go_on.set()
    bench.settled(coordinator, committed=60)

    # Both took part, each check came once, and no producer ran more checks at once than it has workers.
    assert {name for name, _ in answered} == {"first", "second"}
    assert Counter(identity for _, identity in answered) == Counter(ids)
    assert max(most.values()) <= 2


def test_a_half_is_never_appended_again_and_a_late_decision_finds_it_where_it_stands(bench: Bench) -> None:
    late = threading.Event()

    def check(half: HalfMessage) -> TransactionState:
        if half.check_count == 3:
            late.set()
        return UNKNOWN

    coordinator, producer = bench.coordinator(check_max=1_000), bench.producer(check=check)
    with producer.transaction(bench.topic, value=b"v"):
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


def test_two_coordinators_share_the_partitions_and_one_takes_over_what_the_other_leaves(bench: Bench) -> None:
    first, producer = bench.coordinator(), bench.producer(check=lambda _: TransactionState.COMMIT)
    bench.counted(first, partitions=2)
    second = bench.coordinator()
    wait_until(lambda: first.statistics().partitions == second.statistics().partitions == 1, 60)

    for number in range(50):
        producer.send(bench.topic, key=b"%d" % number, value=b"%d" % number)
    wait_until(lambda: first.statistics().committed + second.statistics().committed == 50, 60)
    batches = first.statistics().committed, second.statistics().committed
    producer.send(bench.topic, key=b"a", value=b"late", execute=unknown)
    producer.send(bench.topic, key=b"b", value=b"late", execute=unknown)
    first.stop()
    wait_until(lambda: first.statistics().committed + second.statistics().committed >= 52)
    bench.settled(second)

    assert min(batches) > 0
    assert first.statistics().committed + second.statistics().committed == 52
    seen = Counter(value for _, value in bench.visible())
    assert seen == Counter({b"late": 2, **{b"%d" % number: 1 for number in range(50)}})


def test_records_forged_by_hand_are_refused_and_counted(bench: Bench) -> None:
    silent, producer = bench.coordinator(transaction_timeout=600), bench.producer()
    stored = prepared(producer, bench.topic)
    half = stored.halves[0]
    cut = Op(half.transaction_id, Verdict.COMMIT, Author.PRODUCER, half.group, stored.partition, stored.offsets, 0)
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
    for value in (None, b"", b"\x01", struct.pack(">I", 7) * 40, encode_op(cut)[:-1]):
        bench.write(bench.topics.op, stored.partition, None, value)
    # It claims to belong to another half partition than the one it stands in.
    decide(bench, stored, Verdict.ROLLBACK, half_partition=stored.partition + 1)
    decide(bench, stored, Verdict.COMMIT)
    producer.send(bench.topic, value=b"after")
    statistics = bench.settled(silent, committed=2, forged=len(forged) + 6)

    assert (statistics.forged, statistics.rolled_back) == (len(forged) + 6, 0)
    assert sorted(bench.visible()) == [(None, b"after"), (None, b"v")]


def test_a_hanging_call_is_named_and_its_thread_left_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hang, hanging, deliver = threading.Event(), threading.Event(), Publisher._deliver

    def stands(self: Publisher, limit_s: float) -> None:
        if not hanging.is_set() and armed.is_set():
            hanging.set()
            hang.wait(60)
        deliver(self, limit_s)

    armed = threading.Event()
    monkeypatch.setattr(Publisher, "_deliver", stands)
    coordinator, producer = bench.coordinator(transaction_timeout=600), bench.producer()
    producer.send(bench.topic, value=b"0", wait="published")
    armed.set()

    result = producer.send(bench.topic, value=b"1")
    assert hanging.wait(60)
    # Its log says so, too, after the moment in which it can be asked.
    wait_until(lambda: coordinator.statistics().slow_call or "has not returned for" in caplog.text)
    bench.counted(coordinator, committed=2, left_behind=1)
    # A busy broker may be slow to answer another call.
    wait_until(lambda: not coordinator.statistics().slow_call)
    assert coordinator.statistics().left_behind == 1
    hang.set()
    wait_until(lambda: coordinator.statistics().left_behind == 0)

    assert result.state is TransactionState.COMMIT
    assert sorted(bench.visible()) == [(None, b"0"), (None, b"1")]


def test_a_coordinator_stops_though_its_broker_is_gone(bench: Bench) -> None:
    with KafkaProxy(bench.servers) as proxy:
        coordinator = bench.coordinator(bootstrap_servers=proxy.bootstrap_servers)
        bench.producer().send(bench.topic, value=b"v", wait="published")

    coordinator.stop(60)
