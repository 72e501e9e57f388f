"""Pure routing: the lane of a message, the queue of each lane, and the scheduler that chooses the next lane."""

from penstock.routing.hashing import lane_of
from penstock.routing.lanes import KeyState, Lane, ParkedKey, Run, RunsAside
from penstock.routing.scheduler import Scheduler

__all__ = ["KeyState", "Lane", "ParkedKey", "Run", "RunsAside", "Scheduler", "lane_of"]
