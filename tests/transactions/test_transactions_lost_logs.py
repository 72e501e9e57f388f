"""Half, op and done logs that are deleted, made again or cut: logged, counted, and never skipped silently."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from confluent_kafka import TopicPartition
from transaction_tools import Bench, prepared, unknown

from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.transactions import TransactionState
from penstock.transactions.stores.kafka.administration import KafkaAdministration
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until

LOGS = ("half", "op", "done")
PATIENCE_S = 60.0


def sent(bench: Bench, first: int, count: int) -> list[bytes]:
    """Send transactions whose decisions are acknowledged, and return their values."""
    values = [b"%d" % number for number in range(first, first + count)]
    producer = bench.producer()
    for value in values:
        producer.send(bench.topic, key=value, value=value)
    return values


def made_anew(bench: Bench, log: str) -> str:
    """Delete one of the store's topics and make it again."""
    topic = f"{bench.topics.prefix}.{log}"
    bench.admin.delete_topics([topic])[topic].result()
    wait_until(lambda: topic not in bench.admin.list_topics(timeout=10).topics)
    ensure_topics(bench.admin, [TopicSpec(topic, bench.topics.partitions, SETTINGS)])

    def has_leaders() -> bool:
        found = bench.admin.list_topics(topic, timeout=10).topics[topic].partitions.values()
        return bool(found) and all(partition.leader >= 0 for partition in found)

    wait_until(has_leaders)
    return topic


SETTINGS = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "message.timestamp.type": "LogAppendTime",
}


def cut(bench: Bench, log: str) -> str:
    """Delete all that lies in one of the store's topics."""
    topic = f"{bench.topics.prefix}.{log}"
    places = [TopicPartition(topic, number, -1) for number in range(bench.topics.partitions)]
    for future in bench.admin.delete_records(places).values():
        future.result()
    return topic


def seen(bench: Bench) -> set[bytes | None]:
    return {value for _, value in bench.visible()}


@contextlib.contextmanager
def filled(bench: Bench) -> Iterator[list[bytes]]:
    """Have transactions settled by a coordinator, whose positions are committed when it ends."""
    with bench.coordinator() as coordinator:
        values = sent(bench, 0, 20)
        bench.settled(coordinator, committed=20)
        wait_until(lambda: min(bench.positions("read_committed", bench.topics.half, bench.topics.op)) > 0, PATIENCE_S)
        yield values


@pytest.mark.thorough
@pytest.mark.parametrize("log", LOGS)
def test_a_log_recreated_while_no_coordinator_runs_is_reported_and_counted_and_read_from_its_start(
    bench: Bench, log: str, caplog: pytest.LogCaptureFixture
) -> None:
    with filled(bench) as first:
        pass
    topic = made_anew(bench, log)
    # More than before: the ends alone would tell nothing.
    second = sent(bench, 100, 60)

    coordinator = bench.coordinator()
    wait_until(lambda: seen(bench) >= {*first, *second}, PATIENCE_S)

    assert coordinator.statistics().lost > 0
    assert f"{topic}:0 was deleted and made again" in caplog.text
    if log != "done":
        assert sorted(value for _, value in bench.visible() if value) == sorted([*first, *second]), "each once"


@pytest.mark.thorough
@pytest.mark.parametrize("log", LOGS)
def test_a_log_recreated_while_a_coordinator_runs_loses_nothing_that_was_acknowledged_since(
    bench: Bench, log: str, caplog: pytest.LogCaptureFixture
) -> None:
    with filled(bench) as first:
        coordinator = bench.coordinator()
        topic = made_anew(bench, log)
        second = sent(bench, 100, 12)
        wait_until(lambda: seen(bench) >= {*first, *second}, PATIENCE_S)
        third = sent(bench, 200, 30)
        wait_until(lambda: seen(bench) >= {*first, *second, *third}, PATIENCE_S)
        assert sorted(value for _, value in bench.visible() if value) == sorted([*first, *second, *third])
        wait_until(lambda: f"{topic}:0 was deleted and made again" in caplog.text, PATIENCE_S)
        coordinator.stop()
    again = bench.coordinator()
    bench.settled(again)

    assert sorted(value for _, value in bench.visible() if value) == sorted([*first, *second, *third]), "each once"


