"""Makes the topic that an example consumes, and writes its messages.

penstock broker                                      # in a separate terminal; or use your own Kafka
export PENSTOCK_BOOTSTRAP_SERVERS=127.0.0.1:9092     # for this and for all commands below
python examples/feed.py TOPIC                        # baskets, readings, shop-events, payments, ...
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient, NewTopic

Record = tuple[str | None, str, list[tuple[str, str | bytes | None]]]


def records(topic: str) -> Iterator[Record]:
    """Return key, value and headers of the messages of an example's topic."""
    if topic == "baskets":
        yield from ((f"customer-{n % 40}", f"basket {n}", []) for n in range(200))
    elif topic == "readings":
        for n in range(500):
            yield f"sensor-{n % 20}", json.dumps({"celsius": None if n in {7, 157, 307} else n / 10}), []
        yield "sensor-1", "not JSON", []
    elif topic == "shop-events":
        for n in range(60):
            what = "order" if n % 3 else "visit"
            value = json.dumps({"item": f"book {n}", "copies": n}) if what == "order" else "-"
            yield None, value, [("type", what), ("customer", f"customer-{n % 4}")]
        yield None, json.dumps({"item": "book 60"}), [("type", "order"), ("customer", "customer-0")]
    elif topic == "payments":
        for n in range(30):
            payment = {"id": f"payment-{n}", "amount": 100 + n, "currency": "GBP" if n in {7, 17} else "EUR"}
            yield f"account-{n % 5}", json.dumps(payment), []
    elif topic in {"notifications", "alerts"}:
        yield from ((f"device-{n % 8}", f"text {n}", []) for n in range(80))
    elif topic == "parcels":
        yield from ((f"street-{n % 10}", f"parcel {n}", []) for n in range(100))
    else:
        sys.exit(f"no example consumes {topic!r}")


if __name__ == "__main__":
    servers, name = os.environ["PENSTOCK_BOOTSTRAP_SERVERS"], sys.argv[1]
    written = list(records(name))
    admin = AdminClient({"bootstrap.servers": servers})
    error = admin.create_topics([NewTopic(name, num_partitions=2)])[name].exception()
    if error is not None and error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
        raise error
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})
    for key, value, headers in written:
        producer.produce(name, value, key, headers=headers)
    producer.flush()
    print(f"{len(written)} messages are in {name}")
