"""Coordinators that die, freeze and come back: who goes on, how soon, and that a zombie publishes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from transaction_tools import Bench, child, kill, line_of

from kafka_tools import ANSWER_S
from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.producer_settings import TRANSACTION_TIMEOUT_MS
from penstock.errors import ConfigurationError, StoppedError
from penstock.transactions import Coordinator
from penstock.transactions.coordinator.recovery.fencing import Fence, decode_claim, encode_claim, transactional_names
from penstock.transactions.coordinator.recovery.recovered_partition import RecoveredPartition
from penstock.transactions.coordinator.recovery.recovery import RecoveryReader
from penstock.transactions.wire.done_records import Note, encode_done
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until

#: What a Kafka transaction that nobody ends holds readers back: its time limit, and the broker's look every 10 s.
NOBODY_ENDS_IT_S = TRANSACTION_TIMEOUT_MS / 1000
#: The session of coordinators, unless they say so: the least that a broker takes.
SESSION_S = 6.0
#: What a busy machine may add to what takes seconds.
MACHINE_S = 25.0


def claims(bench: Bench) -> dict[int, list[str]]:
    """Return whose names stand beside the half positions."""
    consumer = Consumer({"bootstrap.servers": bench.servers, "group.id": bench.topics.coordinators})
    places = [TopicPartition(bench.topics.half, number) for number in range(bench.topics.partitions)]

    def told() -> list[TopicPartition] | None:
        try:
            return consumer.committed(places, ANSWER_S)
        except KafkaException:
            return None  # a broker that has just started has no coordinator for the group for a moment

    answers = wait_until(told)
    consumer.close()
    return {answer.partition: decode_claim(bench.topics, answer.metadata) for answer in answers}


def killed_inside_a_transaction(bench: Bench, *instance: str) -> float:
    """Let a coordinator die with a Kafka transaction open, and return when, in monotonic seconds."""
    with child("coordinator_child.py", bench.servers, bench.topics.prefix, "before commit", *instance) as first:
        assert line_of(first) == "started"
        wait_until(lambda: all(claims(bench).values()), timeout=60)
        producer = bench.producer()
        for number in range(20):
            producer.send(bench.topic, key=b"%d" % number, value=b"%d" % number)
        assert line_of(first) == "before commit"
        kill(first)
    # The fault happened: messages were written, and their transaction is open.
    assert bench.ends(bench.topic, "read_committed") < bench.ends(bench.topic, "read_uncommitted")
    return time.monotonic()


def test_another_coordinator_takes_over_within_the_session_timeout(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    end = Fence.end

    def noting_end(self: Fence, claims: Iterable[str | None]) -> int:
        ended.append(end(self, claims))
        return ended[-1]

    monkeypatch.setattr(Fence, "end", noting_end)
    died = killed_inside_a_transaction(bench)
    coordinator = bench.coordinator(session_timeout=SESSION_S)
    statistics = bench.settled(coordinator, timeout=90, committed=20)
    took = time.monotonic() - died

    assert statistics.committed == 20
    assert Counter(value for _, value in bench.visible()) == Counter(b"%d" % number for number in range(20))
    # It did not wait for the time limit of the transaction that was left open: it ended that itself.
    assert sum(ended) > 0
    # The dead one's session, from its last heartbeat; the rebalance, of which a member hears at its next heartbeat; the
    # second for which a predecessor may end its transaction itself; the broker's end of it and the reading of the logs;
    # and what a busy machine may add. The client library's own session would be 45 s.
    assert took < SESSION_S * 1.25 + 1.0 + MACHINE_S


def test_a_restarted_instance_goes_on_at_once(bench: Bench) -> None:
    died = killed_inside_a_transaction(bench, "one")
    coordinator = bench.coordinator(instance="one", session_timeout=40.0)
    bench.settled(coordinator, timeout=90, committed=20)
    took = time.monotonic() - died

    assert Counter(value for _, value in bench.visible()) == Counter(b"%d" % number for number in range(20))
    # Neither the session nor the time limit of the transaction had to pass.
    assert took < NOBODY_ENDS_IT_S


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


def test_positions_that_a_transaction_without_an_owner_holds_back_are_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.transactions.coordinator.recovery.recovery._HELD_S", 2.0)
    reader = Consumer({"bootstrap.servers": bench.servers, "group.id": bench.topics.coordinators})
    # The group has a coordinator by now: the next call would wait for one for ever.
    assert claims(bench)
    stranger = Producer({"bootstrap.servers": bench.servers, "transactional.id": f"stranger-{bench.topic}"})
    stranger.init_transactions(ANSWER_S)
    stranger.begin_transaction()
    held = [TopicPartition(bench.topics.half, 0, 0)]
    stranger.send_offsets_to_transaction(held, reader.consumer_group_metadata(), ANSWER_S)

    coordinator = bench.coordinator()
    told = wait_until(lambda: coordinator.statistics().slow_call)
    wait_until(lambda: "find-hanging" in caplog.text)
    assert bench.topics.coordinators in told
    stranger.abort_transaction(ANSWER_S)
    bench.producer().send(bench.topic, value=b"v")
    bench.settled(coordinator, committed=1)
    reader.close()

    assert coordinator.statistics().slow_call == ""


def test_who_owns_a_partition_is_written_beside_its_position_before_anything_is_sent(bench: Bench) -> None:
    with bench.coordinator(instance="named"):
        wait_until(lambda: all(claims(bench).values()))

    ids = transactional_names(bench.topics, "named").all
    assert claims(bench) == dict.fromkeys(range(bench.topics.partitions), ids)


def test_a_second_coordinator_of_one_instance_name_ends_the_first_with_a_clear_error(bench: Bench) -> None:
    first = Coordinator(bootstrap_servers=bench.servers, prefix=bench.topics.prefix, instance="same").start()
    bench.settled(first)
    second = bench.coordinator(instance="same")

    assert first.wait(60)
    with pytest.raises(StoppedError, match="instance name of its own"):
        first.stop()
    bench.producer().send(bench.topic, value=b"v")
    bench.settled(second, committed=1)


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 101])
def test_an_instance_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="instance must be"):
        Coordinator(bootstrap_servers="127.0.0.1:1", instance=name)


def test_only_ids_of_coordinators_of_the_store_are_read_from_a_claim(bench: Bench) -> None:
    ids = transactional_names(bench.topics, "one").all

    assert decode_claim(bench.topics, encode_claim(ids)) == ids
    assert decode_claim(bench.topics, f"somebody-else {ids[0]}  ") == ids[:1]
    assert decode_claim(bench.topics, None) == []
    assert len(decode_claim(bench.topics, " ".join(ids * 50))) < 10


def test_ending_what_was_left_open_under_its_owners_name_shuts_it_out(bench: Bench) -> None:
    own, other = transactional_names(bench.topics, "own").all, transactional_names(bench.topics, "other").all
    left = Producer({"bootstrap.servers": bench.servers, "transactional.id": other[0]})
    left.init_transactions(60)
    left.begin_transaction()
    left.produce(bench.topic, b"left open")
    left.flush(30)

    ended = Fence(bench.servers, {}, bench.topics, lambda: own, LeftBehind("a test")).end(
        [encode_claim(own), encode_claim(other), None]
    )

    assert ended == len(other)
    assert bench.visible() == []
    with pytest.raises(Exception, match=r"FENCED|EPOCH"):
        left.commit_transaction(30)


def test_what_a_dead_coordinator_left_open_in_the_done_log_alone_is_ended_by_who_takes_over(bench: Bench) -> None:
    topics, dead = bench.topics, transactional_names(bench.topics, "dead").all
    group = {"bootstrap.servers": bench.servers, "group.id": topics.coordinators}
    claiming = Consumer(group)
    claim = TopicPartition(topics.half, 0, 0, encode_claim(dead))
    claiming.commit(offsets=[claim], asynchronous=False)
    claiming.close()
    # It died between the records of a Kafka transaction and their positions: those hold nobody back.
    patient = {"transactional.id": dead[0], "transaction.timeout.ms": 600_000}
    left = Producer({"bootstrap.servers": bench.servers, **patient})
    left.init_transactions(60)
    left.begin_transaction()
    left.produce(topics.done, b"never committed", partition=0)
    left.flush(30)
    deadline = time.monotonic() + 30
    fence = Fence(bench.servers, {}, topics, list, LeftBehind("a test"))
    reader = RecoveryReader(
        bench.servers, {}, topics, lambda: time.monotonic() > deadline, fence, rights=MissingRights({})
    )

    recovered = reader.recover([0], lambda _doing: None)[0]

    assert (recovered.done_end, recovered.notes, recovered.unreadable) == (1, [], 0)
    with pytest.raises(KafkaException, match=r"FENCED|EPOCH"):
        left.commit_transaction(30)


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
    deadline = time.monotonic() + 60
    fence = Fence(bench.servers, {}, topics, list, LeftBehind("a test"))
    reader = RecoveryReader(
        bench.servers, {}, topics, lambda: time.monotonic() > deadline, fence, rights=MissingRights({})
    )
    asked, found = threading.Event(), list[RecoveredPartition]()

    def step(doing: str) -> None:
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

    assert [one.transaction_id for one in found[0].notes] == [note.transaction_id]
