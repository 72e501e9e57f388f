"""Bad input costs one clear error or one transaction, never the loop (I10)."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transaction_tools import Bench, unknown

from penstock.clients.topics import TopicSpec, ensure_topics, partition_counts
from penstock.errors import (
    BrokerConnectionError,
    ConfigurationError,
    StoppedError,
    TopicNotFoundError,
    TransactionError,
)
from penstock.transactions import Coordinator, FileStore, HalfMessage, SqlStore, TransactionalProducer, TransactionState
from waiting import wait_until

NO_BROKER = "127.0.0.1:9"


async def check_async(_: HalfMessage) -> TransactionState:
    return TransactionState.COMMIT


class AsyncCheck:
    async def __call__(self, _: HalfMessage) -> TransactionState:
        return TransactionState.COMMIT

    async def check_local_transaction(self, _: HalfMessage) -> TransactionState:
        return TransactionState.COMMIT


@pytest.mark.parametrize(
    "start",
    [
        lambda: TransactionalProducer("orders", bootstrap_servers=NO_BROKER).start(),
        lambda: TransactionalProducer("orders", bootstrap_servers=NO_BROKER).send("t", value=b"v"),
        lambda: Coordinator(bootstrap_servers=NO_BROKER).start(),
    ],
    ids=["producer", "first send", "coordinator"],
)
def test_an_unreachable_broker_is_reported_by_its_address_in_time(
    start: Callable[[], object], hasty: list[float]
) -> None:
    with pytest.raises(BrokerConnectionError, match=f"{NO_BROKER} within 15 s"):
        start()

    assert hasty == [15]


@pytest.mark.parametrize(
    ("wrong", "pattern"),
    [
        ({"group": " "}, "group"),
        ({"group": "g" * 201}, "group"),
        ({"check": "check_order"}, "check"),
        ({"check_workers": 0}, "check_workers"),
        ({"check_timeout": 0}, "check_timeout"),
        ({"check_timeout": float("inf")}, "check_timeout must be at most"),
        ({"telemetry": True}, "telemetry must be a Telemetry"),
        ({"partitions": 0}, "partitions"),
        ({"send_timeout": 0}, "send_timeout"),
        ({"send_timeout": float("inf")}, "send_timeout must be at most 2,000,000 seconds"),
        ({"publish_timeout": float("inf")}, "publish_timeout must be at most"),
        ({"publish_timeout": 1e10}, "publish_timeout must be at most"),
        ({"prefix": None}, "prefix must be a name"),
        ({"prefix": ""}, "prefix must be a name"),
        ({"prefix": "a b"}, "prefix must be a name"),
        ({"prefix": "x" * 240}, "at most 239 characters"),
        ({"check": check_async}, "check must be a plain function"),
        ({"check": partial(check_async)}, "check must be a plain function"),
        ({"check": AsyncCheck()}, "check must be a plain function"),
        ({"bootstrap_servers": ""}, "bootstrap_servers"),
        ({"config": {"acks": "1"}}, "acks"),
        ({"config": {"transactional.id": "x"}}, "transactional.id"),
        ({"config": {"no.such.setting": 1}}, "no.such.setting"),
        ({"check": check_async, "listener": AsyncCheck()}, "check or listener, not both"),
        ({"listener": AsyncCheck()}, "plain function"),
        ({"check_listener": AsyncCheck()}, "no option check_listener any more: give its method as check="),
        ({"order": "key"}, "order"),
        ({"wait": "forever"}, "wait"),
        ({"when_full": "drop"}, "when_full"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"publish_timeout": 0}, "publish_timeout"),
        ({"bootstrap_servers": None}, "bootstrap_servers or a store"),
    ],
)
def test_a_wrong_option_of_the_producer_is_named(wrong: dict[str, Any], pattern: str) -> None:
    options: dict[str, Any] = {"group": "orders", "bootstrap_servers": NO_BROKER, **wrong}

    with pytest.raises(ConfigurationError, match=pattern):
        TransactionalProducer(**options)


@pytest.mark.parametrize("more", [{"prefix": "mine"}, {"partitions": 7}, {"config": {"linger.ms": 5}}])
def test_what_a_given_store_would_ignore_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", bootstrap_servers=NO_BROKER)

    with pytest.raises(ConfigurationError, match="the store's own"):
        TransactionalProducer("orders", store=store, **more)


@pytest.mark.parametrize("prefix", [None, "", "a b", "x" * 210])
def test_stores_in_files_and_databases_refuse_a_prefix_that_names_no_topics(prefix: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="prefix must"):
        FileStore(tmp_path / "store", bootstrap_servers=NO_BROKER, prefix=prefix)
    with pytest.raises(ConfigurationError, match="prefix must"):
        SqlStore(f"sqlite:///{tmp_path / 'store.db'}", bootstrap_servers=NO_BROKER, prefix=prefix)


@pytest.mark.parametrize("store", ["kafka", "file"])
@pytest.mark.parametrize(
    ("wrong", "pattern"),
    [
        ({"transaction_timeout": 0}, "transaction_timeout"),
        ({"check_interval": -1}, "check_interval"),
        ({"check_interval": "often"}, "check_interval"),
        ({"check_max": 1.5}, "check_max"),
        ({"check_max": 70_000}, "check_max"),
        ({"check_backoff": 0.5}, "check_backoff"),
        ({"check_timeout": 0}, "check_timeout"),
        ({"session_timeout": 0}, "session_timeout"),
        ({"discard": "keep"}, "discard"),
        ({"discard": check_async}, "discard must be a plain function"),
        ({"telemetry": True}, "telemetry must be a Telemetry"),
        ({"commands": "yes"}, "commands must be True, False or"),
    ],
)
def test_a_wrong_option_of_the_coordinator_is_named(
    store: str, wrong: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    place: dict[str, Any] = {"bootstrap_servers": NO_BROKER}
    if store == "file":
        place = {"store": FileStore(tmp_path, bootstrap_servers=NO_BROKER)}

    with pytest.raises(ConfigurationError, match=pattern):
        Coordinator(**place, **wrong)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        *(({"instance": name}, "instance must be") for name in ("", "a b", "ä", "x" * 101)),
        ({"config": {"group.id": "mine"}}, "group.id"),
        ({"bootstrap_servers": None}, "bootstrap_servers or a store"),
        ({"store": "FILE"}, "bootstrap_servers or a store"),
        ({"bootstrap_servers": None, "store": "folder"}, "store must be a SqlStore or FileStore"),
        *(
            ({"bootstrap_servers": None, "store": "FILE", **of_kafka}, "for a store in Kafka")
            for of_kafka in (
                {"prefix": "other"},
                {"partitions": 7},
                {"target_latency": 1},
                {"instance": "a"},
                {"config": {"acks": 1}},
            )
        ),
    ],
)
def test_a_coordinator_has_one_store_and_what_is_the_stores_own_is_refused_with_it(
    options: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    given = {"bootstrap_servers": NO_BROKER, **options}
    if given.get("store") == "FILE":
        given["store"] = FileStore(tmp_path, bootstrap_servers=NO_BROKER)

    with pytest.raises(ConfigurationError, match=pattern):
        Coordinator(**given)


def test_wrong_arguments_of_a_message_are_named_before_anything_is_stored(bench: Bench) -> None:
    producer = bench.producer()

    for wrong, pattern in [
        ({"topic": "no topic!"}, "topic"),
        ({"key": 7}, "key"),
        ({"value": {}}, "value"),
        ({"headers": {"penstock-tx": b"x"}}, "penstock-"),
        ({"headers": [("a",)]}, "pairs of a name and a value"),
        ({"headers": "ab"}, "pairs of a name and a value"),
        ({"headers": ["ab"]}, "pairs of a name and a value"),
        ({"headers": 7}, "pairs of a name and a value"),
        *(({"check_immunity": time}, "check_immunity") for time in (-1, float("inf"), float("nan"))),
        *(({"partition": number}, "partition") for number in (99, "a", True)),
        ({"key": "\ud800"}, "key"),
        ({"value": "\udfff"}, "value"),
        ({"headers": {"\ud800": b""}}, "header"),
        ({"deliver_at": "tomorrow"}, "deliver_at"),
        ({"deliver_at": datetime(2030, 1, 1)}, "time zone"),  # noqa: DTZ001 - that is the point
        ({"deliver_at": float("inf")}, "deliver_at"),
        ({"deliver_at": 10**400}, "deliver_at"),
        ({"wait": "long"}, "wait"),
        ({"topic": bench.topics.op}, "belongs to the store"),
    ]:
        with pytest.raises(ConfigurationError, match=pattern):
            producer.send(**{"topic": bench.topic, "value": b"v", **wrong})  # type: ignore[arg-type] # that is the point
    # What is delayed would hold its key.
    with pytest.raises(ConfigurationError, match='order="half"'):
        bench.producer(order="half").send(bench.topic, key=b"k", value=b"v", deliver_at=4e9)

    assert bench.messages(bench.topics.half) == []


def test_a_missing_target_topic_is_reported_before_the_local_transaction_runs(bench: Bench) -> None:
    producer, ran = bench.producer(), []

    with pytest.raises(TopicNotFoundError, match="nowhere"):
        producer.send("nowhere", value=b"v", execute=ran.append)

    assert ran == []


@pytest.mark.parametrize(
    ("key", "value", "headers"),
    [
        (None, b"v", []),
        (b"k", None, []),
        (None, None, []),
        (b"", b"", []),
        (b"\xff\xfe", b"\xc3\x28\x00", [("h", b"\xff"), ("h", None), ("", b"")]),
        (b"k", b"v", [(f"header-{number}", b"%d" % number) for number in range(1000)]),
        (b"k", bytes(900_000), []),
    ],
    ids=["null key", "null value", "null both", "empty", "invalid UTF-8", "1,000 headers", "900 kB"],
)
def test_awkward_messages_arrive_as_they_were_sent(
    bench: Bench, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    producer.send(bench.topic, key=key, value=value, headers=headers, partition=2)
    bench.settled(coordinator, committed=1)

    (message,) = bench.messages()
    assert (message.partition(), message.key(), message.value(), message.headers() or []) == (2, key, value, headers)


def test_a_wrong_answer_of_execute_leaves_the_message_to_a_check(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer(check=lambda _: TransactionState.COMMIT)

    with pytest.raises(ConfigurationError, match="left to a check"):
        producer.send(bench.topic, value=b"v", execute=lambda _: True)  # type: ignore[arg-type, return-value] # that is the point
    bench.settled(coordinator, committed=1)

    assert bench.visible() == [(None, b"v")]


def test_a_check_that_raises_or_answers_nonsense_has_said_unknown_and_ends_no_worker(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [RuntimeError("no database"), SystemExit(1), CancelledError()]
    failed: list[HalfMessage] = []

    def check(half: HalfMessage) -> TransactionState:
        if half.check_count > len(errors):
            return TransactionState.COMMIT
        failed.append(half)
        if half.check_count == len(errors):
            return "commit"  # type: ignore[return-value] # that is the point
        raise errors[half.check_count]

    coordinator, producer = bench.coordinator(), bench.producer(check=check, check_workers=1)

    producer.send(bench.topic, value=b"v", execute=unknown)
    statistics = bench.settled(coordinator, committed=1)

    assert statistics.answered_checks == 5
    assert "check 1 of transaction" in caplog.text
    # One that is slow to be answered is asked again.
    wait_until(lambda: producer.statistics().failed_checks == len(failed) > 3)


def test_a_transaction_is_entered_once_and_a_stopped_producer_says_so(bench: Bench) -> None:
    producer = bench.producer()
    transaction = producer.transaction(bench.topic, value=b"v")
    with transaction:
        pass

    with pytest.raises(TransactionError, match="entered before"), transaction:
        pass
    producer.stop()
    with pytest.raises(StoppedError, match="make a new one"):
        producer.start()


def test_stores_whose_logs_differ_in_partitions_are_refused(bench: Bench, new_topic: Callable[..., str]) -> None:
    prefix = new_topic()
    ensure_topics(bench.admin, [TopicSpec(f"{prefix}.op", 3)])
    wait_until(lambda: f"{prefix}.op" in partition_counts(bench.admin))

    with pytest.raises(ConfigurationError, match="same number of partitions"):
        TransactionalProducer("orders", bootstrap_servers=bench.servers, prefix=prefix, partitions=2).start()
