"""The status of coordinators: its format, its times, and its content about a transaction."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from half_partition import context_of
from hypothesis import given
from hypothesis import strategies as st
from transaction_tools import Bench

from commands import commands
from penstock.clients.factory import AdminClient
from penstock.clients.rights import THIS_CLIENT, MissingRightError, Operation, topic_right
from penstock.clients.topics import TopicSpec
from penstock.errors import BrokerConnectionError, MessageFormatError
from penstock.transactions.acked_producer import Report
from penstock.transactions.core.pending import Pending
from penstock.transactions.operator.administration import NO_PRODUCER, shown
from penstock.transactions.operator.inspection import Inspection
from penstock.transactions.stores.kafka.coordinator.coordinator_sends import CoordinatorSends, StatusLog
from penstock.transactions.stores.kafka.inspection import Found, found_in, read_partitions, read_statuses
from penstock.transactions.stores.kafka.status import (
    Status,
    decode_status,
    encode_status,
    waits_for,
)
from penstock.transactions.wire import topics
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import StoreTopics
from waiting import wait_until

texts = st.text(max_size=300)
reasons = st.dictionaries(texts, texts, max_size=5)
whole = st.integers(0, 1 << 50)
sentences = st.lists(texts, max_size=5).map(tuple)
statuses = st.builds(
    Status,
    coordinator=texts,
    at_ms=whole,
    partitions=st.lists(whole, max_size=5).map(tuple),
    targets=reasons,
    groups=reasons,
    halts=sentences,
    notes=sentences,
)
SICK = Status("one", 0, (0,), targets={"sick": "message too large"})


@given(statuses)
def test_a_status_reads_back_as_it_was_written(status: Status) -> None:
    assert decode_status(encode_status(status)) == status


@given(
    st.binary(max_size=200) | st.recursive(st.none() | texts | st.floats() | whole, st.lists).map(str).map(str.encode)
)
def test_what_is_no_status_is_refused_with_one_kind_of_error(value: bytes) -> None:
    with pytest.raises(MessageFormatError):
        decode_status(value)


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 1},
        {"partitions": ["0"]},
        {"partitions": 7},
        {"at_ms": float("nan")},
        {"at_ms": True},
        {"targets": {"t": 1}},
        {"targets": ["t"]},
        {"groups": {str(n): "" for n in range(101)}},
        {"halts": ["x" * 701]},
        {"notes": "a text"},
        {"unknown": 1},
    ],
)
def test_a_status_with_a_field_that_cannot_be_is_refused(changed: Mapping[str, Any]) -> None:
    fields = {**json.loads(encode_status(SICK)), **changed}

    with pytest.raises(MessageFormatError):
        decode_status(json.dumps(fields).encode())


def test_what_is_too_much_is_cut() -> None:
    status = Status("c", 0, targets={f"t{n}": "x" * 10_000 for n in range(5_000)}, halts=("x" * 10_000,) * 200)

    read = decode_status(encode_status(status))

    assert (len(read.targets), len(read.halts)) == (100, 100)
    assert {len(why) for why in (*read.targets.values(), *read.halts)} == {700}


class Sent:
    """Takes messages, unless it is full or the client library refuses."""

    def __init__(self) -> None:
        self.values: list[Status] = []
        self.is_full = False
        self.error: KafkaException | None = None

    def try_post(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, *, headers: None, report: Report
    ) -> bool:
        assert (topic, partition, key, headers) == ("store.status", 0, b"one", None)
        assert report is not None
        if self.error is not None:
            raise self.error
        if self.is_full:
            return False
        self.values.append(decode_status(value))
        return True


def test_a_status_is_written_when_it_changes_and_again_while_there_is_something_to_say() -> None:
    sent = Sent()
    log = status_log(sent)
    well = Status("one", 0, (0,))

    log.write(well, 0.0)
    assert sent.values == []

    log.write(SICK, 10.0)
    log.write(replace(SICK, at_ms=5), 15.0)
    assert len(sent.values) == 1

    log.write(SICK, 30.0)
    assert len(sent.values) == 2

    log.write(replace(SICK, halts=("x",)), 31.0)
    assert sent.values[-1].halts == ("x",)

    log.write(well, 40.0)
    log.write(well, 100.0)
    assert sent.values[-1] == well
    assert len(sent.values) == 4


def status_log(sent: Sent) -> StatusLog:
    context = context_of(StoreTopics("store"))
    return StatusLog(context.topics.status, CoordinatorSends(context, sent))  # type: ignore[arg-type] # what is used of it


def test_a_status_that_could_not_be_written_is_tried_again_and_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    sent = Sent()
    log = status_log(sent)

    sent.is_full = True
    log.write(SICK, 0.0)
    sent.is_full, sent.error = False, KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION))
    with caplog.at_level(logging.WARNING):
        log.write(SICK, 1.0)
        log.write(SICK, 2.0)
    sent.error = None
    log.write(SICK, 3.0)

    assert sent.values == [SICK]
    assert len([line for line in caplog.messages if "is not stored in store.status" in line]) == 1


def decided(place: int, topic: str, key: bytes | None, verdict: Verdict = Verdict.COMMIT) -> Pending:
    pending = Pending(Half(new_id(), "orders", topic, None, key, b"v", (), None), place)
    pending.verdict, pending.decided_at = verdict, place
    return pending


REFUSED = Status("c1", 0, (0,), targets={"t": "too large"})
NO_RIGHT = Status("c1", 0, (0,), halts=("a permission that the coordinator lacks: ...",))
HANGING = "Kafka: commit_transaction has not returned for more than 2 s"


@pytest.mark.parametrize(
    ("pending", "status", "waits"),
    [
        (decided(0, "t", b"k"), REFUSED, "topic t to take it: too large"),
        (decided(0, "u", b"k"), REFUSED, ""),
        (decided(0, "t", b"k", Verdict.ROLLBACK), REFUSED, ""),
        (decided(0, "t", b"k"), NO_RIGHT, "a permission that the coordinator lacks: ..."),
        (decided(0, "t", b"k"), replace(NO_RIGHT, partitions=()), "a permission that the coordinator lacks: ..."),
        (decided(0, "t", b"k"), replace(NO_RIGHT, partitions=(1,)), ""),
        (decided(0, "t", b"k"), Status("c1", 0, (0,), halts=(HANGING,)), HANGING),
        (decided(0, "t", b"k"), Status("c1", 0, (0,), notes=("topic store.half cannot be truncated",)), ""),
    ],
)
def test_what_is_decided_waits_for_its_target_or_for_what_halts_the_owner_of_its_partition(
    pending: Pending, status: Status, waits: str
) -> None:
    assert waits_for(pending, 0, [status]) == waits
    assert len(status.lines()) == 1


def test_an_undecided_transaction_waits_for_its_group_if_its_owner_could_not_ask_it() -> None:
    halves = [Half(new_id(), group, "t", None, None, b"v", (), None) for group in ("shop", "bank")]
    undecided, other = (Pending(half, 0) for half in halves)
    why = NO_PRODUCER.format("shop")
    owner, elsewhere = Status("c1", 0, (0,), groups={"shop": why}), Status("c2", 0, (1,), groups={"bank": why})

    found = waits_for(undecided, 0, [owner, elsewhere])

    assert shown(undecided, 0.0, None, found).waits_for == "a producer of group shop: none runs"
    assert waits_for(other, 0, [owner, elsewhere]) == ""
    assert owner.lines() == [f"checks of coordinator c1 wait for {why}"]


def test_the_store_reads_the_latest_status_of_each_coordinator_and_passes_over_what_is_none(bench: Bench) -> None:
    topic = bench.topics.status
    for status in (
        SICK,
        replace(SICK, targets={"sick": "no leader"}),
        Status("two", 0, notes=("x",)),
        Status("three", 0, (0,), targets={"healed": "x"}),
        Status("three", 0, (0,)),
    ):
        bench.write(topic, 0, status.coordinator.encode(), encode_status(status))
    bench.write(topic, 0, b"one", b"garbage")

    with Inspection(bench.servers, {}, bench.topics) as reads:
        found, unseen = read_statuses(reads)

    assert unseen == ""
    assert [(one.coordinator, one.targets, one.notes) for one in found] == [
        ("one", {"sick": "no leader"}, ()),
        ("three", {}, ()),
        ("two", {}, ("x",)),
    ]
    # When it came there, by the broker: what it says itself counts for nothing.
    assert all(abs(one.at_ms / 1000 - time.time()) < 300 for one in found)


def test_what_stands_behind_an_open_transaction_is_waited_for_and_then_left_out(bench: Bench) -> None:
    sent = bench.producer().send(bench.topic, value=b"1")
    lasting = {"transactional.id": bench.topic, "transaction.timeout.ms": 600_000}
    writer = Producer({"bootstrap.servers": bench.servers, **lasting})
    writer.init_transactions(30)
    writer.begin_transaction()
    writer.produce(bench.topics.done, b"of nobody", partition=0)
    assert writer.flush(30) == 0

    def looks() -> list[list[Found]]:
        # The broker of a busy machine may be silent for the rest of a second.
        with suppress(BrokerConnectionError), Inspection(bench.servers, {}, bench.topics, 1.0) as reads:
            return [found_in(read_partitions(reads), ())]
        return []

    [found] = wait_until(looks)

    assert [it.shown.transaction_id for it in found] == [sent.transaction_id]
    writer.abort_transaction(30)


def test_tx_ls_names_the_target_that_takes_nothing_and_the_brokers_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = bench.producer().send(bench.topic, key=b"k", value=b"1").transaction_id
    why = "Broker: Message size too large (MSG_SIZE_TOO_LARGE)"
    status = Status("c1", 0, (0, 1), targets={"sick": "no right", bench.topic: why})
    bench.write(bench.topics.status, 0, b"c1", encode_status(status))

    listed = commands(monkeypatch, capsys)(
        "tx", "ls", "--connect-timeout", "60", "--bootstrap-servers", bench.servers, "--prefix", bench.topics.prefix
    )

    rows = {line.split()[0]: line for line in listed.out.splitlines() if line.strip()}
    assert f"topic {bench.topic} to take it: {why}" in rows[refused]
    assert "topic sick refuses messages, as coordinator c1 reports: no right" in listed.out


def test_tx_ls_lists_what_is_pending_though_a_broker_with_the_coordinators_status_is_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pending = bench.producer().send(bench.topic, value=b"1").transaction_id

    def away(*_: object) -> NoReturn:
        raise BrokerConnectionError("its leader is away")

    monkeypatch.setattr(Inspection, "read_all", away)
    listed = commands(monkeypatch, capsys)(
        "tx", "ls", "--bootstrap-servers", bench.servers, "--prefix", bench.topics.prefix
    )

    assert pending in listed.out
    assert "the status of the coordinators is not seen: its leader is away" in listed.out


def test_a_coordinator_that_may_not_create_the_topic_of_statuses_says_so_and_publishes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = topics.ensure_topics

    def refused(admin: AdminClient, specs: Sequence[TopicSpec], **given: Any) -> dict[str, int]:
        if bench.topics.status in {spec.name for spec in specs}:
            raise MissingRightError("it is missing", [topic_right(Operation.CREATE, bench.topics.status)], THIS_CLIENT)
        return create(admin, specs, **given)

    monkeypatch.setattr(topics, "ensure_topics", refused)
    bench.producer().send(bench.topic, value=b"1")

    bench.settled(bench.coordinator())

    assert bench.visible() == [(None, b"1")]
    assert f"lacks the permission Create on topic {bench.topics.status}; " in caplog.text
    assert "the coordinator runs without it" in caplog.text
