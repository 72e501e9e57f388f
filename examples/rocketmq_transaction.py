"""RocketMQ's own example of transactional messages, written with penstock.

    python examples/rocketmq_transaction.py [BOOTSTRAP_SERVERS]

Without an address it starts an embedded Kafka. As there (`TransactionProducer` and `TransactionListenerImpl` in
`org.apache.rocketmq.example.transaction`), ten messages are sent whose local transactions all end UNKNOWN, and the
check answers by a counter: a third commit, a third roll back, a third stay UNKNOWN, which here are discarded after
three checks; RocketMQ asks 15 times.

| RocketMQ                                         | here                                          |
|--------------------------------------------------|-----------------------------------------------|
| `TransactionMQProducer(group, namespace)`        | `TransactionalProducer(group, ...)`           |
| `setTransactionListener(listener)`               | `listener=`                                   |
| `setExecutorService(pool)`                       | `check_workers=`                              |
| `sendMessageInTransaction(message, argument)`    | `send_in_transaction(message, argument)`      |
| `message.getTransactionId()`                     | `message.transaction_id`                      |
| `LocalTransactionState.COMMIT_MESSAGE`, `UNKNOW` | `TransactionState.COMMIT`, `UNKNOWN`          |
| the broker                                       | a `Coordinator`, in any process               |
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import uuid

from confluent_kafka.admin import AdminClient, NewTopic

from penstock import Coordinator, HalfMessage, TransactionalProducer, TransactionState
from penstock.devbroker import DevBroker
from penstock.transactions import Outgoing


class TransactionListenerImpl:
    """The local transaction and its outcome. Many threads call it at once, so the table has a lock."""

    def __init__(self) -> None:
        self._index = itertools.count()
        self._local_transactions: dict[str, int] = {}
        self._lock = threading.Lock()

    def execute_local_transaction(self, message: HalfMessage, argument: object) -> TransactionState:  # noqa: ARG002 - the listener's interface
        """Record the transaction; its outcome is not known yet."""
        with self._lock:
            self._local_transactions[message.transaction_id] = next(self._index) % 3
        return TransactionState.UNKNOWN

    def check_local_transaction(self, half: HalfMessage) -> TransactionState:
        """Return the recorded outcome."""
        with self._lock:
            status = self._local_transactions.get(half.transaction_id)
        match status:
            case 0:
                return TransactionState.UNKNOWN
            case 2:
                return TransactionState.ROLLBACK
            case _:
                return TransactionState.COMMIT


def main(servers: str) -> None:
    """Send ten messages and wait until all are settled."""
    topic, prefix = f"TopicTest-{uuid.uuid4().hex[:8]}", f"example-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, 4)])[topic].result()
    tags = ("TagA", "TagB", "TagC", "TagD", "TagE")
    with (
        Coordinator(
            bootstrap_servers=servers, prefix=prefix, transaction_timeout=1.0, check_interval=0.5, check_max=3
        ) as coordinator,
        TransactionalProducer(
            "please_rename_unique_group_name",
            bootstrap_servers=servers,
            prefix=prefix,
            listener=TransactionListenerImpl(),
            check_workers=5,
        ) as producer,
    ):
        for number in range(10):
            message = Outgoing(topic, f"Hello Kafka {number}", f"KEY{number}", {"tags": tags[number % len(tags)]})
            result = producer.send_in_transaction(message, None)
            print(f"{result.state.name} {message.value}")
        while (now := coordinator.statistics()).committed + now.rolled_back + now.discarded < 10:  # noqa: PLR2004 - messages sent
            time.sleep(0.1)
    print(f"committed {now.committed}, rolled back {now.rolled_back}, discarded {now.discarded}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with DevBroker() as broker:
            main(broker.bootstrap_servers)
