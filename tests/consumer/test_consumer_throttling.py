"""A handler's rate holds that handler and no other, keeps the order of each key, and serves the oldest first."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from stepped_engine import SteppedEngine

import penstock
from penstock.consumer import handler
from penstock.message import Message
from penstock.testing import TestApp
from support.consumers import app_of


def test_a_held_topic_that_has_all_the_bytes_holds_no_other_topic() -> None:
    app, seen = app_of(max_in_flight_bytes=1_000_000), list[int]()
    app.handler("held", rate=0)(nothing)
    app.handler("free")(lambda message: seen.append(message.offset))

    with TestApp(app) as test:
        for _ in range(300):
            test.send("held", b"x" * 10_000, key="same")
        test.advance(5)
        for number in range(1000):
            test.send("free", b"x", key=f"k{number}")
        test.advance(5)
        paused = {one.topic: one.paused for one in test.statistics().partitions}
        test._end()

    assert len(seen) == 1000
    assert paused == {"held": "byte limit", "free": None}


@pytest.mark.parametrize("batch", [1, 4])
def test_a_rate_keeps_the_order_of_each_key_also_when_it_is_taken_away(batch: int) -> None:
    app = app_of(workers=4)
    seen: list[tuple[bytes | None, int]] = []

    @app.handler("slow", rate=10, batch=batch)
    def slow(messages: Message | list[Message]) -> None:
        given = messages if isinstance(messages, list) else [messages]
        seen.extend((message.key, message.offset) for message in given)

    with TestApp(app) as test:
        for number in range(300):
            test.send("slow", b"x", key=b"k%d" % (number % 30))
        test.advance(10)
        limited = len(seen)
        for number in range(300):
            test.send("slow", b"x", key=b"k%d" % (number % 30))
        running = test._running()
        for route in running.engine.routes.values():
            route.change(retry=None, rate=None, key_rate=None)
        running.engine.wake_all()
        for number in range(300):
            test.send("slow", b"x", key=b"k%d" % (number % 30))
        test.settle()

    assert 100 <= limited <= 102
    assert len(seen) == 900
    for key in {key for key, _ in seen}:
        assert all(former < later for former, later in pairwise([at for one, at in seen if one == key]))


def test_the_oldest_message_is_begun_first_whichever_lane_it_is_in() -> None:
    app = app_of(workers=2)
    seen: list[int] = []

    @app.handler("slow", rate=10)
    def slow(message: Message) -> None:
        seen.append(message.offset)

    with TestApp(app) as test:
        for number in range(100):
            test.send("slow", b"x", key=b"k%d" % (number % 25), partition=0)
        # One fetch after the other comes while the first waits.
        for number in range(60):
            test.send("slow", b"x", key=b"n%d" % number, partition=0)
            test.advance(0.1)
        test._end()

    assert seen == sorted(seen)
    assert len(seen) >= 59


def test_a_throttled_lane_has_one_waiter_in_the_bucket_and_drops_what_was_revoked() -> None:
    stepped = SteppedEngine({"slow": handler(nothing, rate=0), "free": handler(nothing)})
    token_bucket = stepped.engine.routes["slow"].token_bucket
    stepped.feed("slow", *((b"k%d" % number, b"x") for number in range(500)))
    stepped.serve()

    for _ in range(5):
        stepped.revoke("slow")
        stepped.serve()
        stepped.assign("slow")
        stepped.feed("slow", (b"k", b"x"), (b"l", b"x"))
        stepped.serve()

    held = stepped.engine.scheduler.lanes[0].aside[token_bucket]
    assert len(token_bucket._waiting) == 1
    assert sum(len(run.records) for run in held.runs) == 2
    assert stepped.of("slow").tracker.in_flight == 2
    token_bucket.rate = None
    for wake in token_bucket.release(time.monotonic()):
        wake()
    stepped.serve()
    assert stepped.of("slow").tracker.in_flight == 0
    assert stepped.engine.scheduler.lanes[0].aside == {}


def nothing(_message: Message) -> None:
    """Do nothing."""


@pytest.mark.parametrize("limit", [100, 10_000])
def test_a_hot_key_with_a_rate_holds_no_cold_ones_until_its_messages_fill_the_parked_limit(limit: int) -> None:
    app = app_of(max_in_flight=limit)
    seen: list[bytes | None] = []

    @app.handler("topic", key_rate=1)
    def note(message: Message) -> None:
        seen.append(message.key)

    with TestApp(app) as test:
        for _ in range(3000):
            test.send("topic", b"x", key=b"hot", partition=0)
        for number in range(3000):
            test.send("topic", b"x", key=b"c%d" % number, partition=0)
        test.settle()
        test.advance(5)
        told = next(one for one in test.statistics().partitions if one.partition == 0)
        test._end()

    cold = [key for key in seen if key != b"hot"]
    assert 5 <= seen.count(b"hot") <= 7
    if limit > 3000:
        assert (len(cold), told.paused, told.parked) == (3000, None, 3000 - seen.count(b"hot"))
    else:
        # One log is read in order: what is behind the hot key's messages is not fetched.
        assert (cold, told.paused) == ([], "parked limit")


def test_a_completion_that_is_out_counts_in_the_parked_limit() -> None:
    app = app_of(max_in_flight=100)
    out: list[penstock.DeferredCompletion] = []

    @app.handler("topic")
    def put_off(_message: Message) -> penstock.DeferredCompletion:
        out.append(penstock.DeferredCompletion())
        return out[-1]

    with TestApp(app) as test:
        for number in range(100):
            test.send("topic", b"x", key=b"k%d" % number, partition=0)
        test.advance(1)
        told = next(one for one in test.statistics().partitions if one.partition == 0)
        for one in out:
            one.complete()
        test.advance(1)
        later = next(one for one in test.statistics().partitions if one.partition == 0)

    assert (told.parked, told.paused) == (100, "parked limit")
    assert (later.parked, later.paused) == (0, None)
