"""A group that counts messages by key in PostgreSQL, its members as processes, and what there is to find after it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from databases import TestDatabase, driver_connect
from kafka_tools import produce
from penstock import create_inbox_table
from support.consumers import Broker, all_committed
from waiting import wait_until

MEMBER = Path(__file__).with_name("inbox_member.py")
#: Where a member may be killed, in this order.
STEPS = ("begun", "recorded", "written", "committed")


@dataclass(frozen=True, slots=True)
class CountingOptions:
    """The options of a member process.

    Attributes:
        path: file to which it writes what it meets.
        bootstrap_servers: addresses of the broker.
        database: address of the database, for psycopg.
        group: the group.
        singles: topic whose messages are handled one by one.
        batched: topic whose messages are handled in batches.
        seed: of its chances.
        failures: the chance of failing at a step, of a first try and the next two.
        dies_at: how often each step is passed until it is killed there.
        config: librdkafka's keys.
    """

    path: str
    bootstrap_servers: str
    database: str
    group: str
    singles: str
    batched: str
    seed: int = 0
    failures: float = 0.0
    dies_at: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, str | int] = field(default_factory=lambda: {"session.timeout.ms": 6000})


class Counting:
    """The members of a group, the database and the fed messages.

    Args:
        broker: a broker without faults.
        database: a database of PostgreSQL.
        topics: the two topics, of `partitions` each.
        partitions: how many.
        folder: where members write.
    """

    def __init__(
        self, broker: Broker, database: TestDatabase, topics: tuple[str, str], partitions: int, folder: Path
    ) -> None:
        self._servers = broker.bootstrap_servers
        self.database = database
        self._topics, self._partitions = topics, partitions
        self._group = f"counting-{topics[0]}"
        self._folder = folder
        self._fed: Counter[str] = Counter()
        self.processes: list[subprocess.Popen[bytes]] = []
        with closing(driver_connect(database)()) as connection:
            create_inbox_table(connection)
        database.execute("CREATE TABLE counters (key TEXT PRIMARY KEY, n BIGINT NOT NULL)")

    def feed(self, count: int, keys: int) -> None:
        """Write `count` messages of `keys` keys to both topics."""
        for topic, kind in zip(self._topics, "sb", strict=True):
            named = [f"{kind}{number % keys}" for number in range(count)]
            produce(self._servers, topic, [(key.encode(), b"v") for key in named])
            self._fed.update(named)

    def start(self, instance: str | None = None, **options: object) -> subprocess.Popen[bytes]:
        """Start a member; with `instance`, instead of that former one."""
        config = {"session.timeout.ms": 6000} | ({} if instance is None else {"group.instance.id": instance})
        given = CountingOptions(
            str(self._folder / "met"),
            self._servers,
            self.database.url.replace("postgresql+psycopg", "postgresql"),
            self._group,
            *self._topics,
            config=config,
            **options,  # type: ignore[arg-type] # named options of a dataclass
        )
        with (self._folder / f"member-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen([sys.executable, MEMBER, json.dumps(asdict(given))], stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def is_done(self) -> bool:
        """Return whether the group has committed all fed messages, and those of retry topics are counted."""
        return self.counted() == self._fed and all(
            all_committed(self._servers, self._group, topic, self._partitions) for topic in self._topics
        )

    def counted(self) -> Counter[str]:
        """Return the counts of the members."""
        return Counter(dict(self.database.rows("SELECT key, n FROM counters")))

    def met(self) -> Counter[str]:
        """Return what members wrote down: how often they were killed at each step, and knew a message already."""
        path = self._folder / "met"
        return Counter(path.read_text().splitlines() if path.exists() else [])

    def stop(self) -> None:
        """Have the members leave."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in running] == [0] * len(running)

    def close(self) -> None:
        """End what still runs."""
        for process in self.processes:
            process.kill()
            process.wait()

    def faults(self) -> list[str]:
        """Return for which keys the count is not that of their messages."""
        counted = self.counted()
        return [
            f"{key} has {fed} messages and counts {counted[key]}"
            for key, fed in self._fed.items()
            if counted[key] != fed
        ]

    def wait_done(self, timeout: float) -> None:
        """Wait until all is done; fail at once if a message was counted too often."""
        wait_until(lambda: self.is_done() or any(n > self._fed[key] for key, n in self.counted().items()), timeout)
