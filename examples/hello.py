"""The smallest whole program: transactional producer, coordinator and ordered consumer on an embedded Kafka.

Run with: .venv/bin/python examples/hello.py
"""

import penstock
from penstock.devbroker import DevBroker

PAID = [True, False, True]

with DevBroker() as kafka:
    kafka.create_topic("orders", partitions=4)
    shop = penstock.App("shop", bootstrap_servers=kafka.bootstrap_servers, workers=16)

    @shop.handler("orders", retry=penstock.retry(attempts=3), on_failure="dead_letter")
    def ship(order: penstock.Message) -> None:
        """Ship one customer's orders one at a time and in order, all customers at once."""
        print(f"shipping {order.value!r} for {order.key!r}")

    till = penstock.TransactionalProducer("till", bootstrap_servers=kafka.bootstrap_servers)
    with penstock.Coordinator(bootstrap_servers=kafka.bootstrap_servers), till, shop.start() as running:
        for number, paid in enumerate(PAID, start=1):
            with till.transaction("orders", key=b"alice", value=b"order %d" % number) as tx:
                if not paid:  # your local transaction decides: raise an exception, or call rollback
                    tx.rollback()
        while running.statistics().handled < sum(PAID) and not running.wait(0.1):
            pass
