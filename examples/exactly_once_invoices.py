"""Orders come in, and each gets one invoice, though the process that writes them is killed on the way.

    python examples/exactly_once_invoices.py [BOOTSTRAP_SERVERS]

Without an address it starts an embedded Kafka. With `exactly_once=True` an invoice and the offset of its order are in
one Kafka transaction: an order whose invoice a reader of committed messages sees is never handled again, and one whose
invoice nobody sees always is. It takes up to half a minute: so long brokers may keep the transaction of a process that
was killed open.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import penstock
from penstock.devbroker import DevBroker

ORDERS, CUSTOMERS = 1_000, 20


def work(servers: str, orders: str, invoices: str, name: str) -> None:
    """The worker: what runs in a process of its own."""
    app = penstock.App(
        f"billing-{orders}",
        bootstrap_servers=servers,
        workers=8,
        exactly_once=True,
        config={
            "session.timeout.ms": 6_000
        },  # so soon the group gives the partitions of one that was killed to another
    )

    @app.handler(orders, decoder="json", to=invoices, encoder="json")
    def invoice(message: penstock.Message) -> dict[str, object]:
        """Return the invoice of an order; it gets the order's key."""
        order = cast("dict[str, Any]", message.body)
        time.sleep(0.02)  # for what a real one has to look up
        return {"order": order["id"], "sum": order["price"] * order["copies"], "by": name}

    app.run()


def place_orders(servers: str, topic: str) -> None:
    """Write the orders, in turn those of each customer."""
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})
    for number in range(ORDERS):
        order = {"id": number, "price": 3, "copies": 1 + number % 4}
        producer.produce(topic, json.dumps(order), key=f"customer-{number % CUSTOMERS}")
    producer.flush()


def committed(servers: str, topic: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield key and value of all messages of a topic with one partition, as a reader of committed ones sees them."""
    settings = {"group.id": "judge", "isolation.level": "read_committed", "enable.auto.commit": False}
    reader = Consumer({"bootstrap.servers": servers, **settings})
    reader.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    while True:
        message = reader.poll(1.0)
        if message is not None and message.error() is None:
            yield message.key().decode(), json.loads(message.value())


def main(servers: str) -> None:
    """Run two workers, one after the other, and judge what they have written."""
    orders, invoices = (f"{name}-{uuid.uuid4().hex[:8]}" for name in ("orders", "invoices"))
    admin = AdminClient({"bootstrap.servers": servers})
    for created in admin.create_topics([NewTopic(orders, 4), NewTopic(invoices, 1)]).values():
        created.result()
    place_orders(servers, orders)

    processes = multiprocessing.get_context("spawn")
    first, second = (
        processes.Process(target=work, args=(servers, orders, invoices, name)) for name in ("the first", "the second")
    )
    reader = committed(servers, invoices)
    first.start()
    seen = [next(reader)]
    first.kill()
    second.start()
    while len({invoice["order"] for _, invoice in seen}) < ORDERS:
        seen.append(next(reader))
    second.terminate()  # it commits what it has done, and leaves its group
    second.join()
    # Whatever else the workers have written stands in front of this.
    place_orders(servers, invoices)
    while "order" in (last := next(reader))[1]:
        seen.append(last)

    by = Counter(invoice["by"] for _, invoice in seen)
    print(f"{ORDERS} orders, {len(seen)} invoices:", ", ".join(f"{count} by {name}" for name, count in by.items()))
    numbers = {key: [invoice["order"] for one, invoice in seen if one == key] for key, _ in seen}
    print("in the order of each customer:", "yes" if all(one == sorted(one) for one in numbers.values()) else "no")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with DevBroker() as broker:
            main(broker.bootstrap_servers)
