from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException

from commands import commands
from kafka_tools import produce, read_all
from penstock import Coordinator, SqlStore, clients
from penstock.clients.answers import asked_until_ready
from penstock.clients.factory import REPLICATION_FACTOR
from penstock.clients.topics import log_ends
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, DevBrokerError
from support.replication import elect_preferred, replicas

pytestmark = pytest.mark.thorough  # three brokers

TOPIC, PARTITIONS = "replicated", 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevBroker]:
    """Three brokers that the tests of this file may harm, and leave in sync."""
    with DevBroker(nodes=3) as running:
        running.create_topic(TOPIC, PARTITIONS)
        yield running


def test_each_topic_has_three_copies_and_each_node_leads(cluster: DevBroker) -> None:
    copies = [replicas(cluster, topic) for topic in (TOPIC, "__transaction_state")]

    leaders = {cluster.leader_of(TOPIC, partition) for partition in range(PARTITIONS)}

    assert all(sorted(nodes) == [1, 2, 3] for found in copies for nodes in found.values())
    assert leaders == {1, 2, 3}
    assert len(cluster.bootstrap_servers.split(",")) == 3
    with pytest.raises(ConfigurationError, match="node must be between 1 and 3, but is 4"):
        cluster.kill(4)


def test_a_killed_leader_has_a_successor_and_comes_back_in_sync(cluster: DevBroker) -> None:
    servers, places = cluster.bootstrap_servers, [(TOPIC, number) for number in range(PARTITIONS)]
    admin = clients.admin(servers, {})
    log_ends(admin, places, 30)
    produce(servers, TOPIC, [(None, b"before")], partition=0)
    killed = cluster.leader_of(TOPIC, 0)

    cluster.kill(killed)
    successor = cluster.leader_of(TOPIC, 0)
    was_running = cluster.running
    produce(servers, TOPIC, [(None, b"meanwhile")], partition=0)
    cluster.restart(killed)
    cluster.wait_in_sync()
    elect_preferred(cluster)
    again = cluster.leader_of(TOPIC, 0)

    assert successor != killed
    assert not was_running
    assert again == killed == replicas(cluster, TOPIC)[0][0]
    assert [message.value() for message in read_all(servers, TOPIC)] == [b"before", b"meanwhile"]
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


def test_topics_with_one_copy_are_named_by_doctor_and_by_a_coordinator_that_starts_unless_they_are_wanted(
    cluster: DevBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers, prefixes = cluster.bootstrap_servers, ("in-kafka", "in-sqlite")

    for config in ({REPLICATION_FACTOR: 1}, {}):
        options: dict[str, Any] = {"bootstrap_servers": servers, "config": config}
        store = SqlStore(f"sqlite:///{tmp_path}/store.db", prefix=prefixes[1], **options)
        for coordinator in (Coordinator(prefix=prefixes[0], **options), Coordinator(store=store)):
            with coordinator:
                pass
    printed = commands(monkeypatch, capsys)("doctor", "--bootstrap-servers", servers).out

    for prefix in prefixes:
        text = f"topic {prefix}.discarded has replication factor 1 on a cluster of 3 brokers"
        assert [line.startswith(text) for line in caplog.messages if f"{prefix}.discarded has" in line] == [True]
        assert f"warning: {text}" in printed


@pytest.mark.chaos
def test_a_kept_folder_is_found_again(tmp_path: Path) -> None:
    with DevBroker(nodes=3, data_dir=tmp_path) as cluster:
        cluster.create_topic(TOPIC)
        with pytest.raises(DevBrokerError, match="another embedded broker uses"):
            DevBroker(nodes=3, data_dir=tmp_path).start()

    with DevBroker(nodes=3, data_dir=tmp_path) as cluster:
        found = cluster.leader_of(TOPIC)

    assert found in {1, 2, 3}
