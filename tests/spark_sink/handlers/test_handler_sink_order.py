"""The order of a task's messages: the promises of lanes hold with failures and with every caller of handlers."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
from handler_rows import Row, publish_task, quickly, run_task
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.consumer import Handler, handler, retry
from penstock.consumer.handlers.handler import orderings_of
from penstock.errors import BatchError, SinkError
from penstock.message import FixedRecord, Message

Place = tuple[str, int]
TOPICS = ("orders", "payments")
TRIES = 3


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 30))
    of_each = {"min_size": count, "max_size": count}
    keys = draw(st.lists(st.integers(0, 4), **of_each))
    topics = sorted(draw(st.lists(st.sampled_from(TOPICS), **of_each)))
    return {
        # In the order of a task: by topic, then by offset.
        "rows": [
            Row(None if key == 0 else b"%d" % key, offset, topic, value=b"%d" % offset)
            for offset, (key, topic) in enumerate(zip(keys, topics, strict=True))
        ],
        # How often each row fails before it succeeds.
        "failures": draw(st.lists(st.integers(0, 4), **of_each)),
        "batches": {"orders": draw(st.sampled_from([1, 1, 3])), "payments": draw(st.sampled_from([1, 1, 4]))},
        "async": draw(st.sampled_from([(), (), TOPICS, ("payments",)])),
        "filtered": draw(st.sets(st.integers(0, count - 1), max_size=5)),
        "undecodable": draw(st.sets(st.integers(0, count - 1), max_size=3)),
        "on_failure": draw(st.sampled_from(["dead_letter", "drop"])),
        "order": draw(st.sampled_from(["key", "key", "partition", "none"])),
        "key_space": draw(st.sampled_from([None, "customer"])),
        "keyless": draw(st.sampled_from(["partition", "together", "spread"])),
        "max_in_flight": draw(st.sampled_from([1, 3, 100])),
    }


class World:
    """Handlers that fail as the world says, and look at each call that it keeps the promises."""

    def __init__(self, world: dict[str, Any]) -> None:
        self.world = world
        self.handlers = {topic: self.handler(topic) for topic in TOPICS}
        orderings = orderings_of(self.handlers, 1)
        self.identity: dict[Place, Hashable] = {
            (row.topic, row.offset): orderings[row.topic].identity(
                FixedRecord(row.topic, 0, row.offset, row.key, row.value, (), None)
            )
            for row in world["rows"]
        }
        self.tried: Counter[Place] = Counter()
        self.handled: list[Place] = []
        self.running: set[Hashable] = set()
        self.wrong: list[str] = []

    def handler(self, topic: str) -> Handler:
        return handler(
            self.serve_async if topic in self.world["async"] else self.serve,
            order=self.world["order"],
            # A plain function and an `async def` have no keys in common.
            key_space=None if self.world["async"] == ("payments",) else self.world["key_space"],
            keyless=self.world["keyless"],
            batch=self.world["batches"][topic],
            filter=lambda message: message.offset not in self.world["filtered"],
            decoder=self.decode,
            retry=retry(TRIES, wait=lambda _: 0.0),
            on_failure=self.world["on_failure"],
        )

    def decode(self, value: bytes) -> bytes:
        if int(value) in self.world["undecodable"]:
            raise ValueError("unreadable")
        return value

    def serve(self, work: Message | list[Message]) -> None:
        self.end(self.begin(work), is_batch=isinstance(work, list))

    async def serve_async(self, work: Message | list[Message]) -> None:
        places = self.begin(work)
        await asyncio.sleep(0)
        self.end(places, is_batch=isinstance(work, list))

    def begin(self, work: Message | list[Message]) -> list[Place]:
        places = [(one.topic, one.offset) for one in (work if isinstance(work, list) else [work])]
        keys = {self.identity[place] for place in places}
        self.look(not self.running & keys, "two of a key at once (I1)")
        self.running |= keys
        for number, place in enumerate(places):
            same = [other for other, key in self.identity.items() if key == self.identity[place]]
            earlier = same[: same.index(place)]
            self.look(all(self.ended(one) or one in places[:number] for one in earlier), "before its turn (I2)")
            self.look(place not in self.handled, "done already")
        return places

    def end(self, places: list[Place], *, is_batch: bool) -> None:
        """Fail the messages that the world says; nothing behind one of a key is done."""
        self.running -= {self.identity[place] for place in places}
        failed: dict[int, BaseException] = {}
        stuck: set[Hashable] = set()
        for number, place in enumerate(places):
            if self.identity[place] in stuck:
                continue
            if self.world["failures"][place[1]] > self.tried[place]:
                failed[number] = RuntimeError("no")
                stuck.add(self.identity[place])
                self.tried[place] += 1
            else:
                self.handled.append(place)
        if failed:
            raise BatchError(failed) if is_batch else failed[0]

    def look(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    def given_up(self, place: Place) -> bool:
        is_exhausted = self.tried[place] >= TRIES and self.world["failures"][place[1]] >= TRIES
        return place[1] not in self.world["filtered"] and (is_exhausted or place[1] in self.world["undecodable"])

    def ended(self, place: Place) -> bool:
        return place in self.handled or place[1] in self.world["filtered"] or self.given_up(place)


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_whatever_fails_each_row_ends_once_in_order_and_no_two_of_a_key_at_once(world: dict[str, Any]) -> None:
    expected = World(world)

    published, report = publish_task(
        world["rows"], expected.handlers, max_in_flight=world["max_in_flight"], max_concurrency=3
    )

    places = set(expected.identity)
    filtered = {place for place in places if place[1] in world["filtered"]}
    given_up = sorted(place for place in places if expected.given_up(place))
    assert expected.wrong == []
    assert sorted(expected.handled) == sorted(places - filtered - set(given_up))
    assert (report.rows, report.handled, report.filtered) == (len(places), len(expected.handled), len(filtered))
    is_written = world["on_failure"] == "dead_letter"
    assert (report.dead_letters, report.dropped) == ((len(given_up), 0) if is_written else (0, len(given_up)))
    assert sorted((row.source[0], row.offset) for row in published if row.target_topic) == given_up * is_written


@pytest.mark.parametrize("limit", [{"max_in_flight": 2}, {"max_in_flight_bytes": 1}])
def test_at_the_bound_the_task_waits_for_the_earliest_retry_and_takes_nothing_in(limit: dict[str, Any]) -> None:
    seen: list[int] = []

    def work(message: Message) -> None:
        seen.append(message.offset)
        if seen == [0]:
            raise RuntimeError("not yet")

    # The last one waits for none, but more than a task takes in at once are before it.
    rows = [*(Row(b"a", offset) for offset in range(300)), Row(b"b", 300)]
    run_task(rows, {"orders": handler(work, retry=quickly())}, **limit)

    assert seen == [0, *range(301)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_wait_without_end_fails_the_task(*, is_async: bool) -> None:
    def work(_: Message) -> None:
        raise RuntimeError("no")

    async def later(message: Message) -> None:
        work(message)

    one = handler(later if is_async else work, retry=retry(9, wait=lambda _: math.inf))

    with pytest.raises(SinkError, match="of 2 messages of a task 0 are accounted for: a retry policy has no end"):
        run_task([Row(b"a", 0), Row(b"a", 1)], {"orders": one})
