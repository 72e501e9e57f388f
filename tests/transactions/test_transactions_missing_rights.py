"""Missing permissions: when they are reported, for how long, and what is read in the client library's log."""

from __future__ import annotations

import logging

import pytest
from confluent_kafka import KafkaError

from penstock.clients.rights import Operation, group_right, topic_right
from penstock.clients.transactional.end_watch import EndWatch
from penstock.clients.transactional.faults import is_forbidden
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.transactions.acked_producer import AckedProducer
from penstock.transactions.publishing.targets import NOT_KNOWN, Targets
from waiting import wait_until

WRITE = topic_right(Operation.WRITE, "store.done")
READ = group_right("store.coordinator")


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def rights(clock: Clock) -> MissingRights:
    return MissingRights({"sasl.username": "shop"}, clock)


def test_a_refusal_is_said_at_once_and_the_same_one_only_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    missing = rights(clock)

    for _ in range(1_000):
        text = missing.refused("decisions cannot be published", WRITE)
    missing.refused("no partitions are to be had", READ)
    assert len(caplog.records) == 2

    clock.now += 31
    missing.refused("decisions cannot be published", WRITE)
    assert len(caplog.records) == 3
    assert text.startswith("decisions cannot be published: User:shop lacks the permission Write on topic store.done; ")
    assert [*missing.missing()] == ["Write on topic store.done", "Read on group store.coordinator"]
    assert missing.missing()["Write on topic store.done"] == text


def test_a_right_is_known_to_be_missing_until_it_is_seen_to_be_there_or_not_missed_for_long() -> None:
    clock = Clock()
    missing = rights(clock)
    missing.refused("this", WRITE)
    missing.refused("that", READ)

    missing.granted(WRITE)
    assert [*missing.missing()] == [str(READ)]

    clock.now += 60
    missing.refused("that", READ)
    clock.now += 60
    assert [*missing.missing()] == [str(READ)]
    clock.now += 60
    assert missing.missing() == {}


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ('Failed to add partition "bad" [1] to transaction: Broker: Topic authorization failed', True),
        ('AddPartitionsToTxn response: partition "bad": [1]: Broker: Unknown topic or partition', True),
        ('Failed to add partition "bad" [1] to transaction: Broker: Operation not attempted', False),
        ('AddPartitionsToTxn response: partition "bad": [1]: Broker: Not coordinator', False),
    ],
)
def test_topics_that_were_not_let_into_a_transaction_are_read_in_the_librarys_log(line: str, refused: bool) -> None:
    watch = EndWatch(logging.getLogger("test"), debugging=False)
    watch.log(logging.ERROR, "%s %s %s", "ADDPARTS", "client", f"[thrd:main]: TxnCoordinator/1: {line}")
    assert ("bad" in watch.refused) is refused
    assert is_forbidden(watch.refused.get("bad", "")) is ("authorization" in line)

    watch.begin()
    assert watch.refused == {}


def test_a_target_that_may_not_be_seen_is_reported_by_what_is_missing_and_not_as_absent() -> None:
    targets = Targets(
        lambda: {"well": 1}, "test", lambda missed: dict.fromkeys({"bad"}.intersection(missed), "lacks it")
    )
    now = 0.0

    def known(topic: str) -> str | None:
        nonlocal now
        now += 2.0
        why = targets.missing(topic, 1, now)
        return None if why is NOT_KNOWN else why

    assert wait_until(lambda: known("bad")) == "is not to be seen: lacks it"
    assert (wait_until(lambda: known("gone")) or "").startswith("does not exist")
    wait_until(lambda: targets.has("well", 1))


def test_a_refused_send_names_the_right_and_any_other_failure_does_not() -> None:
    sends = AckedProducer("127.0.0.1:1", {"sasl.username": "shop", "log_level": 0}, 1.0, "test")
    text = sends.why("store.half", KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    assert "User:shop lacks the permission Write on topic store.half" in text
    assert "lacks" not in sends.why("store.half", KafkaError(KafkaError._MSG_TIMED_OUT))
