"""Transactions at a steady rate, the coordinators that settle them and are killed, and the judgement of the result.

Every message is numbered within its key, and each key is used by one thread: so the order of its sends is known.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from kafka_tools import ANSWER_S, read_all
from penstock.transactions import HalfMessage, TransactionalProducer, TransactionState

#: Sending threads, and keys of each.
THREADS = 10
KEYS = 20


@dataclass
class Sent:
    """The sent values by key, in the order of their sends: committed ones and others."""

    committed: dict[bytes, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    rolled_back: set[bytes] = field(default_factory=set)

    @property
    def count(self) -> int:
        """How many were committed."""
        return sum(len(values) for values in list(self.committed.values()))


class Transfer:
    """Sends transactions, a third of them rolled back, at a rate, for as long as it is open.

    Args:
        bootstrap_servers: the broker's address.
        prefix: of the store.
        topic: the target.
        rate: transactions a second.
        seed: of what is rolled back.
        more: arguments of the producer; a `store` instead of Kafka.
    """

    def __init__(self, bootstrap_servers: str, prefix: str, topic: str, rate: float, seed: int, **more: Any) -> None:
        place = {} if "store" in more else {"bootstrap_servers": bootstrap_servers, "prefix": prefix}
        self._producer = TransactionalProducer("transfer", order="half", check=self._check, **place, **more)
        self._topic = topic
        self._pause_s = THREADS / rate
        self._seed = seed
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(number,)) for number in range(THREADS)]
        self.sent = Sent()
        #: Sends that raised: none should.
        self.failures: list[Exception] = []

    def __enter__(self) -> Self:
        self._producer.start()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        self._producer.stop()

    def finish(self) -> None:
        """Stop sending; the producer goes on answering checks."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)

    def _check(self, half: HalfMessage) -> TransactionState:
        rolled_back = half.value in self.sent.rolled_back
        return TransactionState.ROLLBACK if rolled_back else TransactionState.COMMIT

    def _send(self, number: int) -> None:
        chance = random.Random(self._seed + number)  # noqa: S311 - which of them are rolled back is no secret
        at, serial = time.monotonic(), 0
        while not self._stopping.wait(max(0.0, at - time.monotonic())):
            at += self._pause_s
            key = b"%d-%d" % (number, serial % KEYS)
            value = b"%s-%d" % (key, serial // KEYS)
            serial += 1
            back = chance.randrange(3) == 0
            # Written down before: a check may ask before the send returns.
            (self.sent.rolled_back.add if back else self.sent.committed[key].append)(value)
            state = TransactionState.ROLLBACK if back else TransactionState.COMMIT
            try:
                self._producer.send(self._topic, key=key, value=value, execute=lambda _, state=state: state)
            except Exception as error:  # noqa: BLE001 - the test looks at them
                self.failures.append(error)


class Killed:
    """A coordinator process that is killed and restarted under one instance name.

    Args:
        bootstrap_servers: the broker's address.
        prefix: of the store.
        instance: its name.
        folder: where its log goes.
        sql: a database that is its store, instead of Kafka.
    """

    def __init__(
        self, bootstrap_servers: str, prefix: str, instance: str, folder: Path, sql: str | None = None
    ) -> None:
        self.name = instance
        store = ["--instance", instance] if sql is None else ["--sql", sql]
        arguments = ["--bootstrap-servers", bootstrap_servers, "--prefix", prefix, *store]
        self._command = [sys.executable, "-m", "penstock", "coordinator", *arguments]
        self._log = folder / f"{instance}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.kills = 0

    def start(self) -> None:
        """Start it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End it as a power cut would."""
        process, self._process = self._process, None
        if process is not None:
            assert process.poll() is None, f"a coordinator ended by itself; see {self._log.read_text()[-3000:]}"
            process.kill()
            process.wait(30)
            self.kills += 1


def has_open_transaction(bootstrap_servers: str, topic: str) -> bool:
    """Return whether a transaction is open in a topic."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    numbers = admin.list_topics(topic, timeout=ANSWER_S).topics[topic].partitions
    asked = {TopicPartition(topic, number): OffsetSpec.latest() for number in numbers}
    ends = [
        [value.result(ANSWER_S).offset for value in admin.list_offsets(asked, isolation_level=level).values()]
        for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
    ]
    return ends[0] != ends[1]


def judge(seen: Iterable[tuple[bytes, bytes]], sent: Sent) -> list[str]:
    """Return the faults in what readers of committed records saw, as text.

    Args:
        seen: keys and values; those of one key in the order of their offsets.
        sent: what was sent.
    """
    by_key: dict[bytes, list[bytes]] = defaultdict(list)
    for key, value in seen:
        by_key[key].append(value)
    counts = Counter(value for values in by_key.values() for value in values)
    wanted = {value for values in sent.committed.values() for value in values}
    kinds = {
        "lost": wanted - set(counts),
        "seen more than once": {value for value, count in counts.items() if count > 1},
        "rolled back and seen": sent.rolled_back & set(counts),
        "never sent": set(counts) - wanted - sent.rolled_back,
        "of keys out of order": {key for key, values in by_key.items() if not _follows(values, sent.committed[key])},
    }
    return [f"{len(bad)} {kind}: {sorted(bad)[:5]}" for kind, bad in kinds.items() if bad]


def _follows(values: Sequence[bytes], order: Sequence[bytes]) -> bool:
    """Return whether seen values are in order, apart from missing, repeated and foreign ones."""
    place = {value: number for number, value in enumerate(order)}
    first_seen = [place[value] for value in dict.fromkeys(values) if value in place]
    return first_seen == sorted(first_seen)


def faults(bootstrap_servers: str, topic: str, sent: Sent) -> list[str]:
    """Return the faults in what readers of committed records see now."""
    return judge(((m.key() or b"", m.value() or b"") for m in read_all(bootstrap_servers, topic)), sent)
