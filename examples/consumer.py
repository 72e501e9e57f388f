"""The first program of the README: a handler gets the messages of each customer in order, on an embedded Kafka.

Run with: python examples/consumer.py, and end it with Ctrl-C.
"""

from confluent_kafka import Producer

import penstock
from penstock.devbroker import DevBroker

with DevBroker() as kafka:  # a real Kafka, for development; with your own, name its bootstrap_servers
    kafka.create_topic("orders", partitions=4)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for customer, order in [("alice", "a book"), ("bob", "a lamp"), ("alice", "a map")]:
        producer.produce("orders", order, customer)
    producer.flush()

    shop = penstock.App("shop", bootstrap_servers=kafka.bootstrap_servers, workers=16)

    @shop.handler("orders")
    def ship(message: penstock.Message) -> None:
        """Ship the orders of one customer one at a time and in order, those of all customers in parallel."""
        print(f"{message.key!r} gets {message.value!r}", flush=True)

    shop.run()  # until Ctrl-C or SIGTERM: then it finishes running handlers, commits and leaves the group
