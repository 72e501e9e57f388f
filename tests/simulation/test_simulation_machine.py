"""The same group, driven by hypothesis: what it finds shrinks to the few steps that matter.

The rules choose among what is there by number, modulo how many there are; every step checks I1 to I6.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import hypothesis
import hypothesis.strategies as st
import pytest
import tenacity
from confluent_kafka import KafkaError
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import penstock
from penstock.consumer import ConsumerSettings
from penstock.offsets import CommitPoint, Tracker
from penstock.testing.stepped_engine import SteppedWorker
from simulation.group_simulation import Simulation
from simulation.instance import Instance, State
from simulation.invariant_checker import InvariantBroken
from simulation.varied import handle, silence, thorough

WHICH = st.integers(0, 7)
KEYS = st.sampled_from([b"a", b"b", b"c", None])


class Group(RuleBasedStateMachine):
    """One topic of two partitions, keys in order, retries and dead letters."""

    @initialize(
        workers=st.integers(1, 3),
        lanes=st.sampled_from([1, 4]),
        fetch_size=st.sampled_from([1, 3, 20]),
        attempts=st.integers(1, 3),
        max_in_flight=st.sampled_from([2, 100]),
        delays=st.sampled_from([(), (1.0,)]),
        batch=st.sampled_from([1, 1, 3]),
    )
    def start(
        self,
        *,
        workers: int,
        lanes: int,
        fetch_size: int,
        attempts: int,
        max_in_flight: int,
        delays: tuple[float, ...],
        batch: int,
    ) -> None:
        app = penstock.App("sim", bootstrap_servers="memory:0")
        policy = penstock.retry(attempts=attempts, wait=tenacity.wait_fixed(0.5))
        app.handler("t", retry=policy, on_failure="dead_letter", retry_delays=delays, batch=batch)(handle)
        options = ConsumerSettings(
            workers=workers,
            lanes_per_worker=lanes,
            fetch_size=fetch_size,
            max_in_flight=max_in_flight,
            commit_interval=0.2,
            revoke_timeout=0.1,
            stop_timeout=1.0,
            config={"session.timeout.ms": 10_000},
        )
        self.simulation = Simulation(app, 1, settings=options, partitions=2)
        self.simulation.add()

    def instance(self, which: int, *states: State) -> Instance | None:
        able = [one for one in self.simulation.instances if not states or one.state in states]
        return able[which % len(able)] if able else None

    def under_way(self, which: int) -> tuple[Instance, SteppedWorker] | None:
        able = [
            (one, worker) for one in self.simulation.instances if one.state is not State.FROZEN for worker in one.calls
        ]
        return able[which % len(able)] if able else None

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4), partition=st.integers(0, 1))
    def produce(self, keys: list[bytes | None], partition: int) -> None:
        for key in keys:
            self.simulation.produce("t", key, partition=partition)

    @rule(keys=st.lists(KEYS, max_size=3), partition=st.integers(0, 1), commit=st.booleans())
    def produce_in_a_transaction(self, keys: list[bytes | None], partition: int, commit: bool) -> None:
        transaction = self.simulation.begin_transaction()
        for key in keys:
            self.simulation.produce("t", key, partition=partition, transaction=transaction)
        self.simulation.end_transaction(transaction, commit=commit)

    @rule(which=WHICH, times=st.integers(1, 3))
    def poll(self, which: int, times: int) -> None:
        for _ in range(times):
            if one := self.instance(which):
                self.simulation.poll(one)

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 15.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.simulation.advance(seconds)
        for one in list(self.simulation.instances):
            self.simulation.poll(one)

    @rule(which=WHICH, calls=st.integers(0, 3))
    def work(self, which: int, calls: int) -> None:
        able = [
            (one, worker)
            for one in self.simulation.instances
            if one.state is not State.FROZEN
            for worker in one.idle_workers()
        ]
        if able:
            instance, worker = able[which % len(able)]
            self.simulation.take(instance, worker)
            for _ in range(calls):
                if worker in instance.calls:
                    self.simulation.finish(instance, worker)

    @rule(which=WHICH)
    def finish(self, which: int) -> None:
        if one := self.under_way(which):
            self.simulation.finish(*one)

    @rule(which=WHICH, places=st.lists(st.integers(0, 2), max_size=2, unique=True))
    def fail(self, which: int, places: list[int]) -> None:
        if one := self.under_way(which):
            count = len(one[0].calls[one[1]].messages)
            self.simulation.fail(*one, [place for place in places if place < count])

    @rule(which=WHICH, what=st.sampled_from(["put off", "comes", "fails"]))
    def defer(self, which: int, what: str) -> None:
        if what == "put off":
            one = self.under_way(which)
            if one and one[0].calls[one[1]].assignment.route.batch == 1:
                self.simulation.put_off(*one)
            return
        out = [
            (one, each) for one in self.simulation.instances if one.state is not State.FROZEN for each in one.deferred
        ]
        if out:
            self.simulation.settle_completion(*out[which % len(out)], well=what == "comes")

    @rule(which=WHICH, what=st.sampled_from(["add", "heal", "stop", "kill", "freeze", "cut off", "rebalance"]))
    def change_the_group(self, which: int, what: str) -> None:
        simulation, running = self.simulation, self.instance(which, State.RUNNING)
        held = self.instance(which, State.FROZEN, State.CUT_OFF)
        if what == "rebalance":
            simulation.rebalance()
        elif what == "add" and len(simulation.instances) < 3:
            simulation.add()
        elif what == "heal" and held:
            simulation.heal(held)
        elif what == "stop" and running:
            simulation.stop(running)
        elif what == "kill" and running:
            simulation.kill(running)
        elif what in ("freeze", "cut off") and running:
            simulation.hold(running, State.FROZEN if what == "freeze" else State.CUT_OFF)

    @rule(operation=st.sampled_from(["commit", "committed", "fetch", "produce", "late"]))
    def break_a_call(self, operation: str) -> None:
        if operation == "late":
            self.simulation.trouble("a commit is late", lambda broker: broker.delay_request("commit", 12.0))
        else:
            self.simulation.trouble(f"{operation} fails", lambda broker: broker.fail(operation, KafkaError._TIMED_OUT))

    @rule(partition=st.integers(0, 1), count=st.integers(0, 3))
    def shorten_the_log(self, partition: int, count: int) -> None:
        if count:
            self.simulation.delete_records("t", partition, count)
        else:
            self.simulation.compact("t", partition)

    def teardown(self) -> None:
        if hasattr(self, "simulation") and sys.exception() is None:
            self.simulation.settle()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Faults by the thousand are logged by the thousand."""
    with silence():
        yield


def test_no_choice_of_steps_breaks_an_invariant() -> None:
    run_state_machine_as_test(Group, settings=settings(max_examples=30, stateful_step_count=60))


@thorough
def test_a_defect_shrinks_to_the_steps_that_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracker, "commit_point", lambda self, *_: CommitPoint(self.position, ""))

    with pytest.raises(InvariantBroken, match="I3") as found:
        run_state_machine_as_test(
            Group,
            settings=settings(
                max_examples=300,
                stateful_step_count=12,
                database=None,
                report_multiple_bugs=False,
                phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            ),
        )

    steps = "\n".join(found.value.__notes__)
    assert "state.produce(" in steps
    assert steps.count("state.") < 12
