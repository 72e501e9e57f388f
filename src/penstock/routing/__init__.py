"""Which lane a message belongs to, what waits in each lane, and which lane is served next. Pure."""

from penstock.routing.hashing import lane_of
from penstock.routing.lanes import KeyState, Lane, ParkedKey, Run, RunsAside
from penstock.routing.scheduler import Scheduler

__all__ = ["KeyState", "Lane", "ParkedKey", "Run", "RunsAside", "Scheduler", "lane_of"]
