"""Coordinators that die, freeze and come back: who goes on, how soon, and that a zombie publishes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from half_partition import context_of
from transaction_tools import Bench, child, line_of

from kafka_tools import ANSWER_S
from penstock.errors import StoppedError
from penstock.transactions import Coordinator
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.logs import recovery
from penstock.transactions.stores.kafka.logs.recovered_partition import DONE, RecoveredPartition, decode_claim
from penstock.transactions.stores.kafka.logs.recovery import RecoveryReader, Step, end_transactions
from penstock.transactions.wire.done_records import Note, encode_done
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until


def claims(bench: Bench) -> dict[int, list[str]]:
    """Return the names that are committed with the half positions."""
    consumer = Consumer({"bootstrap.servers": bench.servers, "group.id": bench.topics.coordinators})
    places = [TopicPartition(bench.topics.half, number) for number in range(bench.topics.partitions)]

    def committed() -> list[TopicPartition] | None:
        try:
            return consumer.committed(places, ANSWER_S)
        except KafkaException:
            return None  # a broker that has just started has no coordinator for the group for a moment

    answers = wait_until(committed)
    consumer.close()
    return {answer.partition: decode_claim(bench.topics, answer.metadata) for answer in answers}


def names(bench: Bench, name: str) -> list[str]:
    """Return the transactional ids of a coordinator."""
    return [f"{bench.topics.coordinators}.{name}.{letter}" for letter in "abcxyz"]


def until(limit_s: float) -> Step:
    """Return a step of a recovery that fails after so many seconds."""
    deadline = time.monotonic() + limit_s

    def step(doing: str) -> None:
        assert time.monotonic() < deadline, doing

    return step


@pytest.fixture
def frozen(bench: Bench) -> Iterator[subprocess.Popen[str]]:
    """A coordinator that freezes with a Kafka transaction open, all written and its end not sent."""
    with child("coordinator_child.py", bench.servers, bench.topics.prefix, "thaw") as process:
        assert line_of(process) == "started"
        wait_until(lambda: all(claims(bench).values()), timeout=60)
        yield process
        os.kill(process.pid, signal.SIGCONT)


@pytest.mark.chaos
def test_a_zombie_frozen_past_its_session_publishes_nothing(bench: Bench, frozen: subprocess.Popen[str]) -> None:
    producer = bench.producer()
    for number in range(20):
        producer.send(bench.topic, key=b"%d" % number, value=b"%d" % number)
    assert line_of(frozen) == "thaw"
    os.kill(frozen.pid, signal.SIGSTOP)
    coordinator = bench.coordinator()
    bench.settled(coordinator, timeout=90, committed=20)

    os.kill(frozen.pid, signal.SIGCONT)
    # It goes on where it stood: with the end of its transaction. It is refused, and it learns what it lost.
    assert line_of(frozen) == "refused"
    producer.send(bench.topic, key=b"last", value=b"last")
    wait_until(lambda: (b"last", b"last") in bench.visible(), timeout=60)

    wanted = Counter([*(b"%d" % number for number in range(20)), b"last"])
    assert Counter(value for _, value in bench.visible()) == wanted


def test_positions_that_a_transaction_without_an_owner_holds_back_are_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.transactions.stores.kafka.logs.recovery._OPEN_TRANSACTION_WARNING_AFTER_S", 2.0)
    reader = Consumer({"bootstrap.servers": bench.servers, "group.id": bench.topics.coordinators})
    # The group has a coordinator by now: the next call would wait for one for ever.
    assert claims(bench)
    stranger = Producer({"bootstrap.servers": bench.servers, "transactional.id": f"stranger-{bench.topic}"})
    stranger.init_transactions(ANSWER_S)
    stranger.begin_transaction()
    held = [TopicPartition(bench.topics.half, 0, 0)]
    stranger.send_offsets_to_transaction(held, reader.consumer_group_metadata(), ANSWER_S)

    coordinator = bench.coordinator()
    slow_call = wait_until(lambda: coordinator.statistics().slow_call)
    wait_until(lambda: "find-hanging" in caplog.text)
    assert bench.topics.coordinators in slow_call
    stranger.abort_transaction(ANSWER_S)
    bench.producer().send(bench.topic, value=b"v")
    bench.settled(coordinator, committed=1)
    reader.close()

    # A busy broker may be slow to answer another call.
    wait_until(lambda: not coordinator.statistics().slow_call)


def test_a_second_coordinator_of_one_instance_name_ends_the_first_with_a_clear_error(bench: Bench) -> None:
    first = Coordinator(bootstrap_servers=bench.servers, prefix=bench.topics.prefix, instance="same").start()
    bench.settled(first)
    second = bench.coordinator(instance="same")

    assert first.wait(60)
    with pytest.raises(StoppedError, match="instance name of its own"):
        first.stop()
    bench.producer().send(bench.topic, value=b"v")
    bench.settled(second, committed=1)


def test_a_coordinator_that_is_shut_out_by_what_does_not_stay_comes_back(bench: Bench) -> None:
    coordinator = bench.coordinator(instance="same")
    bench.settled(coordinator)
    engine: Any = coordinator._engine
    membership = engine._membership
    # A join of its own whose answer never came looks so to a broker.
    group = {"bootstrap.servers": bench.servers, "group.id": bench.topics.coordinators}
    strategy = {"partition.assignment.strategy": "cooperative-sticky"}
    late = Consumer({**group, **strategy, "group.instance.id": "same"})
    late.subscribe([bench.topics.half])
    wait_until(lambda: late.poll(0.1) or membership._rejoined, 60)
    late.close()
    bench.producer().send(bench.topic, value=b"v")

    bench.settled(coordinator, committed=1)


def test_only_ids_of_coordinators_of_the_store_are_read_from_a_claim(bench: Bench) -> None:
    ids = names(bench, "one")

    assert decode_claim(bench.topics, " ".join(ids)) == ids
    assert decode_claim(bench.topics, f"somebody-else {ids[0]}  ") == ids[:1]
    assert decode_claim(bench.topics, None) == []
    assert len(decode_claim(bench.topics, " ".join(ids * 50))) < 10


def test_ending_what_was_left_open_under_its_owners_name_shuts_it_out(bench: Bench) -> None:
    other, context = names(bench, "other"), context_of(bench.topics, bench.servers)
    left = Producer({"bootstrap.servers": bench.servers, "transactional.id": other[0]})
    left.init_transactions(60)
    left.begin_transaction()
    left.produce(bench.topic, b"left open")
    left.flush(30)

    assert end_transactions(context, other) == set(other)
    assert bench.visible() == []
    with pytest.raises(Exception, match=r"FENCED|EPOCH"):
        left.commit_transaction(30)


def test_neither_own_producers_nor_who_was_shut_out_before_are_shut_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, dead = names(bench, "own"), names(bench, "dead")
    claiming = Consumer({"bootstrap.servers": bench.servers, "group.id": bench.topics.coordinators})
    claiming.commit(offsets=[TopicPartition(bench.topics.half, 0, 0, " ".join([*own[:2], *dead]))], asynchronous=False)
    claiming.close()
    asked: list[set[str]] = []

    def note(_: CoordinatorContext, ids: Iterable[str]) -> set[str]:
        asked.append(set(ids))
        # The last one cannot be ended yet.
        return asked[-1] - set(dead[5:])

    monkeypatch.setattr(recovery, "end_transactions", note)
    reader, ended = RecoveryReader(context_of(bench.topics, bench.servers), lambda: own), set[str]()

    reader._end_predecessors([0], ended)
    reader._end_predecessors([0], ended)

    assert asked == [set(dead), set(dead[5:])]


def test_what_a_dead_coordinator_left_open_in_the_done_log_alone_is_ended_by_who_takes_over(bench: Bench) -> None:
    topics, dead = bench.topics, names(bench, "dead")
    group = {"bootstrap.servers": bench.servers, "group.id": topics.coordinators}
    claiming = Consumer(group)
    claim = TopicPartition(topics.half, 0, 0, " ".join(dead))
    claiming.commit(offsets=[claim], asynchronous=False)
    claiming.close()
    # It died between the records of a Kafka transaction and their positions: those block no reader.
    patient = {"transactional.id": dead[0], "transaction.timeout.ms": 600_000}
    left = Producer({"bootstrap.servers": bench.servers, **patient})
    left.init_transactions(60)
    left.begin_transaction()
    left.produce(topics.done, b"never committed", partition=0)
    left.flush(30)

    recovered = RecoveryReader(context_of(topics, bench.servers), list).recover([0], until(120.0))[0]

    assert (recovered.ends[DONE], recovered.known.half_position, recovered.forged) == (1, 0, 0)
    with pytest.raises(KafkaException, match=r"FENCED|EPOCH"):
        left.commit_transaction(30)


@pytest.mark.thorough
def test_what_was_tried_apart_and_let_through_before_the_group_changed_hands_is_waited_for(bench: Bench) -> None:
    topics = bench.topics
    member = Consumer({"bootstrap.servers": bench.servers, "group.id": topics.coordinators})
    assert claims(bench)
    apart = Producer({"bootstrap.servers": bench.servers, "transactional.id": f"apart-{bench.topic}"})
    apart.init_transactions(ANSWER_S)
    apart.begin_transaction()
    # It is fenced by the group here, and moves no position; what it settles comes to the done log a moment later.
    fenced = [TopicPartition(topics.discarded, 0, 0)]
    apart.send_offsets_to_transaction(fenced, member.consumer_group_metadata(), ANSWER_S)
    reader, in_time = RecoveryReader(context_of(topics, bench.servers), list), until(60.0)
    asked, found = threading.Event(), list[RecoveredPartition]()

    def step(doing: str) -> None:
        in_time(doing)
        if "may hold back" in doing:
            asked.set()

    taking = threading.Thread(target=lambda: found.append(reader.recover([0], step)[0]), daemon=True)
    taking.start()
    assert asked.wait(30)
    taking.join(3)
    assert not found, "it went on before what was let through had ended"
    note = Note(new_id(), 0, Verdict.COMMIT, 0, 0, 0, 0)
    apart.produce(topics.done, encode_done([note]), partition=0)
    apart.commit_transaction(ANSWER_S)
    taking.join(60)
    member.close()

    settled = Half(note.transaction_id, "orders", bench.topic, None, None, b"v", (), None)
    assert found[0].state.add_half(0, settled) is None, "the done log says that it is settled"
