"""How deep and how old the lanes are, by handler, in a bounded number of buckets: what a heat strip is drawn from."""

from __future__ import annotations

from penstock.consumer.assignments import Fetch
from penstock.message import Record
from penstock.routing import Scheduler

#: Buckets of one handler; neighbouring lanes share one where there are more lanes.
BUCKETS = 64
#: Runs of a lane that are counted one by one; of what is behind them, the mean is taken.
_COUNTED = 64

#: `depth`: messages that wait or are in a handler; `age`: seconds since the oldest of them was fetched.
Depths = dict[str, list[float]]


def lane_depths(scheduler: Scheduler[Fetch, Record], now: float) -> dict[str, Depths]:
    """Return depth and age by handler. Any thread; parked messages are not in it, for they do not wait for a worker."""
    lanes = scheduler.lanes
    buckets = min(BUCKETS, len(lanes))
    found: dict[str, Depths] = {}
    for number, lane in enumerate(lanes):
        if not lane.runs and not lane.aside:
            continue
        # Copies, each made in one step: the router appends and the holder takes meanwhile.
        runs = lane.runs.copy()
        for aside in lane.aside.copy().values() if lane.aside else ():
            runs += aside.runs.copy()
        place = number * buckets // len(lanes)
        scale = max(1.0, len(runs) / _COUNTED)
        for _, run in zip(range(_COUNTED), runs, strict=False):
            if not run.owner.assignment.active:
                # Of a former incarnation of its partition: it goes when its lane is served.
                continue
            name = run.owner.assignment.route.handler.name
            depths = found.get(name)
            if depths is None:
                depths = found[name] = {"depth": [0] * buckets, "age": [0.0] * buckets}
            depths["depth"][place] += round(max(0, len(run.records) - run.next) * scale)
            age = round(max(0.0, now - run.owner.arrived), 2)
            depths["age"][place] = max(depths["age"][place], age)
    return found
