"""Many simulated runs: every invariant holds at every step, and at the end nothing is lost.

`make simulate` makes ten thousand. One seed alone: PENSTOCK_SIMULATION_SEED=<seed>.
"""

from __future__ import annotations

from collections import Counter

import pytest

import histories
import penstock
from penstock.consumer import ConsumerSettings
from simulation.group_simulation import Simulation
from simulation.random_driver import COMMON, RARE, RandomDriver
from simulation.varied import RUNS, chunks, handle, run, silence, thorough

#: What happens without a fault.
PEACEFUL = ("add", "stop", "rebalance", "transaction")


@pytest.mark.parametrize(("first", "count"), chunks(RUNS))
def test_every_invariant_holds_for_each_seed(first: int, count: int) -> None:
    ended = 0
    with silence():
        for seed in range(first, first + count):
            simulation, _ = run(seed)
            ended += len(simulation.history)

    assert ended >= count


def test_a_run_is_the_same_again() -> None:
    with silence():
        first, again = (run(7)[0] for _ in range(2))

    assert first.trace == again.trace
    assert first.broker.commit_log("sim") == again.broker.commit_log("sim")


@thorough
def test_everything_that_can_happen_does_happen() -> None:
    seen: Counter[str] = Counter()
    faults: Counter[object] = Counter()
    with silence():
        # The rarest, a message that waits in a retry topic, comes in one of a hundred runs.
        for seed in range(600):
            if seed > 150 and all(seen.values()):
                break
            simulation, driver = run(seed)
            seen.update(driver.actions)
            faults.update(simulation.broker.faults.happened)
            statistics = [one.consumer.statistics() for one in simulation.instances]
            for name in ("retried", "dead_letters", "retry_topic", "dropped", "filtered", "revoked", "lost"):
                seen[name] += sum(getattr(one, name) for one in statistics)

    assert {*COMMON, *RARE} <= {name for name, count in seen.items() if count}
    assert {name for name, count in seen.items() if not count} == set()
    assert {str(one) for one, count in faults.items() if count} >= {
        f"Operation.{name}" for name in ("COMMIT_ASYNC", "COMMITTED", "FETCH", "PRODUCE", "QUEUE")
    }


def report_of(simulation: Simulation) -> histories.Report:
    """Check the calls of a simulation like those of real processes."""
    produced = {
        (message.partition() or 0, message.offset() or 0): repr(message.key())
        for message in simulation.broker.records("t")
    }
    calls = [
        histories.Call(
            one.instance, repr(one.message.key), one.message.partition, one.message.offset, one.begun, one.ended
        )
        for one in simulation.history
    ]
    # What was done when a commit was made is judged at each step; here, that it came true, and their order.
    commits = [
        histories.Commit(one.partition, one.offset, simulation.step) for one in simulation.broker.commit_log("sim")
    ]
    return histories.examine(produced, calls, commits)


def test_a_group_that_grows_shrinks_and_rebalances_in_peace_repeats_nothing() -> None:
    moved = 0
    for seed in range(30):
        app = penstock.App("sim", bootstrap_servers="memory:0")
        app.handler("t")(handle)
        # In peace, a revocation and a stop have the time they need.
        settings = ConsumerSettings(workers=2, lanes_per_worker=2, fetch_size=5, revoke_timeout=200, stop_timeout=1_000)
        simulation = Simulation(app, seed, settings=settings)
        with silence():
            RandomDriver(simulation, avoid=[one for one in RARE if one not in PEACEFUL], fail=0, put_off=0).run(200)

        report = report_of(simulation)

        assert report.faults == [], (seed, report.faults)
        assert report.repeats == 0, (seed, report.repeated)
        moved += simulation.broker.generation("sim") - len(simulation.instances)

    assert moved >= 30
