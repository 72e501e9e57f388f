"""What simulations found, each in as few steps as show it."""

from __future__ import annotations

import penstock
from penstock.consumer import ConsumerSettings
from simulation.group_simulation import Simulation
from simulation.instance import Instance, State
from support.stepped_workers import SteppedWorker

#: Key, value and what is around them.
ONE_MESSAGE = 302


def app_of(topic: str = "t", *, attempts: int = 1) -> penstock.App:
    """An app whose handler does nothing, with dead letters."""
    app = penstock.App("sim", bootstrap_servers="memory:0")

    @app.handler(topic, retry=penstock.retry(attempts=attempts), on_failure="dead_letter")
    def handle(message: penstock.Message) -> None:
        """Take it."""

    return app


def begin(simulation: Simulation, instance: Instance) -> SteppedWorker:
    """Let a handler begin."""
    worker = instance.idle_workers()[0]
    assert simulation.take(instance, worker)
    assert worker in instance.calls
    return worker


def test_a_partition_that_is_lost_while_it_is_paused_is_read_again_when_it_comes_back() -> None:
    settings = ConsumerSettings(workers=1, max_in_flight=1, fetch_size=1)
    simulation = Simulation(app_of(), settings=settings, partitions=1)
    instance = simulation.add()
    for _ in range(3):
        simulation.produce("t", b"k")
    simulation.poll(instance)
    begin(simulation, instance)
    simulation.poll(instance)
    simulation.advance(1)
    simulation.poll(instance)
    assert [partition.paused for partition in instance.consumer.statistics().partitions] == ["in-flight limit"]

    simulation.hold(instance, State.FROZEN)
    simulation.advance(60)
    simulation.heal(instance)
    simulation.settle()

    assert instance.consumer.statistics().lost == 1
    assert instance.consumer.statistics().partitions[0].watermark == 3


def test_a_message_with_a_written_dead_letter_is_no_longer_parked_before_its_lane_runs() -> None:
    simulation = Simulation(app_of(), settings=ConsumerSettings(workers=1), partitions=1)
    instance = simulation.add()
    simulation.produce("t", b"k")
    simulation.produce("t", b"k")
    simulation.poll(instance)
    simulation.fail(instance, begin(simulation, instance))

    simulation.poll(instance)

    (partition,) = instance.consumer.statistics().partitions
    assert instance.consumer.statistics().dead_letters == 1
    assert (partition.in_flight, partition.parked) == (1, 1)
    simulation.settle()


def test_a_partition_that_comes_while_the_bytes_are_full_brings_a_message_and_no_fetch_beyond_them() -> None:
    settings = ConsumerSettings(workers=1, max_in_flight_bytes=ONE_MESSAGE, fetch_size=3)
    simulation = Simulation(app_of(), settings=settings, partitions=2)
    first, second = simulation.add(), simulation.add()
    for _ in range(3):
        for instance in (first, second):
            simulation.poll(instance)
    for number in range(10):
        simulation.produce("t", b"k", partition=number % 2)
    for _ in range(2):
        simulation.poll(first)
        simulation.advance(1)
    full = sum(partition.bytes_in_flight for partition in first.consumer.statistics().partitions)
    assert ONE_MESSAGE <= full <= 3 * ONE_MESSAGE

    simulation.kill(second)
    simulation.advance(60)
    for _ in range(6):
        simulation.poll(first)
        simulation.advance(1)

    partitions = first.consumer.statistics().partitions
    assert [partition.paused for partition in partitions] == ["byte limit", "byte limit"]
    assert sum(partition.bytes_in_flight for partition in partitions) == full + ONE_MESSAGE
    simulation.settle()
