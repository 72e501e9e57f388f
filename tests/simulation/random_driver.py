"""`RandomDriver` chooses the steps of a simulation by its seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from confluent_kafka import KafkaError

from penstock.consumer.handlers.options import OnFailure
from penstock.consumer.poll.watchdog import GRACE_S
from penstock.testing.memory import codes
from simulation.group_simulation import Simulation
from simulation.instance import Instance, State

#: How often each action comes up. A run leaves some of the rare ones out, so that the others have time to tell.
COMMON = {"work": 60, "poll": 30, "produce": 14, "advance": 6, "complete": 4}
RARE = {
    "add": 1.5,
    "stop": 0.8,
    "kill": 0.8,
    "freeze": 0.8,
    "cut off": 0.8,
    "heal": 2.0,
    "rebalance": 1.5,
    "transaction": 3.0,
    "commit fault": 2.5,
    "offset fault": 0.7,
    "fetch fault": 1.0,
    "write fault": 2.0,
    "coordinator": 0.5,
    "change": 1.0,
    "rates": 1.0,
    "compact": 0.7,
    "delete": 0.5,
    "truncate": 0.3,
}
#: The same of handlers that hang, where they do, and the seconds that they may take.
_HANG = 6.0
TIME_LIMIT_S = 2.0
#: The part of the rare actions that a run has.
_RARE_PART = 0.5
_MOST_INSTANCES = 4
_COMMIT_ERRORS = (codes.TRANSPORT, KafkaError.NOT_COORDINATOR, KafkaError.REBALANCE_IN_PROGRESS, codes.TIMED_OUT)


class RandomDriver:
    """Drives a simulation by chance.

    Args:
        simulation: what is driven; its own chance is used.
        keys: how many keys there are.
        avoid: rare actions that never come up.
        fail: the part of the handlers that fail; drawn when left out.
        put_off: the part of the handlers that put their completion off; drawn when left out.
        hangs: whether handlers hang, for their time limit.
    """

    def __init__(
        self,
        simulation: Simulation,
        *,
        keys: int = 5,
        avoid: Sequence[str] = (),
        fail: float | None = None,
        put_off: float | None = None,
        hangs: bool = False,
    ) -> None:
        self._simulation = simulation
        self._chance = chance = simulation.chance
        self._keys = [None, *(b"k%d" % number for number in range(keys))]
        self._topics = list(simulation.app.handlers)
        self._fail = chance.choice((0.0, 0.05, 0.3)) if fail is None else fail
        self._put_off = chance.choice((0.0, 0.0, 0.1)) if put_off is None else put_off
        chosen = {name: often for name, often in RARE.items() if name not in avoid and chance.random() < _RARE_PART}
        chosen |= {"hang": _HANG} if hangs else {}
        #: What may happen in this run.
        self.actions = list(COMMON | chosen)
        self._weights = list(accumulate((COMMON | chosen).values()))
        self._do: dict[str, Callable[[], None]] = {
            "work": self._work,
            "poll": self._poll,
            "produce": self._produce,
            "advance": self._advance,
            "complete": self._complete,
            "hang": self._hang,
            "add": self._add,
            "stop": lambda: self._on_one(simulation.stop),
            "kill": lambda: self._on_one(simulation.kill),
            "freeze": lambda: self._on_one(lambda one: simulation.hold(one, State.FROZEN)),
            "cut off": lambda: self._on_one(lambda one: simulation.hold(one, State.CUT_OFF)),
            "heal": lambda: self._on_one(simulation.heal),
            "rebalance": simulation.rebalance,
            "transaction": self._transaction,
            "commit fault": self._commit_fault,
            "offset fault": lambda: simulation.trouble(
                "no offsets", lambda broker: broker.fail("committed", codes.TIMED_OUT)
            ),
            "fetch fault": lambda: simulation.trouble(
                "a fetch fails", lambda broker: broker.fail("fetch", codes.TRANSPORT)
            ),
            "write fault": self._write_fault,
            "coordinator": self._coordinator,
            "change": lambda: self._on_one(self._change),
            "rates": lambda: self._on_one(self._rates),
            "compact": lambda: self._on_log(simulation.compact),
            "delete": lambda: self._on_log(
                lambda topic, log: simulation.delete_records(topic, log, chance.randint(1, 4))
            ),
            "truncate": lambda: self._on_log(lambda topic, log: simulation.truncate(topic, log, chance.randint(1, 4))),
        }
        simulation.meanwhile = self._work

    def run(self, steps: int = 150) -> None:
        """Take `steps` steps, then let everything settle; a failure names the seed and the last steps.

        Raises:
            InvariantBroken: an invariant does not hold.
        """
        simulation = self._simulation
        try:
            for _ in range(self._chance.randint(1, 2)):
                simulation.add()
            for _ in range(steps):
                self._do[self._chance.choices(self.actions, cum_weights=self._weights)[0]]()
            simulation.settle()
        except Exception as error:
            last = "\n  ".join(simulation.trace[-60:])
            error.add_note(f"seed {simulation.seed}, step {simulation.step}; the last steps were\n  {last}")
            raise

    # What may happen

    def _on_one(self, do: Callable[[Instance], None]) -> None:
        # Not inside a rebalance callback of the same instance: a process cannot do two things on one thread.
        able = [instance for instance in self._simulation.instances if not instance.polling]
        if able:
            do(self._chance.choice(able))

    def _on_log(self, do: Callable[[str, int], None]) -> None:
        topic = self._chance.choice(self._topics)
        do(topic, self._chance.randrange(self._simulation.broker.topics()[topic]))

    def _work(self) -> None:
        able = [one for one in self._simulation.instances if one.state is not State.FROZEN]
        if not able:
            return
        instance = self._chance.choice(able)
        worker = self._chance.choice(instance.consumer.workers)
        if worker not in instance.calls:
            self._simulation.take(instance, worker)
            return
        if worker in instance.hanging:
            return
        call, drawn = instance.calls[worker], self._chance.random()
        handler = call.assignment.route.handler
        # A failure of such a handler ends its instance, so it is rare.
        fail = self._fail / 20 if handler.on_failure is OnFailure.STOP else self._fail
        if drawn < fail:
            count = len(call.messages)
            places = [place for place in range(count) if self._chance.random() < 0.5]
            self._simulation.fail(instance, worker, places)
        elif drawn < fail + self._put_off and handler.batch == 1:
            self._simulation.put_off(instance, worker)
        else:
            self._simulation.finish(instance, worker)

    def _hang(self) -> None:
        """Let a call that is under way hang, until it is interrupted at least, or one come back that was abandoned."""
        calls = [(one, worker) for one in self._simulation.instances for worker in one.calls]
        if not calls:
            return
        instance, worker = self._chance.choice(calls)
        if worker.abandoned is None and not instance.polling:
            instance.hanging.add(worker)
            for _ in range(self._chance.randint(1, 3)):
                self._simulation.poll(instance)
                self._simulation.advance(TIME_LIMIT_S + GRACE_S)
        elif instance.state is not State.FROZEN:
            self._simulation.finish(instance, worker)

    def _poll(self) -> None:
        self._on_one(self._simulation.poll)

    def _produce(self) -> None:
        for _ in range(self._chance.randint(1, 4)):
            self._simulation.produce(self._chance.choice(self._topics), self._chance.choice(self._keys))

    def _advance(self) -> None:
        self._simulation.advance(self._chance.choice((0.01, 0.1, 0.5, 1.0, 2.0, 6.0, 50.0)))

    def _complete(self) -> None:
        out = [(one, each) for one in self._simulation.instances for each in one.deferred]
        if out:
            instance, completion = self._chance.choice(out)
            if instance.state is not State.FROZEN:
                well = self._chance.random() >= self._fail
                self._simulation.settle_completion(instance, completion, well=well)

    def _add(self) -> None:
        if len(self._simulation.instances) < _MOST_INSTANCES:
            self._simulation.add()

    def _transaction(self) -> None:
        simulation, chance = self._simulation, self._chance
        if simulation.open and chance.random() < 0.6:
            simulation.end_transaction(chance.choice(simulation.open), commit=chance.random() < 0.5)
            return
        transaction = simulation.begin_transaction()
        for _ in range(chance.randint(0, 3)):
            topic, key = chance.choice(self._topics), chance.choice(self._keys)
            simulation.produce(topic, key, transaction=transaction)

    def _commit_fault(self) -> None:
        chance = self._chance
        seconds, error = chance.choice((0.5, 2.0, 12.0)), chance.choice(_COMMIT_ERRORS)
        kind = chance.choice(("refused", "lost", "answered late", "late", "repeated"))
        self._simulation.trouble(
            f"a commit is {kind} ({seconds:g} s)",
            lambda broker: {
                "refused": lambda: broker.fail("commit", error, times=chance.randint(1, 3)),
                "lost": lambda: broker.lose_answer("commit"),
                "answered late": lambda: broker.delay_answer("commit", seconds),
                "late": lambda: broker.delay_request("commit", seconds),
                "repeated": lambda: broker.repeat_request("commit", seconds),
            }[kind](),
            repeats=kind == "repeated",
        )

    def _write_fault(self) -> None:
        kind = self._chance.choice(("refused", "lost", "late", "queue full"))
        self._simulation.trouble(
            f"a dead letter is {kind}",
            lambda broker: {
                "refused": lambda: broker.fail("produce", codes.TIMED_OUT, times=2),
                "lost": lambda: broker.lose_answer("produce"),
                "late": lambda: broker.delay_answer("produce", 2.0),
                "queue full": lambda: broker.fail("queue", codes.QUEUE_FULL),
            }[kind](),
        )

    def _coordinator(self) -> None:
        seconds = self._chance.choice((1.0, 20.0))
        self._simulation.trouble(
            f"the coordinator is away for {seconds:g} s", lambda broker: broker.coordinator_away(seconds)
        )

    def _change(self, instance: Instance) -> None:
        chance = self._chance
        self._simulation.change(
            instance,
            workers=chance.choice((None, 1, 2, 4)),
            max_in_flight=chance.choice((None, 1, 5, 1_000)),
            max_in_flight_bytes=chance.choice((None, 1_000, 10_000)),
        )

    def _rates(self, instance: Instance) -> None:
        chance = self._chance
        topic = chance.choice(self._topics)
        self._simulation.change_rates(
            instance, topic, chance.choice((None, 0, 0.5, 10.0)), chance.choice((None, None, 1.0))
        )


__all__ = ["COMMON", "RARE", "TIME_LIMIT_S", "RandomDriver"]
