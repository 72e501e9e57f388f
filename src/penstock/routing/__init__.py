"""Which lane a message belongs to, what waits in each lane, and which lane is served next. Pure."""

from penstock.routing.hashing import lane_of
from penstock.routing.lanes import KeyState, Lane, ParkedKey, Run, ThrottledRuns
from penstock.routing.scheduler import LANES_PER_WORKER, Scheduler

__all__ = ["LANES_PER_WORKER", "KeyState", "Lane", "ParkedKey", "Run", "Scheduler", "ThrottledRuns", "lane_of"]
