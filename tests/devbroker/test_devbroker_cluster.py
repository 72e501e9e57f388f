from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer

from commands import commands
from penstock import App, Coordinator, SqlStore, clients
from penstock.clients import admin
from penstock.clients.answers import asked_until_ready
from penstock.clients.factory import REPLICATION_FACTOR
from penstock.clients.topics import log_ends, single_copies
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, DevBrokerError
from support.replication import elect_preferred, reassign, replicas

pytestmark = pytest.mark.thorough  # three brokers

#: Asks for a topic by clients that take different nodes for the controller; prints the CPU seconds of 15 s.
ASKS = """
import sys, threading, time
from confluent_kafka import KafkaException, TopicCollection
from penstock import clients
from penstock.clients.topics import described
def ask(admin):
    while True:
        described(admin, [sys.argv[2]])
        time.sleep(1)
admins = [clients.admin(sys.argv[1], {}) for _ in range(8)]
for admin in admins:
    described(admin, [sys.argv[2]])
    threading.Thread(target=ask, args=(admin,), daemon=True).start()
print("asking", flush=True)
sys.stdin.readline()
begun = time.process_time()
time.sleep(15)
print(time.process_time() - begun, flush=True)"""

TOPIC, PARTITIONS = "replicated", 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevBroker]:
    """Three brokers that the tests of this file may harm, and leave in sync."""
    with DevBroker(nodes=3) as running:
        running.create_topic(TOPIC, PARTITIONS)
        yield running


def send(cluster: DevBroker, value: bytes) -> None:
    errors: list[object] = []
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "acks": "all"})
    producer.produce(TOPIC, value, partition=0, on_delivery=lambda error, _: errors.append(error))
    producer.flush(60)
    assert errors == [None]


def test_each_topic_has_three_copies_and_each_node_leads(cluster: DevBroker) -> None:
    copies = [replicas(cluster, topic) for topic in (TOPIC, "__transaction_state")]

    leaders = {cluster.leader_of(TOPIC, partition) for partition in range(PARTITIONS)}

    assert all(sorted(nodes) == [1, 2, 3] for found in copies for nodes in found.values())
    assert leaders == {1, 2, 3}
    assert len(cluster.bootstrap_servers.split(",")) == 3


def test_who_waits_for_a_node_that_is_down_takes_no_core(cluster: DevBroker) -> None:
    command = [sys.executable, "-c", ASKS, cluster.bootstrap_servers, TOPIC]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "asking\n"
        cluster.kill(2)
        used_s = float(child.communicate("\n", timeout=120)[0])
        child.kill()
    cluster.restart(2)
    cluster.wait_in_sync()

    # Where they connect without a pause, ten times as much.
    assert used_s < 2


def test_a_killed_leader_has_a_successor_and_comes_back_in_sync(cluster: DevBroker) -> None:
    send(cluster, b"before")
    killed = cluster.leader_of(TOPIC, 0)

    cluster.kill(killed)
    successor = cluster.leader_of(TOPIC, 0)
    was_running = cluster.running
    send(cluster, b"meanwhile")
    cluster.restart(killed)
    cluster.wait_in_sync()
    elect_preferred(cluster)
    again = cluster.leader_of(TOPIC, 0)

    assert successor != killed
    assert not was_running
    assert again == killed == replicas(cluster, TOPIC)[0][0]
    reader = Consumer(
        {"bootstrap.servers": cluster.bootstrap_servers, "group.id": "reader", "auto.offset.reset": "earliest"}
    )
    reader.subscribe([TOPIC])
    try:
        assert [message.value() for message in reader.consume(2, timeout=60)] == [b"before", b"meanwhile"]
    finally:
        reader.close()


def test_where_a_log_ends_is_known_again_soon_after_its_leader_has_changed(cluster: DevBroker) -> None:
    admin, places = clients.admin(cluster.bootstrap_servers, {}), [(TOPIC, number) for number in range(PARTITIONS)]
    log_ends(admin, places, 30)
    killed = cluster.leader_of(TOPIC, 0)

    cluster.kill(killed)
    cluster.restart(killed)
    cluster.wait_in_sync()
    elect_preferred(cluster)

    # A client that keeps what it knew of leaders is refused for a quarter of an hour.
    assert asked_until_ready(lambda: log_ends(admin, places, 5), 30).keys() == set(places)


