"""The order of a task's messages, by simulation: every interleaving of calls, failures and waits keeps the promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.consumer import DeferredCompletion, Handler, handler, retry
from penstock.consumer.handlers.handler import orderings_of
from penstock.consumer.handlers.route import Failed, Route
from penstock.errors import BatchError, RetryLater, SinkError
from penstock.message import FixedRecord, Message, Record
from penstock.spark_sink.sinks.handlers.execution import runners
from penstock.spark_sink.sinks.handlers.execution.key_queues import HandlerCall, KeyQueues

Place = tuple[str, int]


def nothing(_: object) -> None:
    """A handler that is not called: the tests say what came of a call."""


def row(
    key: bytes | None, offset: int, topic: str = "orders", value: bytes = b"", headers: tuple[Any, ...] = ()
) -> Record:
    return FixedRecord(topic, 0, offset, key, value, headers, None)


def routes_of(handlers: Mapping[str, Handler]) -> dict[str, Route]:
    orderings = orderings_of(handlers, 1)
    return {topic: Route(one, orderings[topic], one.function) for topic, one in handlers.items()}


def waits(seconds: float = 1.0, attempts: int = 3) -> Any:
    return retry(attempts, wait=lambda _: seconds)


@dataclass
class Letters:
    """Takes dead letters."""

    places: list[Place] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)

    def __call__(self, record: Record, _route: Route, _error: BaseException, attempts: int) -> None:
        self.places.append((record.topic(), record.offset()))
        self.attempts.append(attempts)


def queues_of(
    rows: list[Record],
    handlers: Mapping[str, Handler],
    letters: Callable[..., None] | None = None,
    *,
    max_parked: int = 1000,
    max_parked_bytes: int = 1 << 30,
) -> tuple[KeyQueues, Iterator[Record]]:
    taken = iter(rows)
    return KeyQueues(
        taken, routes_of(handlers), letters or Letters(), max_parked=max_parked, max_parked_bytes=max_parked_bytes
    ), taken


def places_of(call: HandlerCall) -> list[Place]:
    return [(record.topic(), record.offset()) for _, record in call.items]


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 30))
    keys = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    topics = draw(st.lists(st.sampled_from(["orders", "payments"]), min_size=count, max_size=count))
    return {
        # In the order of a task: by topic, then by offset.
        "rows": sorted(
            [
                row(None if key == 0 else b"%d" % key, offset, topic)
                for offset, (key, topic) in enumerate(zip(keys, topics, strict=True))
            ],
            key=lambda one: (one.topic(), one.offset()),
        ),
        # How often each row fails before it succeeds.
        "failures": draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)),
        "batches": {"orders": draw(st.sampled_from([1, 1, 3])), "payments": draw(st.sampled_from([1, 1, 4]))},
        "filtered": draw(st.sets(st.integers(0, count - 1), max_size=5)),
        "undecodable": draw(st.sets(st.integers(0, count - 1), max_size=3)),
        "on_failure": draw(st.sampled_from(["dead_letter", "drop"])),
        "order": draw(st.sampled_from(["key", "key", "partition", "none"])),
        "key_space": draw(st.sampled_from([None, "customer"])),
        "keyless": draw(st.sampled_from(["partition", "together", "spread"])),
        "concurrency": draw(st.sampled_from([1, 2, 5])),
        "max_parked": draw(st.sampled_from([1, 3, 100])),
    }


class Simulation:
    """Plays a task: begins calls, ends them in any order with what the world says, and looks at each step."""

    def __init__(self, world: dict[str, Any]) -> None:
        self.world = world
        self.undecodable = {b"%d" % offset for offset in world["undecodable"]}
        handlers = {topic: self.handler(topic) for topic in ("orders", "payments")}
        rows = [row(one.key(), one.offset(), one.topic(), b"%d" % one.offset()) for one in world["rows"]]
        self.letters = Letters()
        routes = routes_of(handlers)
        self.queues, self.taken = queues_of(rows, handlers, self.letters, max_parked=world["max_parked"])
        self.identity = {(one.topic(), one.offset()): routes[one.topic()].ordering.identity(one) for one in rows}
        self.tried: Counter[Place] = Counter()
        self.handled: list[Place] = []
        self.calls: list[HandlerCall] = []
        self.bound = world["max_parked"] + world["concurrency"] * max(world["batches"].values())

    def handler(self, topic: str) -> Handler:
        return handler(
            self.serve,
            order=self.world["order"],
            key_space=self.world["key_space"],
            keyless=self.world["keyless"],
            batch=self.world["batches"][topic],
            filter=lambda message: message.offset not in self.world["filtered"],
            decoder=self.decode,
            retry_policy=waits(),
            on_failure=self.world["on_failure"],
        )

    def decode(self, value: bytes) -> bytes:
        if value in self.undecodable:
            raise ValueError("unreadable")
        return value

    def fails(self, place: Place) -> int:
        """Return how often a message fails before it succeeds."""
        times: int = self.world["failures"][place[1]]
        return times

    def exhausted(self, place: Place) -> bool:
        return self.tried[place] >= 3 and self.fails(place) >= 3

    def ended(self, place: Place) -> bool:
        unread = place[1] in self.world["undecodable"]
        return (
            place in self.handled
            or place[1] in self.world["filtered"]
            or (unread and (place in self.letters.places or self.world["on_failure"] == "drop"))
            or self.exhausted(place)
        )

    def play(self, choose: Callable[[int], int]) -> None:
        """Play until all is done; `choose` says which of so many calls ends next."""
        now = 0.0
        for _ in range(10_000):
            free = len(self.calls) < self.world["concurrency"]
            begun = self.queues.next(now) if free else None
            if begun is not None:
                self.begin(begun)
            elif self.calls:
                if free and self.queues.parked < self.world["max_parked"]:
                    assert next(self.taken, None) is None, "a row was left though nothing keeps it"
                self.end(self.calls.pop(choose(len(self.calls))), now)
            elif (due := self.queues.next_due()) is not None:
                assert due > now, "waits for what is due"
                now = due
            else:
                return
            in_hands = sum(len(call.items) for call in self.calls)
            assert self.queues.parked + in_hands <= self.bound
        raise AssertionError("it goes round for ever")

    def run(self) -> None:
        """Have it all handled by the runner, one call after the other."""
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        runners.run(self.queues, lambda: now[0], sleep)

    def serve(self, work: Message | list[Message]) -> None:
        """Be the handler that the runner calls."""
        places = [(one.topic, one.offset) for one in (work if isinstance(work, list) else [work])]
        self.look_at(places)
        error = self.failure_of(places, batched=isinstance(work, list))
        if error is not None:
            raise error

    def begin(self, call: HandlerCall) -> None:
        busy = {key for one in self.calls for key, _ in one.items}
        assert not busy & {key for key, _ in call.items}, "two of a key at once (I1)"
        self.look_at(places_of(call))
        self.calls.append(call)

    def look_at(self, in_call: list[Place]) -> None:
        for number, place in enumerate(in_call):
            same = [one for one, key in self.identity.items() if key == self.identity[place]]
            for earlier in same[: same.index(place)]:
                assert self.ended(earlier) or earlier in in_call[:number], "before its turn (I2)"
            assert place not in self.handled, "done already"

    def end(self, call: HandlerCall, now: float) -> None:
        error = self.failure_of(places_of(call), batched=call.route.batch > 1)
        self.queues.complete(call, Failed(error) if error else None, now)

    def failure_of(self, places: list[Place], *, batched: bool) -> BaseException | None:
        """Say what comes of a call, as the world has it."""
        failed: dict[int, BaseException] = {}
        held: set[Hashable] = set()
        for number, place in enumerate(places):
            if self.identity[place] in held:
                continue
            if self.fails(place) > self.tried[place]:
                failed[number] = RuntimeError("no")
                held.add(self.identity[place])
                self.tried[place] += 1
            else:
                self.handled.append(place)
        return BatchError(failed) if failed and batched else failed.get(0)


@given(worlds(), st.data())
def test_whatever_fails_and_whenever_it_ends_each_row_ends_once_in_order_and_no_two_of_a_key_at_once(
    world: dict[str, Any], data: st.DataObject
) -> None:
    one = Simulation(world)

    one.play(lambda count: data.draw(st.integers(0, count - 1)))

    _require_ended(one, world)


@given(worlds())
def test_the_runner_which_takes_rows_as_they_come_while_none_waits_keeps_the_same_promises(
    world: dict[str, Any],
) -> None:
    one = Simulation(world)

    one.run()

    _require_ended(one, world)


def _require_ended(one: Simulation, world: dict[str, Any]) -> None:
    counts, places = one.queues.counts, set(one.identity)
    filtered = {place for place in places if place[1] in world["filtered"]}
    unread = {place for place in places if place[1] in world["undecodable"]}
    given_up = {place for place in places if one.exhausted(place) or place in unread} - filtered
    assert sorted(one.handled) == sorted(places - filtered - given_up)
    assert counts.rows == counts.done == len(places)
    assert (counts.handled, counts.filtered) == (len(one.handled), len(filtered))
    if world["on_failure"] == "dead_letter":
        assert (counts.dead_letters, counts.dropped) == (len(given_up), 0)
        assert sorted(one.letters.places) == sorted(given_up)
    else:
        assert (counts.dead_letters, counts.dropped) == (0, len(given_up))
    assert (one.queues.parked, one.queues.parked_bytes) == (0, 0)


class Bench:
    """A clock that `sleep` moves, and a handler that fails as told and writes down what it is given."""

    def __init__(self, failing: Mapping[int, int] | None = None) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.failing = dict(failing or {})
        self.seen: list[tuple[float, int]] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def time(self) -> float:
        return self.now

    def __call__(self, message: Message) -> None:
        self.seen.append((self.now, message.offset))
        if self.failing.get(message.offset, 0) > 0:
            self.failing[message.offset] -= 1
            raise RuntimeError("not yet")

    def run(
        self, rows: list[Record], letters: Letters | None = None, *, max_parked: int = 1000, **options: Any
    ) -> KeyQueues:
        queues, _ = queues_of(rows, {"orders": handler(self, **options)}, letters, max_parked=max_parked)
        runners.run(queues, self.time, self.sleep)
        return queues


def test_a_parked_key_delays_no_other_key() -> None:
    bench = Bench({0: 2})

    bench.run([row(b"a", 0), row(b"b", 1), row(b"a", 2), row(b"c", 3)], retry_policy=waits(5.0))

    assert bench.seen == [(0, 0), (0, 1), (0, 3), (5, 0), (10, 0), (10, 2)]


def test_at_the_bound_the_task_waits_for_the_earliest_retry_and_takes_nothing_in() -> None:
    bench = Bench({0: 1})

    bench.run([row(b"a", 0), row(b"a", 1), row(b"b", 2)], max_parked=2, retry_policy=waits(5.0))

    assert bench.seen == [(0, 0), (5, 0), (5, 1), (5, 2)]


def test_the_bound_counts_bytes_too() -> None:
    bench = Bench({0: 1})
    rows = [row(b"a", 0, value=b"x" * 2000), row(b"b", 1, value=b"x")]
    queues, taken = queues_of(rows, {"orders": handler(bench, retry_policy=waits())}, max_parked_bytes=2000)
    call = queues.next(0)
    assert call is not None

    queues.complete(call, Failed(RuntimeError("no")), 0)

    assert queues.next(0) is None
    assert next(taken).offset() == 1


def test_retry_later_says_when_and_the_policy_says_how_often() -> None:
    bench = Bench()
    letters = Letters()

    def later(message: Message) -> None:
        bench(message)
        raise RetryLater(7.0)

    queues, _ = queues_of(
        [row(b"a", 0)], {"orders": handler(later, retry_policy=waits(), on_failure="dead_letter")}, letters
    )
    runners.run(queues, bench.time, bench.sleep)

    assert bench.seen == [(0, 0), (7, 0), (14, 0)]
    assert (letters.places, letters.attempts) == ([("orders", 0)], [3])
    assert (queues.counts.failed, queues.counts.retried, queues.counts.dead_letters) == (3, 2, 1)


def test_a_handler_that_puts_its_completion_off_fails_the_task() -> None:
    queues, _ = queues_of([row(b"a", 0)], {"orders": handler(lambda _: DeferredCompletion(), on_failure="drop")})

    with pytest.raises(SinkError, match="returned a DeferredCompletion, which cannot be put off on an executor"):
        runners.run(queues, lambda: 0.0, lambda _: None)