@pytest.mark.thorough
def test_what_is_pending_survives_that_the_op_log_is_made_again_and_a_restart_after_that(bench: Bench) -> None:
    producer = bench.producer()
    coordinator = bench.coordinator(transaction_timeout=1000.0)
    stored = prepared(producer, bench.topic, b"pending")
    wait_until(lambda: coordinator.statistics().pending == 1, PATIENCE_S)
    made_anew(bench, "op")
    wait_until(lambda: coordinator.statistics().lost > 0 and coordinator.statistics().pending == 1, PATIENCE_S)
    coordinator.stop()
    again = bench.coordinator(transaction_timeout=1000.0)
    wait_until(lambda: again.statistics().partitions == 2, PATIENCE_S)

    with KafkaAdministration(bench.servers, bench.topics.prefix) as hands:
        hands.decide(stored.halves[0].transaction_id, Verdict.COMMIT, "test")
    wait_until(lambda: seen(bench) == {b"pending"}, PATIENCE_S)


@pytest.mark.parametrize("log", ["done", *(pytest.param(log, marks=pytest.mark.thorough) for log in ("half", "op"))])
def test_records_cut_while_no_coordinator_runs_are_reported_and_counted(
    bench: Bench, log: str, caplog: pytest.LogCaptureFixture
) -> None:
    with filled(bench):
        pass
    if log != "done":
        # Of the done log, all that it says of the first is cut.
        sent(bench, 100, 20)
    topic = cut(bench, log)
    later = sent(bench, 200, 20)

    coordinator = bench.coordinator()
    wait_until(lambda: seen(bench) >= set(later), PATIENCE_S)

    assert coordinator.statistics().lost >= 20 if log == "half" else coordinator.statistics().lost > 0
    assert f"{topic}:0: records below offset" in caplog.text


@pytest.mark.parametrize("log", ["half", pytest.param("op", marks=pytest.mark.thorough)])
def test_a_log_cut_while_a_coordinator_runs_loses_what_lay_there_alone_and_is_reported(
    bench: Bench, log: str, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = bench.coordinator(transaction_timeout=1000.0)
    stored = [prepared(bench.producer(), bench.topic, b"%d" % number) for number in range(6)]
    wait_until(lambda: coordinator.statistics().pending == len(stored), PATIENCE_S)
    sent(bench, 100, 12)
    wait_until(lambda: coordinator.statistics().committed == 12, PATIENCE_S)
    topic = cut(bench, log)
    if log == "half":
        # All decisions were applied: nothing of the op log is needed.
        wait_until(lambda: coordinator.statistics().lost >= len(stored), PATIENCE_S)
        assert f"{topic}:" in caplog.text
    sent(bench, 200, 6)
    wait_until(lambda: len(bench.visible()) == 18, PATIENCE_S)

    wait_until(lambda: coordinator.statistics().pending == (0 if log == "half" else len(stored)), PATIENCE_S)


@pytest.mark.thorough
@pytest.mark.parametrize("log", ["half", "op"])
def test_an_operators_list_does_not_read_past_a_recreated_log(
    bench: Bench, log: str, caplog: pytest.LogCaptureFixture
) -> None:
    with filled(bench):
        pass
    topic = made_anew(bench, log)
    prepared(bench.producer(), bench.topic, b"pending")

    with KafkaAdministration(bench.servers, bench.topics.prefix) as hands:
        pending = hands.pending()

    assert [transaction.topics for transaction in pending] == [(bench.topic,)]
    assert f"{topic}:0 was deleted and made again" in caplog.text


def test_checks_leave_partitions_that_are_gone(bench: Bench) -> None:
    coordinator = bench.coordinator(check_interval=0.2)
    producer = bench.producer(check=lambda _: TransactionState.COMMIT)
    bench.await_checkers(1)
    made_anew(bench, "check")  # with fewer partitions

    for number in range(8):
        producer.send(bench.topic, value=b"%d" % number, execute=unknown)

    bench.settled(coordinator, committed=8)
