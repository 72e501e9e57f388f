"""The drain: what was taken in is finished, committed, and only then the group is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.clients.cluster import Clock, ConsumerClient
from penstock.consumer.assignments import Assignments, Fetch, PauseReason
from penstock.consumer.execution.lanes.lane_processor import LaneProcessor
from penstock.consumer.failures.dead_letter_publisher import DeadLetterPublisher
from penstock.consumer.handlers.options.rate_limits import TokenBucket
from penstock.consumer.inspection.drain_report import DrainLog
from penstock.consumer.outbox.outbox import Outbox
from penstock.consumer.polling.committing.commits import Commits
from penstock.consumer.polling.flow_control.back_pressure import BackPressure
from penstock.consumer.polling.stop_request import StopRequest
from penstock.message import Record
from penstock.routing import KeyState, Scheduler


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Drain:
    """On the poll thread only, save `finished` and the log."""

    clock: Clock
    stop_request: StopRequest
    assignments: Assignments
    scheduler: Scheduler[Fetch, Record]
    processor: LaneProcessor
    publisher: DeadLetterPublisher
    outbox: Outbox
    back_pressure: BackPressure
    commits: Commits
    token_buckets: Sequence[TokenBucket]
    log: DrainLog
    #: Whether it ended with nothing left. Written by the poll thread before it leaves.
    finished: bool = field(default=False, init=False)

    def begin(self) -> float:
        """Have batches that are not full served too; return when the drain must end, on the engine's clock."""
        self.stop_request.drain()
        self.processor.drain()
        now, end_by = self.clock.monotonic(), self.stop_request.end_by
        self.log.begin(self.assignments.all(), now, max(0.0, end_by - now))
        return end_by

    def stop_fetching(self, client: ConsumerClient) -> None:
        """Pause what is not paused for the drain yet; new assignments come while it lasts."""
        for assignment in self.assignments.all():
            if assignment.paused is not PauseReason.STOPPING:
                self.back_pressure.pause(client, assignment, PauseReason.STOPPING)

    def is_over(self, client: ConsumerClient, deadline: float) -> bool:
        """Commit and return True once nothing is left to wait for, or the time is over."""
        assignments, now = self.assignments.all(), self.clock.monotonic()
        waits = self._waits_for(now, deadline)
        time_is_over = now >= deadline or self.stop_request.leaves_now
        if time_is_over or not waits:
            self.finished = not any(assignment.tracker.in_flight for assignment in assignments)
            if self.commits.commit_drained(client, now) or time_is_over:
                if waits:
                    self.log.cut_short(assignments, waits)
                return True
        self.log.go_on(assignments, now, deadline - now, waits)
        return False

    def _waits_for(self, now: float, deadline: float) -> list[str]:
        """Return what the drain waits for, in words."""
        # Lanes before and after all else: what a handler leaves behind (a retry, a completion, a dead letter) is there
        # before its lane is given back, and what brings a lane back does so before it is gone.
        idle = self.scheduler.idle
        waits = []
        if self.processor.deferred:
            waits.append("completions are put off")
        if self.outbox.waiting:
            waits.append("results, dead letters or messages for a retry topic are not written")
        if self.publisher.held:
            waits.append("dead letters or messages for a retry topic were refused, and are written again")
        if any(bucket.next_release(now) is not None for bucket in self.token_buckets):
            waits.append("some wait for their handler's rate")
        if self._has_retries_before(deadline):
            waits.append("some wait for their next try")
        if not (idle and self.scheduler.idle):
            waits.insert(0, "some are in a handler or next in line")
        return waits

    def _has_retries_before(self, deadline: float) -> bool:
        # Copies, made in one step: holders of lanes change the dictionaries meanwhile.
        parked = (key for lane in self.scheduler.lanes if lane.parked for key in list(lane.parked.values()))
        return any(key.state is KeyState.WAITING and not key.is_blocked and key.due_at < deadline for key in parked)
