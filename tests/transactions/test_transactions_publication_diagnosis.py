"""What is told to who waited for a publication that did not come."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from transaction_tools import Bench

from penstock.errors import BrokerConnectionError, PublicationNotSeenError
from penstock.transactions import TransactionalProducer
from penstock.transactions.stores.kafka.publication import Observation, PublicationDiagnosis, why
from penstock.transactions.stores.kafka.status import Status, encode_status
from waiting import wait_until

NOTHING = Observation(frozenset({"t"}), (), 1)


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (NOTHING, ""),
        (NOTHING._replace(topics=frozenset()), "topic t, which does not exist"),
        (NOTHING._replace(statuses=(Status("c", 0, targets={"u": "too large"}),)), ""),
        (NOTHING._replace(statuses=(Status("c", 0, targets={"t": "no right"}),)), "topic t to take it: no right"),
        (NOTHING._replace(coordinators=0), "a coordinator of store: none runs, so start one"),
        (NOTHING._replace(coordinators=None), ""),
        (NOTHING._replace(statuses=(Status("c", 0, halts=("Kafka: x",)),)), "Kafka: x"),
    ],
)
def test_the_cause_is_named_as_far_as_it_is_seen(found: Observation, cause: str) -> None:
    assert why(found, ["t"], "store") == cause


def test_a_crowd_that_waits_for_the_same_looks_once() -> None:
    looks: list[int] = []

    def look() -> Observation:
        looks.append(1)
        return NOTHING._replace(coordinators=0)

    causes = PublicationDiagnosis(look, "store")

    assert {causes.cause(["t"]) for _ in range(100)} == {"a coordinator of store: none runs, so start one"}
    assert len(looks) == 1


def test_a_look_that_hangs_is_left_behind_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transactions.stores.kafka.publication._LOOKUP_BUDGET_S", 0.05)
    monkeypatch.setattr("penstock.transactions.stores.kafka.publication._LOOKUP_VALID_S", 0.0)
    held, looks = threading.Event(), []

    def look() -> Observation:
        looks.append(1)
        held.wait(60)
        return NOTHING

    causes = PublicationDiagnosis(look, "store")

    assert [causes.cause(["t"]) for _ in range(5)] == [""] * 5
    assert len(looks) == 1
    held.set()


def test_a_broker_that_does_not_answer_is_a_cause() -> None:
    def look() -> Observation:
        raise BrokerConnectionError("none")

    assert PublicationDiagnosis(look, "store").cause(["t"]) == "Kafka, of which no broker answers"


def unseen(producer: TransactionalProducer, topic: str, value: bytes = b"v") -> str:
    with pytest.raises(PublicationNotSeenError) as raised:
        producer.send(topic, value=value, wait="published")
    return str(raised.value)


def test_who_waits_for_a_publication_is_told_what_is_missing(
    bench: Bench, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.stores.kafka.publication._LOOKUP_VALID_S", 0.0)
    gone, producer = new_topic(), bench.producer(publish_timeout=1.0)
    producer.send(gone, value=b"known")

    without_coordinator = unseen(producer, bench.topic)
    coordinator = bench.coordinator(transaction_timeout=600)
    bench.settled(coordinator, committed=2)
    (deleted,) = bench.admin.delete_topics([gone]).values()
    deleted.result(30)
    wait_until(lambda: gone not in bench.admin.list_topics(timeout=10).topics)
    to_a_missing_topic = unseen(producer, gone)

    assert "none runs, so start one; it is published then: look with `penstock tx show " in without_coordinator
    assert f"it waits for topic {gone}, which does not exist" in to_a_missing_topic


def test_who_waits_for_a_publication_is_told_what_the_coordinators_tell(bench: Bench) -> None:
    status = Status("c1", 0, (0, 1), targets={bench.topic: "Broker: Topic authorization failed"})
    bench.write(bench.topics.status, 0, b"c1", encode_status(status))

    told = unseen(bench.producer(publish_timeout=1.0), bench.topic)

    assert f"it waits for topic {bench.topic} to take it: Broker: Topic authorization failed" in told
