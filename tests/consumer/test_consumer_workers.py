"""The pool of worker threads, without a broker."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from stepped_engine import SteppedEngine

from penstock.consumer import ConsumerSettings, handler
from penstock.consumer.execution.threads import WorkerPool


def test_no_place_where_a_handler_may_run_is_out_of_sight_while_workers_go() -> None:
    engine = SteppedEngine({"t": handler(lambda _: None)}).engine
    pool = WorkerPool("t", ConsumerSettings(workers=5), engine.processor, lambda: None)
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
