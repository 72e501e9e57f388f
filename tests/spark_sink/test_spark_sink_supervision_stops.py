"""Stops of queries and the gate, with queries that are none: Spark is not started."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from supervised_world import FRAME, FakeFleet, FakeQuery, World, app_sinks, report

from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink.progress import SinkState
from penstock.spark_sink.queries.supervise import BatchLeftError, Gate
from waiting import wait_until


class Asked(FakeQuery):
    """A query that notes when it is asked whether it runs."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        super().__init__()

    def __getattribute__(self, name: str) -> Any:
        if name == "isActive":
            self.is_asked.set()
        return super().__getattribute__(name)


def test_a_closed_gate_lets_no_batch_begin_and_says_how_spark_knows_a_stop_once_that_has_begun() -> None:
    begun: list[int] = []
    gate = Gate(lambda _, batch_id: begun.append(batch_id))
    query: Any = Asked()
    gate(FRAME, 0)
    gate.close()

    with ThreadPoolExecutor(1) as thread:
        left = thread.submit(gate, FRAME, 1)
        wait_until(lambda: gate.is_parked)
        gate.leave(query)
        assert query.is_asked.wait(60)
        is_early = left.done()
        query.stop()

    assert (begun, is_early) == ([0], False)
    # Spark 4.3's pattern for a stop, over the text that a callback's failure has.
    assert str(left.exception()).endswith(
        "py4j.protocol.Py4JJavaError: An error occurred while calling Thread.sleep: java.lang.InterruptedException"
    )


class Stage:
    """The sinks of an app with queries that run batches on threads of their own, as Spark does."""

    def __init__(self, count: int = 1, *, refusals: tuple[Exception, ...] = ()) -> None:
        self.begun, self.release = threading.Event(), threading.Event()
        self.answers: list[bool] = []
        self.worlds = [World(function=self.work) for _ in range(count)]
        self.worlds[-1].refusals = list(refusals)
        self.world, self.fleet = self.worlds[0], FakeFleet()
        self.sinks = app_sinks(60)

    def start(self) -> Stage:
        fleet: Any = self.fleet
        self.sinks.supervise([world.supervised for world in self.worlds], fleet)
        return self

    def work(self, _batch: object, _batch_id: int) -> None:
        self.begun.set()
        self.release.wait(60)

    def begin_batch(self, batch_id: int) -> threading.Thread:
        query, gate = self.world.query, self.world.gates[-1]

        def run() -> None:
            query.status = {"isTriggerActive": True}
            gate(FRAME, batch_id)
            query.recentProgress.append(report(batch_id))
            query.status = {"isTriggerActive": False}

        thread = threading.Thread(target=run)
        thread.start()
        assert self.begun.wait(60)
        return thread

    @property
    def is_closed(self) -> bool:
        return self.world.gates[0].is_closed

    def stop(self, timeout: float) -> None:
        """Stop them, on a separate thread."""
        threading.Thread(target=lambda: self.answers.append(self.sinks.stop(timeout))).start()

    def stop_twice(self) -> None:
        self.stop(600)
        wait_until(lambda: self.is_closed)
        self.sinks.request_stop(now=True)

    def take_away(self, *, is_lost: bool) -> None:
        """Have the query given to another replica."""
        self.fleet.news.append(lambda: self.fleet.take(is_lost=is_lost))


