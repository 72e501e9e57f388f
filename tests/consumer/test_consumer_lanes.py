"""Lanes: which handlers have which, their processing step by step, and the pool of workers, without a broker."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import tenacity
from stepped_engine import SteppedEngine

from penstock.consumer import ConsumerSettings, handler, retry
from penstock.consumer.lanes.plan import LanePlan
from penstock.consumer.run.threads import WorkerPool
from penstock.errors import ConfigurationError, PenstockError
from penstock.message import Message


def plain(*_: object) -> None:
    """Do nothing."""


async def awaited(*_: object) -> None:
    """Do nothing."""


def test_each_kind_has_lanes_of_its_own_in_one_queue_and_each_handler_of_batches_a_few() -> None:
    handlers = [handler(plain), handler(plain), handler(awaited), handler(plain, batch=9), handler(awaited, batch=100)]
    plan = LanePlan(handlers, ConsumerSettings(workers=4, max_concurrency=1_000))

    assert [plan.group_of(each) for each in handlers] == [(0, 256), (0, 256), (256, 8_000), (8_256, 4), (8_260, 10)]
    assert plan.queues == [0] * 256 + [1] * 8_000 + [0] * 4 + [1] * 10


def test_pinned_is_a_lane_and_a_queue_for_each_worker() -> None:
    handlers = [handler(plain), handler(plain, batch=5), handler(awaited)]

    assert LanePlan(handlers, ConsumerSettings(workers=3, pinned=True)).queues == [0, 1, 2, 0, 1, 2, 3, 3, 3]


def test_handlers_of_one_key_space_have_the_same_lanes_and_are_of_one_kind() -> None:
    together = [handler(plain, key_space="k"), handler(plain, key_space="k", batch=5)]
    plan = LanePlan([*together, handler(plain)], ConsumerSettings(workers=4))

    assert len({plan.group_of(each) for each in together}) == 1
    with pytest.raises(ConfigurationError, match="plain and awaited share key_space='k'"):
        LanePlan([*together, handler(awaited, key_space="k")], ConsumerSettings())


def test_what_the_filter_refuses_need_not_have_a_key() -> None:
    seen: list[bytes | None] = []

    def own_key(message: Message) -> bytes:
        if message.value == b"refused":
            raise LookupError("this kind has no key")
        return b"k"

    stepped = SteppedEngine(
        {"t": handler(lambda one: seen.append(one.value), filter=lambda one: one.value != b"refused", key=own_key)}
    )
    stepped.feed("t", (None, b"refused"), (None, b"1"))
    stepped.serve()

    assert seen == [b"1"]
    assert (stepped.count("filtered"), stepped.count("failed")) == (1, 0)
    assert stepped.of("t").tracker.in_flight == 0


@pytest.mark.parametrize("kind", [LookupError, SystemExit])
def test_a_retry_policy_that_raises_stops_the_consumer_by_name_and_keeps_the_offset(kind: type[BaseException]) -> None:
    def no_wait(_state: tenacity.RetryCallState) -> float:
        raise kind("a defect of the policy")

    def fails(_message: Message) -> None:
        raise ValueError

    stepped = SteppedEngine({"t": handler(fails, retry=retry(attempts=3, wait=no_wait))})
    stepped.feed("t", (b"k", b"1"), (b"k", b"2"))
    stepped.serve()

    (stop,) = stepped.failures
    assert isinstance(stop, PenstockError)
    assert "the retry policy of" in str(stop)
    assert "t:0@0" in str(stop)
    assert isinstance(stop.__cause__, kind)
    assert stepped.of("t").tracker.in_flight == 2


def test_a_key_that_waits_for_ever_is_free_again_once_its_partition_is_gone() -> None:
    calls: list[bytes | None] = []

    def fails(message: Message) -> None:
        calls.append(message.value)
        if message.value == b"poison":
            raise ValueError

    stepped = SteppedEngine({"t": handler(fails, retry=retry(wait=tenacity.wait_fixed(float("inf"))))})
    stepped.feed("t", (b"k", b"poison"), (b"other", b"1"))
    stepped.serve()
    stepped.pass_time(1e9)
    while_assigned = list(calls)
    found = stepped.explain("t")

    stepped.revoke("t")
    stepped.serve()
    again = stepped.assign("t", start=2)
    stepped.feed("t", (b"k", b"2"))
    stepped.serve()

    assert while_assigned == [b"poison", b"1"]
    assert (found[0].state, found[0].due_in, found[0].attempt) == ("parked", None, 1)
    assert calls == [b"poison", b"1", b"2"]
    assert again.tracker.in_flight == 0
    assert stepped.engine.scheduler.lanes[0].parked == {}


def test_no_place_where_a_handler_may_run_is_out_of_sight_while_workers_go() -> None:
    engine = SteppedEngine({"t": handler(lambda _: None)}).engine
    pool = WorkerPool("t", 5, engine.processor, lambda: None)
    seen: list[int] = []

    def looks(frame: FrameType, _event: str, _argument: object) -> Any:
        # What a revocation on the poll thread would see, were this thread interrupted at that line.
        if frame.f_code is WorkerPool.resize.__code__:
            seen.append(len({id(slot) for slot in pool.slots}))
        return looks

    before = sys.gettrace()
    sys.settrace(looks)
    try:
        pool.resize(2)
    finally:
        sys.settrace(before)

    assert len(pool.workers) == 2
    assert len(seen) > 5
    assert set(seen) == {5}
