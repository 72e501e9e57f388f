"""Which lane a message belongs to, what waits in each lane, and which lane is served next. Pure."""

from penstock.routing.hashing import lane_of
from penstock.routing.lanes import KeyState, Lane, ParkedKey, Run, ThrottledRuns
from penstock.routing.scheduler import Scheduler

__all__ = ["KeyState", "Lane", "ParkedKey", "Run", "Scheduler", "ThrottledRuns", "lane_of"]
