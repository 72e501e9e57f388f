"""Reading a topic without the engines: what a plain read_committed client finds in it."""

from __future__ import annotations

from contextlib import closing

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from demo.children import DemoError
from demo.flights import Flight

#: Seconds in which brokers say which partitions there are.
_ANSWER_S = 30.0

#: Seconds without a record after which the reading gives up.
_SILENCE_S = 30.0


def read_to_end(bootstrap_servers: str, topic: str) -> list[Flight]:
    """Return every committed record of a topic of flights, up to the end it has now."""
    settings = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": "penstock-demo-reader",  # the client wants a name; nothing is committed under it
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 100,
    }
    with closing(Consumer(settings)) as consumer:
        partitions = consumer.list_topics(topic, _ANSWER_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
        flights: list[Flight] = []
        at_end: set[int | None] = set()
        while len(at_end) < len(partitions):
            message = consumer.poll(_SILENCE_S)
            if message is None:
                raise DemoError(f"topic {topic} was not read to its end; look at the broker's log")
            error = message.error()
            if error is None:
                flights.append(Flight.from_json(message.value() or b""))
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - its public name
                at_end.add(message.partition())
            else:
                raise DemoError(f"topic {topic} cannot be read: {error.str()}; look at the broker's log")
        return flights
