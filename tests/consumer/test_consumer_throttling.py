"""Who gets the workers: a rate holds its handler and no other, and failing keys starve no healthy ones."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import tenacity
from stepped import Stepped
from stepped_engine import SteppedEngine

from penstock.consumer import handler, retry
from penstock.message import Message
from penstock.testing import TestApp
from support.consumers import app_of, nothing


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
        running.engine.processor.wake_all()
        for number in range(300):
            test.send("slow", b"x", key=b"k%d" % (number % 30))
        test.settle()

    assert 100 <= limited <= 102
    assert len(seen) == 900
    for key in {key for key, _ in seen}:
        assert all(former < later for former, later in pairwise([at for value, at in seen if value == key]))


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
        status = next(partition for partition in test.statistics().partitions if partition.partition == 0)
        test._end()

    cold = [key for key in seen if key != b"hot"]
    assert 5 <= seen.count(b"hot") <= 7
    if limit > 3000:
        assert (len(cold), status.paused, status.parked) == (3000, None, 3000 - seen.count(b"hot"))
    else:
        # One log is read in order: what is behind the hot key's messages is not fetched.
        assert (cold, status.paused) == ([], "parked limit")


#: Seconds that every call takes, and a step of the clock.
CALL_S = 0.005
WORKERS = 16
FOR_EVER = retry(stop=tenacity.stop_never, wait=tenacity.wait_fixed(0.05))


class Fails:
    """Fails bad messages."""

    def __init__(self) -> None:
        self.healthy = self.failing = 0
        self.failed: set[bytes | None] = set()

    def __call__(self, message: Message) -> None:
        """Count, and fail."""
        if (message.key or b"").startswith(b"bad"):
            self.failing += 1
            self.failed.add(message.key)
            raise ValueError
        self.healthy += 1


def work(stepped: Stepped, seconds: float) -> None:
    """Let all workers work side by side for so long, each call taking its time."""
    for _ in range(round(seconds / CALL_S)):
        stepped.poll()
        for worker in stepped.consumer.workers:
            if worker.lane is None:
                worker.take()
        stepped.broker.advance(CALL_S)
        for worker in stepped.consumer.workers:
            if worker.work is not None:
                stepped.finish(worker)


def healthy_share(failing_keys: int, seconds: float, **settings: object) -> tuple[float, int]:
    """Return the share of the possible rate that healthy keys get with failing ones, and the failing calls."""
    seen = Fails()
    stepped = Stepped(
        {"t": handler(seen, retry=FOR_EVER)},
        workers=WORKERS,
        max_in_flight=3_000,
        max_in_flight_bytes=1 << 32,
        **settings,
    )
    for number in range(failing_keys):
        stepped.broker.produce("t", b"", key=b"bad%d" % number)
    for number in range(20_000):
        stepped.broker.produce("t", b"", key=b"good%d" % (number % 997))
    # Until all that fails has failed once; were there nothing else, it would take 0.6 s.
    for _ in range(40):
        if len(seen.failed) < failing_keys:
            work(stepped, 0.05)
    assert len(seen.failed) == failing_keys
    healthy, failing = seen.healthy, seen.failing
    work(stepped, seconds)
    return (seen.healthy - healthy) / (seconds / CALL_S * WORKERS), seen.failing - failing


@pytest.mark.parametrize("settings", [{}, {"lanes_per_worker": 1}, {"pinned": True}], ids=str)
def test_retries_without_end_leave_healthy_keys_half_of_the_workers(settings: dict[str, object]) -> None:
    alone, _ = healthy_share(0, 0.5, **settings)

    together, retries = healthy_share(2_000, 1.5, **settings)

    assert alone > 0.9
    assert together >= 0.5 * alone
    # And the retries go on.
    assert retries > 0.2 * 1.5 / CALL_S * WORKERS


def test_a_few_retries_do_not_wait_for_healthy_traffic() -> None:
    share, retries = healthy_share(10, 1.0)

    # Each 50 ms after the last try, and little more: a call, and the slice of a worker that is with another lane.
    assert retries >= 10 * 1.0 / 0.1
    assert share > 0.7
