"""Apps that publish, of many kinds, chosen by a seed; and a driver that lets transactions go wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from confluent_kafka import KafkaError

from penstock.testing.memory import codes
from penstock.testing.memory.faults import Effect
from simulation.publishing_simulation import (
    PublishingSimulation,
    publish,
    publish_async,
    publish_each,
    publish_whole,
)
from simulation.random_driver import COMMON, RARE, RandomDriver
from simulation.result_checker import OUTPUTS
from simulation.varied import MOVES, app_of, settings_of

#: Faults of the calls that make a transaction: what goes wrong, the client's error, and for how long.
TRANSACTION_FAULTS: dict[str, tuple[str, Effect, KafkaError, float]] = {
    "the id is not given": ("init", Effect.REFUSED, KafkaError(codes.TIMED_OUT, retriable=True), 0),
    "the id is given, unheard": ("init", Effect.ANSWER_LATE, KafkaError(codes.TRANSPORT), 12),
    "it cannot begin": ("begin", Effect.REFUSED, KafkaError(codes.STATE, txn_requires_abort=True), 0),
    "it begins in vain": ("begin", Effect.REFUSED, KafkaError(KafkaError._FENCED, fatal=True), 0),
    "the buffer is full": ("queue", Effect.REFUSED, KafkaError(codes.QUEUE_FULL), 0),
    "a result is out of order": (
        "produce",
        Effect.REFUSED,
        KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, txn_requires_abort=True),
        0,
    ),
    "a result is lost": ("produce", Effect.REFUSED, KafkaError(KafkaError._MSG_TIMED_OUT), 0),
    "a result is written, unheard": ("produce", Effect.ANSWER_LOST, KafkaError(codes.TRANSPORT), 0),
    "a result is acknowledged late": ("produce", Effect.ANSWER_LATE, KafkaError(codes.TRANSPORT), 2),
    "a result arrives late": ("produce", Effect.ARRIVES_LATE, KafkaError(codes.TRANSPORT), 7),
    "positions are of another generation": (
        "positions",
        Effect.REFUSED,
        KafkaError(KafkaError.ILLEGAL_GENERATION, txn_requires_abort=True),
        0,
    ),
    "positions are not taken": ("positions", Effect.REFUSED, KafkaError(codes.TIMED_OUT, retriable=True), 0),
    "positions are taken, unheard": ("positions", Effect.ANSWER_LOST, KafkaError(codes.TRANSPORT, retriable=True), 0),
    "positions are answered late": ("positions", Effect.ANSWER_LATE, KafkaError(codes.TRANSPORT), 25),
    "positions arrive late": ("positions", Effect.ARRIVES_LATE, KafkaError(codes.TRANSPORT), 25),
    "a commit is refused": ("commit", Effect.REFUSED, KafkaError(codes.STATE, txn_requires_abort=True), 0),
    "a commit is fatal": ("commit", Effect.REFUSED, KafkaError(KafkaError._FENCED, fatal=True), 0),
    "a commit is lost": ("commit", Effect.REFUSED, KafkaError(codes.TIMED_OUT, retriable=True), 0),
    "a commit is unheard": ("commit", Effect.ANSWER_LOST, KafkaError(codes.TIMED_OUT, retriable=True), 0),
    "a commit is answered late": ("commit", Effect.ANSWER_LATE, KafkaError(codes.TRANSPORT), 7),
    "a commit arrives late": ("commit", Effect.ARRIVES_LATE, KafkaError(codes.TRANSPORT), 6),
    "a commit comes again": ("commit", Effect.REPEATED, KafkaError(codes.TRANSPORT), 1),
    "an abort is lost": ("abort", Effect.REFUSED, KafkaError(codes.TIMED_OUT, retriable=True), 0),
    "an abort arrives late": ("abort", Effect.ARRIVES_LATE, KafkaError(codes.TRANSPORT), 6),
    "the offsets are unknown": ("stable", Effect.REFUSED, KafkaError(codes.TIMED_OUT), 0),
}
#: Of the ends alone: most of what can be done wrong is done there.
_ENDS = [name for name, (call, *_) in TRANSACTION_FAULTS.items() if call == "commit"]

_PUBLISHING = {"publish": 25.0}
_RARE = {"transaction fault": 6.0, "end fault": 4.0, "refused results": 1.0, "closed topic": 0.5, "fatal": 0.7}


class PublishingDriver(RandomDriver):
    """Drives a simulation of handlers that publish by chance; arguments as `RandomDriver`."""

    def __init__(self, simulation: PublishingSimulation, *, keys: int = 5) -> None:
        is_exact = simulation.settings.exactly_once
        # A log that was cut gives its offsets twice, so that results come twice as well.
        super().__init__(
            simulation, keys=keys, avoid=["truncate", *(("commit fault", "write fault") if is_exact else ())]
        )
        self._publishing = simulation
        mine = (_PUBLISHING | _RARE) if is_exact else {"fatal": 0.7, "refused results": 1.0}
        if not is_exact or self._chance.random() < 0.3:
            mine.pop("closed topic", None)
        if simulation.has_no_map:
            # What is refused is tried again behind what waits for room above it.
            mine = {name: weight for name, weight in mine.items() if name not in ("closed topic", "refused results")}
        self.actions += mine
        self._weights = list(accumulate([(COMMON | RARE | mine)[name] for name in self.actions]))
        self._do |= {
            "publish": self._publish,
            "transaction fault": lambda: self._plan(list(TRANSACTION_FAULTS)),
            "end fault": lambda: self._plan(_ENDS),
            "refused results": self._refuse,
            "closed topic": self._close,
            "fatal": self._fatal,
        }
        simulation.others = self._step
        simulation.meanwhile = self._serve

    def _step(self) -> None:
        self._do[self._chance.choices(self.actions, cum_weights=self._weights)[0]]()

    def _serve(self) -> None:
        """Let another instance work or publish: one waits in a rebalance callback."""
        if self._publishing.settings.exactly_once and self._chance.random() < 0.3:
            self._publish()
        else:
            self._work()

    def _publish(self) -> None:
        instances = self._publishing.instances
        if instances and not self._publishing.publish(self._chance.choice(instances)):
            self._publishing.broker.advance(self._publishing.settings.transaction_interval)

    def _plan(self, names: list[str]) -> None:
        name = self._chance.choice(names)
        call, effect, error, seconds = TRANSACTION_FAULTS[name]
        self._publishing.trouble(name, lambda _: self._publishing.transactions.plan(call, effect, error, seconds))

    def _refuse(self) -> None:
        count = self._chance.randint(1, 2)
        if self._publishing.settings.exactly_once:
            self._publishing.transactions.refuse_next = count
        else:
            self._publishing.trouble(
                "a result is refused", lambda broker: broker.fail("produce", KafkaError.MSG_SIZE_TOO_LARGE, times=count)
            )

    def _close(self) -> None:
        closed = self._publishing.transactions.closed_topics
        if closed:
            closed.clear()
        else:
            closed.add(self._chance.choice(OUTPUTS))

    def _fatal(self) -> None:
        if not self._publishing.settings.exactly_once:
            error = KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, fatal=True)
            self._publishing.trouble("a producer fails for ever", lambda broker: broker.fail("produce", error))


def handler_of(chance: random.Random, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a handler that publishes."""
    if "batch" in options:
        return chance.choice((publish_each, publish_whole))
    return chance.choice((publish, publish, publish_async))


def simulation_of(seed: int, *, exactly_once: bool) -> tuple[PublishingSimulation, PublishingDriver]:
    """Return the simulation of a seed, not begun."""
    chance = random.Random(f"publish {seed}")  # noqa: S311 - a seed must give the same app again
    app = app_of(chance, None if seed % 3 else "shared", handler_of)
    settings = replace(settings_of(chance), exactly_once=exactly_once)
    simulation = PublishingSimulation(app, seed, settings=settings, partitions=chance.choice((1, 2, 3)))
    return simulation, PublishingDriver(simulation, keys=chance.choice((1, 3, 8)))


def run(seed: int, *, exactly_once: bool) -> PublishingSimulation:
    """Run a seed to its end."""
    simulation, driver = simulation_of(seed, exactly_once=exactly_once)
    try:
        driver.run(MOVES)
    except Exception as error:
        error.add_note(f"run it again: PENSTOCK_SIMULATION_SEED={seed} python -m pytest tests/simulation -k publishing")
        raise
    return simulation


__all__ = ["TRANSACTION_FAULTS", "PublishingDriver", "run", "simulation_of"]
