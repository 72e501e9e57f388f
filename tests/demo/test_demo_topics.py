"""What a plain client finds in a topic of flights."""

from __future__ import annotations

import threading
from collections.abc import Callable

from confluent_kafka import Producer

from kafka_tools import wait_for_markers
from penstock.demo.flights import Flight
from penstock.demo.topics import PublishedFlights, read_to_end
from penstock.devbroker import DevBroker
from waiting import wait_until

FLIGHTS = [Flight(number, f"N{number}", "BOS", 0, departed=True) for number in range(40)]


def send(broker: DevBroker, topic: str, flights: list[Flight], *, commit: bool) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": topic})
    producer.init_transactions()
    producer.begin_transaction()
    for flight in flights:
        producer.produce(topic, key=flight.key, value=flight.to_json())
    if commit:
        producer.commit_transaction()
    else:
        assert producer.flush(60) == 0
        producer.abort_transaction()
    wait_for_markers(broker.bootstrap_servers, topic)


def test_committed_flights_are_read_to_the_end_past_aborted_ones(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(partitions=3)
    send(broker, topic, FLIGHTS[:30], commit=True)
    send(broker, topic, FLIGHTS[30:], commit=False)

    found = read_to_end(broker.bootstrap_servers, topic)

    assert sorted(flight.sequence for flight in found) == list(range(30))


def test_an_empty_topic_has_an_end(broker: DevBroker, new_topic: Callable[..., str]) -> None:
    topic = new_topic(partitions=2)

    assert read_to_end(broker.bootstrap_servers, topic) == []


def test_published_flights_are_seen_as_they_come(broker: DevBroker, new_topic: Callable[..., str]) -> None:
    topic = new_topic(partitions=2)
    failures: list[BaseException] = []
    published = PublishedFlights(broker.bootstrap_servers, topic, failures.append)
    send(broker, topic, FLIGHTS[:10], commit=True)

    published.start()
    wait_until(lambda: published.sequences == set(range(10)))
    send(broker, topic, FLIGHTS[10:20], commit=True)
    wait_until(lambda: published.sequences == set(range(20)))
    published.stop()

    assert failures == []
    assert "penstock-demo-published" not in {thread.name for thread in threading.enumerate()}


def test_a_topic_that_is_missing_is_told_to_the_waiting_side(broker: DevBroker) -> None:
    failures: list[BaseException] = []
    published = PublishedFlights(broker.bootstrap_servers, "no-such-topic-of-flights", failures.append)

    published.start()
    wait_until(lambda: failures)
    published.stop()

    assert "no-such-topic-of-flights" in str(failures[0])
