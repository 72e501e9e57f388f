"""The order of a task's messages, by simulation: every interleaving of calls, failures and waits keeps the promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from key_queue_rows import Letters, Place, queues_of, routes_of, row, waits

from penstock.consumer import Handler, handler
from penstock.consumer.handlers.route import Failed
from penstock.errors import BatchError
from penstock.message import Message
from penstock.spark_sink.sinks.handlers.execution import runners
from penstock.spark_sink.sinks.handlers.execution.key_queues import HandlerCall


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
