"""Faults of three brokers: nothing is lost, doubled or out of order, and no process dies or spins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chaos.fleet import KIP848_BROKER
from chaos.three_brokers import PARTITIONS, PLAIN, AtWork, cpu_s, seconds_of_tx_ls, set_all
from penstock.devbroker import DevBroker
from support.replication import coordinator_of, elect_preferred, reassign, transaction_coordinator_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Seconds for which a node is away, or a setting forbids to write.
AWAY_S = 20.0
FORBIDDEN_S = 30.0
#: Seconds by which a part may stand still longer than the plain clients.
LONGER_S = 5.0
#: Whose messages the query reads: it stands still where they do.
READ_BY_SPARK = "coordinators (kafka)"
#: The share of a core that a process may take more while a node is away, with what it has to catch up: of 30 s without
#: writes, say.
MORE_CPU = 0.2


def brought_back(cluster: DevBroker, node: int) -> None:
    cluster.restart(node)
    cluster.wait_in_sync()


def killed(cluster: DevBroker, node: int, seconds: float = AWAY_S) -> None:
    cluster.kill(node)
    # So long is the fault, here and below.
    time.sleep(seconds)
    brought_back(cluster, node)


def frozen(cluster: DevBroker, node: int) -> None:
    cluster.freeze(node)
    time.sleep(AWAY_S)
    cluster.thaw(node)
    cluster.wait_in_sync()


def restarted_in_turn(cluster: DevBroker) -> None:
    for node in (1, 2, 3):
        cluster.stop(node)
        brought_back(cluster, node)


def moved(cluster: DevBroker) -> None:
    for topic in ("fed", "kafka-target", "sql-target", "plain", "kafka.half", "kafka.op", "kafka.done"):
        count = PARTITIONS if not topic.startswith("kafka.") else 2
        reassign(cluster, topic, {number: [1 + (number + n) % 3 for n in (2, 0, 1)] for number in range(count)})


def too_few_in_sync(cluster: DevBroker) -> None:
    set_all(cluster.bootstrap_servers, {"min.insync.replicas": "3"})
    cluster.kill(3)
    time.sleep(FORBIDDEN_S)
    set_all(cluster.bootstrap_servers, {"min.insync.replicas": "2"})
    brought_back(cluster, 3)


def coordinator_killed_with_its_node(work: AtWork) -> None:
    """Kill a coordinator, and the node that would report it to the other one."""
    node = coordinator_of(work.cluster, "kafka.coordinator")
    work.coordinators[0].kill()
    killed(work.cluster, node)
    work.coordinators[0].start()


def test_a_killed_node_costs_only_time(tmp_path: Path, spark: SparkSession) -> None:
    with (
        DevBroker(nodes=3, config=KIP848_BROKER) as cluster,
        AtWork(cluster, tmp_path, spark, each=1) as work,
    ):
        work.standstills(lambda: killed(cluster, cluster.leader_of("fed"), seconds=1.0))

        assert work.finish() == []


@pytest.mark.chaos
@pytest.mark.timeout(2_400)
def test_no_part_stands_still_for_much_longer_than_plain_clients(tmp_path: Path, spark: SparkSession) -> None:
    too_long: list[str] = []
    listed: list[tuple[float, float]] = []
    stopping = threading.Event()

    def list_transactions(servers: str) -> None:
        while not stopping.wait(5):
            listed.append(seconds_of_tx_ls(servers))

    with (
        DevBroker(nodes=3, config=KIP848_BROKER) as cluster,
        AtWork(cluster, tmp_path, spark) as work,
    ):
        leader = lambda: cluster.leader_of("fed")  # noqa: E731 - short
        harms: dict[str, Callable[[], object]] = {
            "nothing": lambda: time.sleep(AWAY_S),
            "rolling restart": lambda: restarted_in_turn(cluster),
            "killed leader": lambda: killed(cluster, leader()),
            "killed group coordinator": lambda: killed(cluster, coordinator_of(cluster, "kafka.coordinator")),
            "killed transaction coordinator": lambda: killed(
                cluster, transaction_coordinator_of(cluster, "kafka.coordinator.a.a")
            ),
            "frozen node": lambda: frozen(cluster, leader()),
            "preferred election": lambda: elect_preferred(cluster),
            "all partitions moved": lambda: moved(cluster),
            "too few in sync": lambda: too_few_in_sync(cluster),
            "coordinator killed with its node": lambda: coordinator_killed_with_its_node(work),
        }
        listing = threading.Thread(target=list_transactions, args=(cluster.bootstrap_servers,), daemon=True)
        listing.start()
        usual: dict[str, float] = {}
        for name, harm in harms.items():
            before, begun = {one: cpu_s(pid) for one, pid in work.processes().items()}, time.monotonic()
            found = work.standstills(harm)
            took_s = time.monotonic() - begun
            used = {
                one: (cpu_s(pid) - before[one]) / took_s
                for one, pid in work.processes().items()
                if cpu_s(pid) >= before[one]
            }
            usual = usual or used
            most = max((used[one] - usual[one], one) for one in used)
            print(f"{name}: {', '.join(f'{who} {s:.1f} s' for who, s in found.items())}; CPU {most[0]:+.0%} {most[1]}")  # noqa: T201 - the figures
            plain = max(found[who] for who in PLAIN)
            too_long += [
                f"{name}: {who} {s:.1f} s, {plain:.1f} s"
                for who, s in found.items()
                if s > LONGER_S + (max(plain, found[READ_BY_SPARK]) if who == "spark" else plain)
            ]
            too_long += [f"{name}: {most[1]} took {most[0]:.0%} of a core more"] if most[0] > MORE_CPU else []
        stopping.set()
        listing.join(60)

        wrong = work.finish()
    whole, asked = max(took for took, _ in listed), max(took - loaded for took, loaded in listed)
    print(f"tx ls: {whole:.1f} s at most of {len(listed)}, {asked:.1f} s without loading")  # noqa: T201 - as above
    assert wrong == [], "\n".join(wrong)
    assert too_long == []
    assert asked < LONGER_S
