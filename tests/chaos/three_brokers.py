"""All parts of penstock at work on a cluster, with plain clients, and the faults of the cluster's nodes.

What goes on is noted with its time, so that the longest standstill of each can be held against that of the plain
clients in the same run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sqlite3
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from chaos.fleet import KIP848, Fleet, messages
from chaos.publishing import Publishers, faults_of_exactly_once
from chaos.transfer import Killed, Transfer, faults
from kafka_tools import ANSWER_S
from penstock.devbroker import KAFKA_VERSION, DevBroker
from penstock.transactions import SqlStore
from waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 6
KEYS = 50
#: Messages, and transactions, a second, of each kind.
RATE = 20
#: What plain clients do: the measure of the others.
_PLAIN_CONSUMER = "a plain consumer"
_PLAIN_PRODUCERS = ("a plain transactional producer", "a second", "a third")
PLAIN = (_PLAIN_CONSUMER, *_PLAIN_PRODUCERS)
_STORES = ("kafka", "sql")
_LOADS = (
    "import sys, penstock.cli, penstock.cli.frame, penstock.cli.tx, penstock.transactions.stores.kafka.administration"
)


class Progress:
    """When what went on, in monotonic seconds. Written by many threads."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = defaultdict(list)

    def note(self, name: str, at: float | None = None) -> None:
        """Something went on."""
        self._times[name].append(time.monotonic() if at is None else at)

    def replace(self, name: str, times: list[float]) -> None:
        """Read the reports of other processes."""
        self._times[name] = times

    def goes_on(self, since: float) -> list[str]:
        """Return the streams that have gone on since then."""
        return [name for name, times in list(self._times.items()) if times and max(times) > since]

    def standstill(self, name: str, since: float, until: float) -> float:
        """Return the longest time without progress."""
        times = sorted(at for at in list(self._times[name]) if since < at < until)
        return max(later - earlier for earlier, later in itertools.pairwise([since, *times, until]))


