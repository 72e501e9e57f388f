"""One replica of an app runs a sink: by a group of a real broker, with queries that are none; then with Spark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Self, cast

import pytest
import sqlalchemy as sa
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin import NewTopic as KafkaTopic
from streams import SPARK_S
from supervised_world import World, app_sinks, report

from kafka_tools import NewTopic, committed, produce
from penstock.devbroker import DevBroker
from penstock.fleet.probes.health import Health, HealthLimits
from penstock.running import RunningApp
from penstock.spark_sink.progress import SinkState, SinkStatistics
from penstock.spark_sink.queries.app_sinks import AppSinks
from penstock.spark_sink.queries.fleet import Fleet
from penstock.spark_sink.queries.sink_specs import SinkSpec
from waiting import wait_until

CHILD = Path(__file__).with_name("fleet_child.py")


class Replica:
    """The sinks of an app with one query, whose fleet is a member of a real group."""

    def __init__(self, servers: str, topic: str) -> None:
        spec = SinkSpec(topics=(topic,), function=print, name="orders")
        self.fleet = Fleet(topic, [spec], servers, {"topic.metadata.refresh.interval.ms": 200}, 10.0)
        self.world = World()
        self.sinks = app_sinks(10.0)

    def __enter__(self) -> Self:
        self.fleet.join()
        self.sinks.supervise([self.world.supervised], self.fleet)
        return self

    def __exit__(self, *_: object) -> None:
        self.sinks.stop(10)

    @property
    def state(self) -> SinkState:
        return self.world.supervised.state

    def report(self, topic: str) -> None:
        """Have the query, where it runs, report how far it is: until it does, it may go to the other replica."""
        if self.state is SinkState.RUNNING:
            run, end = f"run-{len(self.world.started)}", {topic: {"0": 4, "2": 6}}
            self.world.query.recentProgress.append(report(0, run=run, end=end, latest={}))
            self.world.now += 10


#: What a running replica reports of three partitions.
SHOWN = [4, OFFSET_INVALID, 6]


def offsets(servers: str, topic: str) -> list[int]:
    """Return the commits of the sinks' group for three partitions."""
    return [part.offset for _, part in sorted(committed(servers, f"{topic}-sinks", topic, 3).items())]


