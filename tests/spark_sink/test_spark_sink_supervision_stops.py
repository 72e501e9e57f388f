"""Stops of queries and the gate, with a clock that the test moves and queries that are none: Spark is not started."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from supervised_world import FRAME, FakeQuery, Report, World, woken

from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink.monitoring.progress import SinkState
from penstock.spark_sink.queries.gate import BatchLeftError, Gate
from penstock.spark_sink.queries.supervisor import Supervisor
from waiting import wait_until


def test_a_closed_gate_lets_no_batch_begin_and_says_how_spark_knows_a_stop() -> None:
    begun: list[int] = []
    gate = Gate(lambda _, batch_id: begun.append(batch_id), park=woken)
    gate(FRAME, 0)
    gate.close()

    with pytest.raises(BatchLeftError) as left:
        gate(FRAME, 1)

    assert begun == [0]
    assert (gate.done, gate.committed, gate.under_way) == (0, 0, None)
    # Spark 4.3's pattern for a stop, over the text that a callback's failure has.
    assert str(left.value).endswith(
        "py4j.protocol.Py4JJavaError: An error occurred while calling Thread.sleep: java.lang.InterruptedException"
    )


class Shared:
    """A fleet that gives and takes the query when the test says so."""

    def __init__(self, *, begins: bool) -> None:
        self.has_joined = self.has_left = False
        self.news: list[Callable[[], None]] = [lambda: self.given(["orders"])] if begins else []

    def hand_over_to(
        self, given: Callable[[Collection[str]], None], taken: Callable[[Collection[str], bool], None]
    ) -> None:
        self.given, self.taken = given, taken

    def poll(self, _timeout_s: float = 0.0) -> None:
        self.has_joined = True
        while self.news:
            self.news.pop(0)()

    def leave(self) -> None:
        self.has_left = True


class Stage:
    """A supervisor with queries that run batches on threads of their own, as Spark does."""

    def __init__(self, count: int = 1, fleet: Shared | None = None) -> None:
        self.release = threading.Event()
        self.worlds = [World(function=lambda *_: self.release.wait(60)) for _ in range(count)]
        self.supervisor = Supervisor("test", [world.one for world in self.worlds], fleet=fleet, release_s=60)
        self.supervisor.start()

    def begin_batch(self, world: World, batch_id: int) -> threading.Thread:
        query, gate = world.query, world.gates[-1]

        def run() -> None:
            gate(FRAME, batch_id)
            query.lastProgress = Report(batch_id)

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: gate.under_way == batch_id)
        return thread


def stopping(supervisor: Supervisor, timeout: float) -> tuple[threading.Thread, list[bool]]:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(supervisor.stop(timeout)))
    thread.start()
    return thread, answers


def test_a_stop_lets_the_batch_under_way_be_finished_and_committed_before_it_ends_the_query() -> None:
    stage = Stage()
    (world,) = stage.worlds
    batch = stage.begin_batch(world, 5)

    stop, answers = stopping(stage.supervisor, 60)
    wait_until(lambda: closed(world.gates[0]))
    assert world.query.stops == 0, "the query is not ended while its batch is under way"
    with pytest.raises(BatchLeftError):
        world.gates[0](FRAME, 6)
    stage.release.set()
    stop.join(30)
    batch.join(30)

    assert answers == [True]
    assert world.query.stops == 1
    assert world.one.state is SinkState.STOPPED
    assert [json.loads(text)["batchId"] for text in world.reports] == [5]


def test_a_batch_that_outlasts_the_time_of_the_stop_is_interrupted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    (world,) = stage.worlds
    batch = stage.begin_batch(world, 5)

    with caplog.at_level(logging.WARNING):
        finished = stage.supervisor.stop(0.2)
    stage.release.set()
    batch.join(30)

    assert not finished
    assert world.query.stops == 1
    assert "a batch of the query orders is interrupted" in caplog.text


def test_a_second_wish_to_stop_does_not_wait_for_the_batch() -> None:
    stage = Stage()
    (world,) = stage.worlds
    batch = stage.begin_batch(world, 5)

    stop, answers = stopping(stage.supervisor, 600)
    wait_until(lambda: closed(world.gates[0]))
    stage.supervisor.request_stop(now=True)
    stop.join(30)

    assert answers == [False]
    assert world.query.stops == 1
    stage.release.set()
    batch.join(30)


def test_a_query_that_waits_for_its_restart_is_not_started_any_more() -> None:
    stage = Stage()
    (world,) = stage.worlds
    world.query.end(ValueError("no room"))
    wait_until(lambda: world.one.state is SinkState.WAITING)

    assert stage.supervisor.stop(5)
    world.now += 100
    world.one.poll()

    assert world.one.state is SinkState.STOPPED
    assert len(world.started) == 1


def test_a_query_that_does_not_start_leaves_those_before_it_to_be_stopped() -> None:
    first, second = World(), World()
    second.refusals = [ConfigurationError("wrong")]
    supervisor = Supervisor("test", [first.one, second.one])

    with pytest.raises(ConfigurationError, match="wrong"):
        supervisor.start()
    supervisor.stop(5)

    assert first.query.stops == 1
    assert second.started == []


def test_a_spark_that_is_gone_ends_the_app_with_a_sentence() -> None:
    class Gone(FakeQuery):
        def __getattribute__(self, name: str) -> Any:
            if name == "isActive":
                raise ConnectionRefusedError("[Errno 111]")
            return super().__getattribute__(name)

    stage = Stage()
    (world,) = stage.worlds
    world.one.query = Gone()

    wait_until(lambda: world.one.failure is not None)

    with pytest.raises(SinkError, match="Spark does not answer for the query orders: ConnectionRefusedError"):
        stage.supervisor.raise_failure()
    assert stage.supervisor.ended
    stage.supervisor.stop(5)


def closed(gate: Gate) -> bool:
    return gate._closed


def test_all_queries_end_whatever_one_of_them_does(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(FakeQuery):
        def stop(self) -> None:
            raise ConnectionRefusedError("[Errno 111]")

    stage = Stage(count=3)
    stage.worlds[1].one.query = Stubborn()

    stage.supervisor.stop(5)

    assert stops(stage.worlds) == [1, 0, 1]
    assert "Spark did not stop the query orders" in caplog.text


def stops(worlds: Sequence[World]) -> list[int]:
    return [world.query.stops for world in worlds]


def test_a_query_of_another_replica_stands_by_until_the_fleet_gives_it() -> None:
    fleet = Shared(begins=False)
    stage = Stage(fleet=fleet)
    (world,) = stage.worlds

    assert (world.one.state, world.started, stage.supervisor.ended) == (SinkState.STANDBY, [], False)
    fleet.news.append(lambda: fleet.given(["orders", "others"]))
    wait_until(lambda: world.one.state is SinkState.RUNNING)
    assert (len(world.started), world.one.restarts) == (1, 0)

    stage.supervisor.stop(5)
    assert (world.query.stops, fleet.has_left, world.one.state) == (1, True, SinkState.STOPPED)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_query_that_is_taken_away_ends_behind_its_batch_unless_it_was_lost_and_comes_back(is_lost: bool) -> None:
    fleet = Shared(begins=True)
    stage = Stage(fleet=fleet)
    (world,) = stage.worlds
    batch = stage.begin_batch(world, 5)

    fleet.news.append(lambda: fleet.taken(["orders"], is_lost))
    wait_until(lambda: closed(world.gates[0]))
    if is_lost:  # another replica may be in that batch
        wait_until(lambda: world.query.stops == 1)
    else:
        assert world.query.stops == 0
    stage.release.set()
    batch.join(30)
    wait_until(lambda: world.one.state is SinkState.STANDBY)
    assert world.query.stops == 1

    fleet.news.append(lambda: fleet.given(["orders"]))
    wait_until(lambda: world.one.state is SinkState.RUNNING)
    assert len(world.started) == 2
    assert stage.supervisor.stop(5)


def test_a_start_that_fails_leaves_the_fleet() -> None:
    fleet, world = Shared(begins=True), World()
    world.refusals = [ConfigurationError("wrong")]
    supervisor = Supervisor("test", [world.one], fleet=fleet)

    with pytest.raises(ConfigurationError, match="wrong"):
        supervisor.start()
    supervisor.stop(5)

    assert fleet.has_left


def test_a_fleet_that_breaks_down_stops_all_queries_and_the_app() -> None:
    fleet = Shared(begins=True)
    stage = Stage(fleet=fleet)
    (world,) = stage.worlds

    fleet.news.append(lambda: {}["gone"])
    wait_until(lambda: closed(world.gates[0]))

    with pytest.raises(SinkError, match="the app cannot share its sinks out any more: KeyError"):
        stage.supervisor.raise_failure()
    stage.supervisor.stop(5)
    assert (world.query.stops, fleet.has_left) == (1, True)