@pytest.mark.parametrize(
    ("event", "is_interrupted", "state", "answers"),
    [
        (lambda stage: stage.stop(60), False, SinkState.STOPPED, [True]),
        (lambda stage: stage.stop(0.2), True, SinkState.STOPPED, [False]),
        (Stage.stop_twice, True, SinkState.STOPPED, [False]),
        (lambda stage: stage.take_away(is_lost=False), False, SinkState.STANDBY, []),
        # Another replica may be in that batch.
        (lambda stage: stage.take_away(is_lost=True), True, SinkState.STANDBY, []),
    ],
    ids=["a stop", "a stop out of time", "a second stop", "taken away", "lost"],
)
def test_a_query_ends_behind_its_batch_unless_time_or_another_replica_forbids_it(
    caplog: pytest.LogCaptureFixture,
    event: Callable[[Stage], None],
    is_interrupted: bool,
    state: SinkState,
    answers: list[bool],
) -> None:
    stage = Stage().start()
    world = stage.world
    batch = stage.begin_batch(5)

    with caplog.at_level(logging.WARNING):
        event(stage)
        wait_until(lambda: stage.is_closed)
        if is_interrupted:
            wait_until(lambda: world.query.stops == 1)
        else:
            assert world.query.stops == 0
        stage.release.set()
        batch.join(30)
        if not is_interrupted:
            with pytest.raises(BatchLeftError):
                world.gates[0](FRAME, 6)
        wait_until(lambda: world.supervised.state is state and stage.answers == answers)

    assert world.query.stops == 1
    assert ("a batch of the query orders is interrupted" in caplog.text) is is_interrupted
    if not is_interrupted:
        assert world.progress.statistics.batch_id == 5
    if state is SinkState.STANDBY:
        stage.fleet.mine = frozenset(["orders"])
        wait_until(lambda: world.supervised.state is SinkState.RUNNING)
        assert (len(world.started), world.restarts) == (2, 0)
        assert stage.sinks.stop(60)
    assert stage.fleet.has_left


def test_the_offsets_of_the_group_follow_the_slowest_of_the_sinks_that_read_a_partition() -> None:
    stage = Stage(2).start()

    for world, end in zip(stage.worlds, (5, 3), strict=True):
        world.query.recentProgress.append(report(0, end={"orders": {"0": end}}))
        world.now += 10

    wait_until(lambda: stage.fleet.committed == {("orders", 0): 3})
    stage.sinks.stop(60)


def test_a_query_that_waits_for_its_restart_is_not_started_any_more() -> None:
    stage = Stage().start()
    stage.world.query.end(ValueError("no room"))
    wait_until(lambda: stage.world.supervised.state is SinkState.WAITING)

    assert stage.sinks.stop(60)

    assert (stage.world.supervised.state, len(stage.world.started)) == (SinkState.STOPPED, 1)
    assert stage.sinks.ended


def test_a_query_that_does_not_start_has_those_before_it_stopped_and_leaves_the_fleet() -> None:
    stage = Stage(2, refusals=(ConfigurationError("wrong"),))

    with pytest.raises(ConfigurationError, match="wrong"):
        stage.start()
    stage.sinks.stop(60)

    assert (stage.world.query.stops, stage.worlds[1].started) == (1, [])
    assert stage.fleet.has_left


class Gone(FakeQuery):
    """A query whose Spark is gone."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("isActive", "stop"):
            raise ConnectionRefusedError("[Errno 111]")
        return super().__getattribute__(name)


def test_a_spark_that_is_gone_ends_the_app_with_a_sentence_and_all_queries_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(3).start()
    gone: Any = Gone()
    stage.worlds[1].supervised.query = gone

    wait_until(lambda: stage.worlds[1].supervised.failure is not None)

    with pytest.raises(SinkError, match="Spark does not answer for the query orders: ConnectionRefusedError"):
        stage.sinks.raise_failure()
    stage.worlds[1].supervised.state = SinkState.RUNNING  # as where it goes during the stop
    stage.sinks.stop(60)
    assert [world.query.stops for world in stage.worlds] == [1, 0, 1]
    assert "Spark did not stop the query orders" in caplog.text


def test_a_fleet_that_breaks_down_stops_all_queries_and_the_app() -> None:
    stage = Stage().start()
    breaks_down: Callable[[], None] = {}.popitem  # type: ignore[assignment] # it raises
    stage.fleet.news.append(breaks_down)
    wait_until(lambda: stage.world.query.stops == 1)

    with pytest.raises(SinkError, match="the app cannot share its sinks out any more: KeyError"):
        stage.sinks.raise_failure()
    stage.sinks.stop(60)
    assert stage.fleet.has_left
