"""Apps and settings of many kinds, chosen by a seed, for simulations of the consumer."""

from __future__ import annotations

import inspect
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import tenacity

import penstock
from penstock.consumer import ConsumerSettings, Kind
from simulation.group_simulation import Simulation
from simulation.random_driver import TIME_LIMIT_S, RandomDriver

#: The environment's number of runs, and the one seed to run instead.
RUNS = int(os.environ.get("PENSTOCK_SIMULATIONS", "300"))
#: Takes a test out of `make test`; `make simulate`, which sets the number of runs, has all.
_HAS_ALL = "PENSTOCK_SIMULATIONS" in os.environ
thorough = pytest.mark.usefixtures() if _HAS_ALL else pytest.mark.thorough
ONE_SEED = os.environ.get("PENSTOCK_SIMULATION_SEED")
MOVES = 150


def chunks(runs: int, size: int = 100) -> list[Any]:
    """Return the first seed and the number of seeds of each test; `make test` has the first forty."""
    if ONE_SEED:
        return [(int(ONE_SEED), 1)]
    found = [(begin, min(size, runs - begin)) for begin in range(0 if _HAS_ALL else 40, runs, size)]
    return found if _HAS_ALL else [(0, min(40, runs)), *(pytest.param(*chunk, marks=thorough) for chunk in found)]


def handle(message: penstock.Message) -> None:
    """Take a message."""


async def handle_async(message: penstock.Message) -> None:
    """Take a message on the event loop."""


def two_of_three(message: penstock.Message) -> bool:
    """Let two of three messages pass."""
    return int(message.value or b"0") % 3 != 0


def handler_of(chance: random.Random, _options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a handler that publishes nothing."""
    return chance.choice((handle, handle, handle_async))


def app_of(
    chance: random.Random,
    key_space: str | None = None,
    choose: Callable[[random.Random, Mapping[str, Any]], Callable[..., Any]] = handler_of,
) -> penstock.App:
    """Return an app with handlers of many kinds; `choose` chooses each by its options."""
    app, kinds = penstock.App("sim", bootstrap_servers="memory:0"), set[bool]()
    for number in range(chance.choice((1, 1, 2))):
        options: dict[str, Any] = {
            "order": chance.choice(("key", "key", "key", "partition", "none")),
            "keyless": chance.choice(("partition", "together", "spread")),
            "on_failure": chance.choice(("dead_letter", "dead_letter", "dead_letter", "drop", "stop")),
            "retry": penstock.retry(
                attempts=chance.choice((1, 2, 3)), wait=tenacity.wait_fixed(chance.choice((0, 0.2, 1, 5)))
            ),
        }
        seldom: tuple[dict[str, Any], ...] = (
            {"batch": chance.choice((2, 5)), "linger": chance.choice((0, 0.5))},
            {"filter": two_of_three},
            {"decoder": "json"},
            {"retry_delays": chance.choice(((1.0,), (0.5, 3.0)))},
            {"rate": 5.0},
            {"key_rate": 2.0},
        )
        for more in seldom:
            if chance.random() < 0.2:
                options |= more
        if options["order"] != "key":
            # Nothing paces a key whose messages do not wait for each other.
            options.pop("key_rate", None)
        function = choose(chance, options)
        kinds.add(inspect.iscoroutinefunction(function))
        # A plain function and an `async def` have no keys in common.
        app.handler(f"t{number}", key_space=key_space if len(kinds) == 1 else None, **options)(function)
    return app


def settings_of(chance: random.Random) -> ConsumerSettings:
    """Return settings small enough that limits are met."""
    return ConsumerSettings(
        workers=chance.choice((1, 2, 3)),
        max_concurrency=chance.choice((1, 3)),
        pinned=chance.random() < 0.15,
        lanes_per_worker=chance.choice((1, 2, 8)),
        max_in_flight=chance.choice((3, 20, 1_000)),
        max_in_flight_bytes=chance.choice((1_000, 100_000)),
        fetch_size=chance.choice((1, 3, 10, 50)),
        commit_interval=chance.choice((0.2, 1.0)),
        revoke_timeout=chance.choice((0.05, 0.5)),
        stop_timeout=chance.choice((0.5, 10.0)),
        config={"session.timeout.ms": 10_000},
    )


def simulation_of(seed: int) -> tuple[Simulation, RandomDriver]:
    """Return the simulation of a seed, not begun."""
    chance = random.Random(f"what {seed}")  # noqa: S311 - a seed must give the same app again
    app = app_of(chance, None if seed % 3 else "shared")
    settings, partitions = settings_of(chance), chance.choice((1, 2, 3))
    # An `async def` cancels itself, on an event loop that is none here.
    hangs = seed % 4 == 1 and all(value.kind is Kind.THREAD for value in app.handlers.values())
    # With few workers the first that is abandoned ends the instance.
    settings = replace(settings, time_limit=TIME_LIMIT_S, workers=6) if hangs else settings
    simulation = Simulation(app, seed, settings=settings, partitions=partitions)
    return simulation, RandomDriver(simulation, keys=chance.choice((1, 3, 8)), hangs=hangs)


def run(seed: int) -> tuple[Simulation, RandomDriver]:
    """Run a seed to its end."""
    simulation, driver = simulation_of(seed)
    try:
        driver.run(MOVES)
    except Exception as error:
        error.add_note(f"run it again: PENSTOCK_SIMULATION_SEED={seed} python -m pytest tests/simulation -k seed")
        raise
    return simulation, driver


@contextmanager
def silence() -> Iterator[None]:
    """Keep the logs of thousands of faults out of a test's report; they cost more than the runs."""
    former = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(former)