def test_one_of_two_replicas_runs_a_sink_shows_its_offsets_and_the_other_takes_over_when_it_ends(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    servers, topic = broker.bootstrap_servers, new_topic(partitions=3)
    with Replica(servers, topic) as second:
        with Replica(servers, topic) as first:
            wait_until(lambda: sorted([first.state.value, second.state.value]) == ["running", "standby"])
            held, waiting = (first, second) if first.state is SinkState.RUNNING else (second, first)
            holder = wait_until(lambda: waiting.fleet.holder("orders"))
            assert holder.startswith(f"{os.uname().nodename}-{os.getpid()} at 127.0.0.1")
            wait_until(
                lambda: [replica.report(topic) for replica in (first, second)] and offsets(servers, topic) == SHOWN
            )
            ended = held.world.query if held is first else None
        wait_until(lambda: second.state is SinkState.RUNNING)

    assert ended is None or ended.stops == 1
    assert second.world.query.stops == 1


@pytest.mark.thorough
def test_the_sink_of_a_topic_that_is_deleted_stands_by_until_the_topic_is_there_again(
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    with Replica(broker.bootstrap_servers, topic) as first, Replica(broker.bootstrap_servers, topic) as second:
        replicas = [first, second]
        wait_until(lambda: sorted(replica.state.value for replica in replicas) == ["running", "standby"])
        admin.delete_topics([topic])[topic].result(30)

        wait_until(lambda: [replica.state for replica in replicas] == [SinkState.STANDBY] * 2)
        wait_until(lambda: f"Subscribed topic not available: {topic}" in caplog.text)

        admin.create_topics([KafkaTopic(topic, 1)])[topic].result(30)
        wait_until(lambda: sorted(replica.state.value for replica in replicas) == ["running", "standby"])


def test_a_sink_that_stands_by_says_who_runs_it_and_leaves_its_replica_ready() -> None:
    standby = SinkStatistics(name="orders", state=SinkState.STANDBY, holder="host-7 at 10.0.0.5")
    health = Health("fleet", HealthLimits())
    health.running = RunningApp(None, None, [], cast("AppSinks", SimpleNamespace(statistics=lambda: [standby])))

    assert str(standby) == "sink orders: standby, host-7 at 10.0.0.5 runs it"
    assert health.ready() == []


def test_offsets_that_the_brokers_refuse_are_sent_again_with_the_next_question_who_holds_the_sinks(
    broker: DevBroker, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, topic, refused = broker.bootstrap_servers, new_topic(partitions=3), list[object]()
    monkeypatch.setattr("penstock.spark_sink.queries.fleet._HOLDERS_S", 0.5)

    def refuse(**offsets: object) -> None:
        refused.append(offsets)
        raise KafkaException(KafkaError(KafkaError.REBALANCE_IN_PROGRESS))

    with Replica(servers, topic) as replica:
        wait_until(lambda: replica.state is SinkState.RUNNING)
        member = replica.fleet._member
        assert member is not None
        with monkeypatch.context() as faulty:
            faulty.setattr(replica.fleet, "_member", SimpleNamespace(commit=refuse, poll=member.poll))
            wait_until(lambda: replica.report(topic) or len(refused) > 1)
            assert offsets(servers, topic) == [OFFSET_INVALID] * 3

        wait_until(lambda: offsets(servers, topic) == SHOWN)


@contextmanager
def child(
    name: str, servers: str, topic: str, folder: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """Run a replica process; yield it with its report on its sink."""
    state_file = folder / f"{name}.json"
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(CHILD), servers, topic, str(folder), str(state_file)], stdout=log, stderr=log
        )
        try:
            yield process, lambda: json.loads(state_file.read_text())["state"] if state_file.exists() else ""
        finally:
            process.kill()
            process.wait(30)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_sinks_go_from_a_replica_that_is_frozen_or_killed_to_the_other_and_each_message_is_stored_once(
    broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    servers, topic = broker.bootstrap_servers, new_topic(partitions=2)
    sent = 0

    def stored() -> list[int]:
        engine = sa.create_engine(f"sqlite:///{tmp_path}/rows.db")
        with engine.connect() as connection:
            return sorted(row[0] for row in connection.exec_driver_sql("SELECT number FROM rows"))

    def send(count: int) -> None:
        nonlocal sent
        produce(servers, topic, [(b"%d" % number, b"%d" % number) for number in range(sent, sent + count)])
        sent += count

    send(100)
    with child("one", servers, topic, tmp_path) as one, child("two", servers, topic, tmp_path) as two:
        # Either may have come first.
        wait_until(lambda: {one[1](), two[1]()} == {"running", "standby"}, timeout=2 * SPARK_S)
        (first, first_state), (second, second_state) = (one, two) if one[1]() == "running" else (two, one)
        wait_until(lambda: len(stored()) == sent, timeout=SPARK_S)

        send(2_000)
        first.send_signal(signal.SIGSTOP)
        wait_until(lambda: second_state() == "running", timeout=SPARK_S)
        wait_until(lambda: len(stored()) >= sent, timeout=SPARK_S)
        send(2_000)
        first.send_signal(signal.SIGCONT)
        wait_until(lambda: first_state() == "standby", timeout=SPARK_S)
        second.kill()
        second.wait(30)
        wait_until(lambda: first_state() == "running", timeout=SPARK_S)
        send(100)
        wait_until(lambda: len(stored()) >= sent, timeout=SPARK_S)
        assert first.poll() is None

    assert stored() == list(range(sent))