class AtWork:
    """Everything at work; a context manager. Left, it is stopped; `faults` judges what happened.

    Args:
        cluster: three nodes, which may be harmed.
        folder: where members and coordinators write to.
        spark: with it, a query stores in a database what the coordinator on Kafka publishes.
        each: members of each group, and coordinators on Kafka: one or two.
    """

    def __init__(self, cluster: DevBroker, folder: Path, spark: SparkSession | None = None, each: int = 2) -> None:
        self.cluster, self._folder, self._spark, self._each = cluster, folder, spark, each
        self.servers = cluster.bootstrap_servers
        self.progress = Progress()
        self._open = contextlib.ExitStack()
        self._stopping = threading.Event()
        self._failures: list[str] = []
        for topic in ("fed", "plain", *(f"{store}-target" for store in _STORES)):
            cluster.create_topic(topic, PARTITIONS)
        self.fleets = {
            protocol: self._open.enter_context(self._fleet(protocol))
            for protocol in ("classic", "consumer")
            if protocol == "classic" or KAFKA_VERSION >= "4"
        }
        self.publishers = Publishers(cluster, folder, exactly_once=True, config={})
        self._open.callback(self.publishers.close)
        url = f"sqlite:///{folder / 'store.db'}"
        self.coordinators = [
            *(Killed(self.servers, "kafka", name, folder) for name in "ab"[:each]),
            Killed(self.servers, "sql", "c", folder, sql=url),
        ]
        store = SqlStore(url, bootstrap_servers=self.servers, prefix="sql")
        self.transfers = {
            "kafka": Transfer(self.servers, "kafka", "kafka-target", RATE, seed=1, send_timeout=120.0),
            "sql": Transfer(self.servers, "sql", "sql-target", RATE, seed=2, store=store, send_timeout=120.0),
        }

    @contextlib.contextmanager
    def _fleet(self, protocol: str) -> Iterator[Fleet]:
        (self._folder / protocol).mkdir()
        made = Fleet(self.cluster, "fed", PARTITIONS, self._folder / protocol, f"fed-{protocol}")
        try:
            yield made
        finally:
            made.close()

    @property
    def names(self) -> list[str]:
        """The streams that must go on, without the plain clients."""
        members = [f"members ({protocol})" for protocol in self.fleets]
        coordinators = [f"coordinators ({store})" for store in _STORES]
        return [*members, "exactly once", *coordinators, *(["spark"] if self._spark is not None else [])]

    def __enter__(self) -> Self:
        for one in self.coordinators:
            one.start()
            self._open.callback(one.kill)
        for protocol, fleet in self.fleets.items():
            for _ in range(self._each):
                fleet.start(config=KIP848 if protocol == "consumer" else {})
            # What one of them is fed is for both.
            fleet.produced = self.fleets["classic"].produced
        for _ in range(self._each):
            self.publishers.start()
        for transfer in self.transfers.values():
            self._open.enter_context(transfer)
        works = [self._feed, self._watch, self._consume_plainly]
        works += [functools.partial(self._publish_plainly, name) for name in _PLAIN_PRODUCERS]
        if self._spark is not None:
            works.append(self._store_by_spark)
        for work in works:
            thread = threading.Thread(target=self._guarded, args=(work,), daemon=True)
            thread.start()
            self._open.callback(thread.join, 60)
        self._open.callback(self._stopping.set)
        self._feeding = self._open.enter_context(self.publishers.fed(10**6, KEYS, 10**6 / RATE))
        self._open.callback(self.publishers.stop_feeding.set)
        self.await_all(time.monotonic())
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def await_all(self, since: float) -> None:
        """Wait until all have gone on since then."""
        missing = {*self.names, *PLAIN}

        def go_on() -> bool:
            assert not self._failures, self._failures
            self._read_members()
            missing.difference_update(self.progress.goes_on(since))
            return not missing

        try:
            wait_until(go_on, 180, 0.2)
        except AssertionError as error:
            raise AssertionError(f"{sorted(missing)} stand still: {error}") from error

    def standstills(self, harm: Callable[[], object]) -> dict[str, float]:
        """Do harm, wait until all go on again, and return the longest standstill of each, in seconds."""
        since = time.monotonic()
        harm()
        self.await_all(time.monotonic())
        until = time.monotonic()
        return {name: self.progress.standstill(name, since, until) for name in (*PLAIN, *self.names)}

    def processes(self) -> dict[str, int]:
        """Return the process ids of members and coordinators."""
        members = {f"{name} {one.name}": one.process.pid for name, f in self.fleets.items() for one in f.members}
        members |= {f"exactly once {name}": process.pid for name, process in self.publishers.members}
        return members | {f"coordinator {one.name}": one.pid for one in self.coordinators}

    def finish(self) -> list[str]:
        """Wait until all fed messages are done, and return the faults, as text."""
        self._stopping.set()
        self.publishers.stop_feeding.set()
        for transfer in self.transfers.values():
            transfer.finish()
        self._feeding.join(120)
        wrong = [f"a send failed: {one}" for transfer in self.transfers.values() for one in transfer.failures]
        for name, fleet in self.fleets.items():
            fleet.wait_settled(180)
            wrong += [f"members ({name}): {fault}" for fault in fleet.report(may_resend=True).faults]
            for member in fleet.members:
                member.terminate()
        self.publishers.finish(180)
        seen, batches = self.publishers.seen(), self.publishers.batches()
        # An idempotent producer whose leader dies while writes are refused may store what it retries twice.
        fed_twice = self.publishers.fed_twice()
        wrong += faults_of_exactly_once(seen, batches, self.publishers.fed_count, KEYS, fed_twice)
        for name, transfer in self.transfers.items():
            target, sent = f"{name}-target", transfer.sent
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not faults(self.servers, target, sent), 180, 5)  # noqa: B023 - asked at once
            wrong += [f"{target}: {fault}" for fault in faults(self.servers, target, sent)]
        if self._spark is not None:
            wrong += self._faults_of_spark()
        return wrong + self._failures

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test looks at them
            self._failures.append(f"{work}: {error!r}")

    def _read_members(self) -> None:
        for name, fleet in self.fleets.items():
            self.progress.replace(f"members ({name})", [one.end for one in fleet.calls if one.end is not None])

    def _feed(self) -> None:
        for number in itertools.count():
            if self._stopping.wait(5 / RATE):
                return
            self.fleets["classic"].feed((f"k{(number * 5 + n) % KEYS}", 0.01) for n in range(5))

    def _watch(self) -> None:
        """Read visible records as a reader of committed records, without a group."""
        topics = {f"{store}-target": f"coordinators ({store})" for store in _STORES}
        topics |= {self.publishers.names["results"]: "exactly once"}
        settings = {"bootstrap.servers": self.servers, "group.id": "watch", "enable.auto.commit": False}
        with contextlib.closing(Consumer({**settings, "auto.offset.reset": "earliest"})) as consumer:
            consumer.assign(
                [TopicPartition(topic, number, 0) for topic in (*topics, "plain") for number in range(PARTITIONS)]
            )
            while not self._stopping.is_set():
                for message in consumer.consume(100, 0.1):
                    if message.error() is None:
                        topic, value = message.topic() or "", message.value() or b""
                        self.progress.note(value.decode() if topic == "plain" else topics[topic])

    def _consume_plainly(self) -> None:
        settings = {"bootstrap.servers": self.servers, "group.id": "plain", "auto.offset.reset": "earliest"}
        # As the members, which have the app's own settings.
        with contextlib.closing(Consumer({**settings, "session.timeout.ms": 15_000})) as consumer:
            consumer.subscribe(["fed"])
            while not self._stopping.is_set():
                for message in consumer.consume(100, 0.1):
                    if message.error() is None:
                        self.progress.note(_PLAIN_CONSUMER)

    def _publish_plainly(self, name: str) -> None:
        """Publish in transactions with a record in each partition: they write to all nodes, as a coordinator's do.

        Kafka ends no transaction that wrote to a frozen node before it gives up its own request to that node: whether
        one is open there is chance, so there are three of these.
        """
        producer: Producer | None = None
        while not self._stopping.wait(len(_PLAIN_PRODUCERS) / RATE):
            try:
                if producer is None:
                    producer = Producer({"bootstrap.servers": self.servers, "transactional.id": name})
                    producer.init_transactions(60)
                producer.begin_transaction()
                for number in range(PARTITIONS):
                    producer.produce("plain", name.encode(), partition=number)
                producer.commit_transaction(60)
            except KafkaException:
                try:
                    if producer is not None:
                        producer.abort_transaction(60)
                except KafkaException:
                    producer = None

    def _store_by_spark(self) -> None:
        from pyspark.sql import functions

        from penstock.spark_sink import SqlSink

        assert self._spark is not None
        read = self._spark.readStream.format("penstock").option("kafka.bootstrap.servers", self.servers)
        frame = read.option("subscribe", "kafka-target").option("startingOffsets", "earliest").load()
        rows = frame.selectExpr("string(value) AS value", "topic", "partition", "offset")
        sink = SqlSink(f"sqlite:///{self._folder / 'rows.db'}", "seen", key=["value"], sum_columns=["times"])
        writer = rows.withColumn("times", functions.lit(1)).writeStream.queryName("seen").foreachBatch(sink)
        query = writer.option("checkpointLocation", str(self._folder / "checkpoint")).start()
        count = 0
        while not self._is_stored():
            assert query.isActive, str(query.exception())
            if (now := sum(self._stored().values())) > count:
                count = now
                self.progress.note("spark")
            # The database is polled, because it sends no notice.
            time.sleep(0.2)
        query.stop()

    def _stored(self) -> dict[str, int]:
        try:
            with contextlib.closing(sqlite3.connect(self._folder / "rows.db", timeout=30)) as connection:
                return dict(connection.execute("SELECT value, times FROM seen").fetchall())
        except sqlite3.OperationalError:
            return {}  # the first batch makes the table

    def _is_stored(self) -> bool:
        sent = self.transfers["kafka"].sent
        return self._stopping.is_set() and len(self._stored()) >= sent.count

    def _faults_of_spark(self) -> list[str]:
        with contextlib.suppress(AssertionError):
            wait_until(self._is_stored, 180, 1)
        wanted = {value.decode(): 1 for values in self.transfers["kafka"].sent.committed.values() for value in values}
        found = self._stored()
        return (
            [] if found == wanted else [f"spark stored {len(found)} of {len(wanted)}: {found.items() ^ wanted.items()}"]
        )