def test_a_frozen_node_answers_nothing_until_it_is_thawed_and_the_others_go_on(cluster: DevBroker) -> None:
    node, frozen = cluster._nodes[1], 2

    cluster.freeze(frozen)
    try:
        assert not node.can_answer
        with pytest.raises(KafkaException):
            node.metadata(TOPIC)
        assert replicas(cluster, TOPIC)
    finally:
        cluster.thaw(frozen)

    cluster.wait_in_sync()
    assert node.can_answer


def test_partitions_move_to_other_nodes(cluster: DevBroker) -> None:
    cluster.create_topic("moving", 3)

    reassign(cluster, "moving", {0: [3, 1], 1: [2]})

    found = replicas(cluster, "moving")
    assert found[0] == [3, 1]
    assert found[1] == [2]
    assert sorted(found[2]) == [1, 2, 3]


def test_check_and_doctor_name_a_topic_with_one_copy_unless_it_is_wanted(
    cluster: DevBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers, configs = cluster.bootstrap_servers, ({REPLICATION_FACTOR: 1}, {})
    apps = [App("shop", bootstrap_servers=servers, config=config) for config in configs]
    for app in apps:
        app.handler(TOPIC, on_failure="dead_letter")(lambda _message: None)
    apps[0].start().stop()

    wanted, found = (single_copies(admin(servers, config), {TOPIC, f"dlq.{TOPIC}"}) for config in configs)
    printed = commands(monkeypatch, capsys)("doctor", "--bootstrap-servers", servers)

    assert {len(nodes) for nodes in replicas(cluster, f"dlq.{TOPIC}").values()} == {1}
    assert [text.split(" on ")[0] for text in found] == [f"topic dlq.{TOPIC} has replication factor 1"]
    assert wanted == []
    assert f"warning: {found[0]}" in printed.out


@pytest.mark.parametrize("place", ["kafka", "sqlite"])
def test_a_coordinator_that_starts_names_its_topics_with_one_copy(
    cluster: DevBroker, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers, prefix = cluster.bootstrap_servers, f"thin-{place}"

    for config in ({REPLICATION_FACTOR: 1}, {}):
        url = f"sqlite:///{tmp_path}/store.db"
        store = None if place == "kafka" else SqlStore(url, bootstrap_servers=servers, prefix=prefix, config=config)
        given: dict[str, Any] = {"bootstrap_servers": servers, "prefix": prefix, "config": config}
        with Coordinator(**(given if store is None else {"store": store})):
            pass

    text = f"topic {prefix}.discarded has replication factor 1 on a cluster of 3 brokers"
    assert [line.startswith(text) for line in caplog.messages if ".discarded has" in line] == [True]


def test_a_node_that_is_not_there_cannot_be_harmed(cluster: DevBroker) -> None:
    with pytest.raises(ConfigurationError, match="node must be between 1 and 3, but is 4"):
        cluster.kill(4)


@pytest.mark.chaos
def test_with_a_controller_of_its_own_one_broker_of_three_leads_on_and_a_kept_folder_is_found_again(
    tmp_path: Path,
) -> None:
    with DevBroker(nodes=3, controllers=1, data_dir=tmp_path) as cluster:
        cluster.create_topic(TOPIC)

        cluster.kill(1)
        cluster.kill(2)
        leader = cluster.leader_of(TOPIC)
        cluster.restart()
        cluster.wait_in_sync()
        with pytest.raises(DevBrokerError, match="another embedded broker uses"):
            DevBroker(nodes=3, controllers=1, data_dir=tmp_path).start()

    with DevBroker(nodes=3, controllers=1, data_dir=tmp_path) as cluster:
        found = cluster.leader_of(TOPIC)

    assert leader == 3
    assert found in {1, 2, 3}