def set_all(servers: str, settings: Mapping[str, str]) -> None:
    """Set settings of every topic, Kafka's own too."""
    admin = AdminClient({"bootstrap.servers": servers})
    entries = [ConfigEntry(name, it, incremental_operation=AlterConfigOpType.SET) for name, it in settings.items()]
    resources = [
        ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
        for topic in admin.list_topics(timeout=ANSWER_S).topics
    ]
    for future in admin.incremental_alter_configs(resources).values():
        future.result(ANSWER_S)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def seconds_of_tx_ls(servers: str) -> tuple[float, float]:
    """Return how long `penstock tx ls` takes to list them, or to say that a broker is away.

    And how much of it a process takes to load what that needs: on a machine as busy as this, seconds.
    """
    command = ["tx", "ls", "--bootstrap-servers", servers, "--prefix", "kafka"]
    program = f"{_LOADS}; print('loaded', flush=True); sys.argv[1:] = {command}; penstock.cli.main()"
    begun = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as listing:
        assert listing.stdout is not None
        assert listing.stdout.readline() == "loaded\n"
        loaded_s = time.monotonic() - begun
        _, said = listing.communicate(timeout=60)
    assert listing.returncode == 0 or "check that all brokers run" in said, said
    return time.monotonic() - begun, loaded_s


__all__ = ["PLAIN", "AtWork", "cpu_s", "messages", "seconds_of_tx_ls", "set_all"]
