"""The poll loop: one thread owns the Kafka consumer. It alone polls, commits, pauses and serves rebalances.

It never waits for a handler, save within the budget of a revocation, so the poll interval is met whatever handlers do.
It goes on polling while it drains: what was taken in is finished, committed, and only then the group is left. `run` is
the body of that thread; a simulation takes the same steps one by one. `DrainLog` logs a drain: that it begins and how
much is in flight, why it is not over, and what it left undone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.clients.cluster import Clock, ConsumerClient
from penstock.consumer.assignments import Assignment, Assignments, PauseReason
from penstock.consumer.handlers.rate_limits import TokenBucket
from penstock.consumer.inspect.watchdog import Watchdog
from penstock.consumer.lanes.processor import LaneProcessor
from penstock.consumer.outbox.dead_letters import DeadLetterPublisher
from penstock.consumer.outbox.outbox import Outbox
from penstock.consumer.poll.back_pressure import BackPressure
from penstock.consumer.poll.commits import Commits
from penstock.consumer.poll.fetcher import SATURATED_S, Fetcher
from penstock.consumer.poll.membership import Membership
from penstock.consumer.poll.positions import LogEnds, LostPositions, OpenTransactions
from penstock.consumer.poll.router import Router
from penstock.consumer.poll.stop_request import StopRequest
from penstock.consumer.poll.topics import TopicSearch, TopicWatch
from penstock.consumer.run.executor import Executor
from penstock.consumer.run.time_limits import TimeLimits
from penstock.consumer.timers import Timers
from penstock.errors import raised
from penstock.routing import KeyState

_log = logging.getLogger(__name__)

#: Seconds to wait for a message before timers and commits are served again.
_POLL_S = 0.05
#: The same where handlers are at work that return messages.
_BUSY_POLL_S = 0.005
#: Seconds without a partition after which it is logged why that may be.
_NO_PARTITION_LOG_AFTER_S = 5.0
#: Seconds that what was submitted may take to be acknowledged before the group is left; and the outbox, to end then.
_FLUSH_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class PollLoop:
    """Runs the parts of a consumer, in turn, on one thread."""

    clock: Clock
    membership: Membership
    #: Why this member may have no partition, in words.
    no_partition: str
    stop_request: StopRequest
    #: Those of all handlers.
    token_buckets: Sequence[TokenBucket]
    executor: Executor
    timers: Timers
    outbox: Outbox
    assignments: Assignments
    router: Router
    fetcher: Fetcher
    commits: Commits
    back_pressure: BackPressure
    processor: LaneProcessor
    publisher: DeadLetterPublisher
    drain_log: DrainLog
    topic_search: TopicSearch
    topic_watch: TopicWatch
    log_ends: LogEnds
    open_transactions: OpenTransactions
    lost_positions: LostPositions
    time_limits: TimeLimits
    watchdog: Watchdog
    #: Whether a drain ended with nothing left. Written before the group is left; any thread reads it.
    drained: bool = field(default=False, init=False)
    # Whether lanes wait while workers are idle: then the next step comes soon.
    _workers_wanted: bool = field(default=False, init=False)
    # When it is logged that no partition is assigned, on the engine's clock; None where that was logged.
    _log_waiting_at: float | None = field(init=False)

    def __post_init__(self) -> None:
        self._log_waiting_at = self.clock.monotonic() + _NO_PARTITION_LOG_AFTER_S

    def run(self) -> None:
        """Consume until a stop is requested: the body of the poll thread."""
        try:
            self.outbox.start()
            self.membership.join()
            while not self.stop_request.is_requested:
                self.step()
            self.begin_drain()
            while not self.drain_step(self.stop_request.end_by):
                pass
        except:  # noqa: E722 - see `raised`; waiters must hear of it
            self.stop_request.fail(raised())
        finally:
            self.leave()

    def step(self) -> None:
        """Do what is due, and take a batch in."""
        self._do_due_work()
        now = self.clock.monotonic()
        self.topic_search.check(now)
        self._log_waiting(now)
        self.fetcher.fetch(self._poll_timeout)

    def _log_waiting(self, now: float) -> None:
        """Log for what this member waits, once, where it has no partition for a while and was not refused."""
        if self.assignments.all():
            self._log_waiting_at = now + _NO_PARTITION_LOG_AFTER_S
        elif self._log_waiting_at is not None and now >= self._log_waiting_at and self.membership.topics:
            self._log_waiting_at = None
            if self.shut_out() is None:
                _log.info("%s: %s", self.membership.group, self.no_partition)

    def _do_due_work(self) -> None:
        client, now = self.membership.client, self.clock.monotonic()
        self.timers.serve(now)
        self._release_tokens(now)
        self.outbox.serve()
        self.commits.tick(client, now)
        self.lost_positions.restart(client, self.topic_watch.check(now), now)
        self.log_ends.note(client, now)
        self.open_transactions.check(now)
        self.membership.check(now)
        self._workers_wanted = self.executor.wake_idle()
        self.time_limits.check(now)
        self.watchdog.check(now)

    def _release_tokens(self, now: float) -> None:
        for token_bucket in self.token_buckets:
            for wake in token_bucket.release(now):
                wake()

    def _poll_timeout(self, now: float) -> float:
        """Return the seconds that may be spent waiting for a message."""
        # What handlers return is sent by this thread, where the outbox has none of its own.
        if self._workers_wanted or (self.outbox.needs_serving and self.outbox.waiting):
            return SATURATED_S
        if self.outbox.needs_serving and self._some_in_flight():
            return _BUSY_POLL_S
        times = [token_bucket.next_release(now) for token_bucket in self.token_buckets]
        times.append(self.timers.next_due())
        due = min((time for time in times if time is not None), default=now + _POLL_S)
        return min(_POLL_S, max(0.0, due - now))

    def _some_in_flight(self) -> bool:
        return any(assignment.tracker.in_flight for assignment in self.assignments.all())

    def begin_drain(self) -> float:
        """Have batches that are not full served too; return when the drain must end, on the engine's clock."""
        self.stop_request.drain()
        self.processor.drain()
        now, end_by = self.clock.monotonic(), self.stop_request.end_by
        self.drain_log.begin(self.assignments.all(), now, max(0.0, end_by - now))
        return end_by

    def drain_step(self, deadline: float) -> bool:
        """Go on draining, and keep polling, so that the group keeps this member. Returns whether it is over."""
        client = self.membership.client
        for assignment in self.assignments.all():
            # New assignments come while it lasts.
            if assignment.paused is not PauseReason.STOPPING:
                self.back_pressure.pause(client, assignment, PauseReason.STOPPING)
        self._do_due_work()
        client = self.membership.client
        if self._is_drained(client, deadline):
            return True
        message = client.poll(SATURATED_S)
        if message is not None:
            # Fetched before the pause took hold. It is out of the client, so it must be tracked.
            self.fetcher.route([message])
        return False

    def _is_drained(self, client: ConsumerClient, deadline: float) -> bool:
        """Commit and return True once nothing is left to wait for, or the time is over."""
        assignments, now = self.assignments.all(), self.clock.monotonic()
        waits = self._waits_for(now, deadline)
        time_is_over = now >= deadline or self.stop_request.leaves_now
        if time_is_over or not waits:
            self.drained = not any(assignment.tracker.in_flight for assignment in assignments)
            if self.commits.commit_drained(client, now) or time_is_over:
                if waits:
                    self.drain_log.cut_short(assignments, waits)
                return True
        self.drain_log.go_on(assignments, now, deadline - now, waits)
        return False

    def _waits_for(self, now: float, deadline: float) -> list[str]:
        """Return what the drain waits for, in words."""
        # Lanes before and after all else: what a handler leaves behind (a retry, a completion, a dead letter) is there
        # before its lane is given back, and what brings a lane back does so before it is gone.
        scheduler = self.processor.scheduler
        idle = scheduler.idle
        # Copies, made in one step: holders of lanes change the dictionaries meanwhile.
        parked = (key for lane in scheduler.lanes if lane.parked for key in list(lane.parked.values()))
        reasons = {
            "completions are put off": self.processor.deferred,
            "results, dead letters or messages for a retry topic are not written": self.outbox.waiting,
            "dead letters or messages for a retry topic were refused, and are written again": self.publisher.held,
            "some wait for their handler's rate": any(
                bucket.next_release(now) is not None for bucket in self.token_buckets
            ),
            "some wait for their next try": any(
                key.state is KeyState.WAITING and not key.is_blocked and key.due_at < deadline for key in parked
            ),
        }
        at_work = [] if idle and scheduler.idle else ["some are in a handler or next in line"]
        return at_work + [why for why, holds in reasons.items() if holds]

    def shut_out(self) -> str | None:
        """Return why the brokers do not take this member, or None where it was not refused lately. Any thread."""
        return self.fetcher.errors.shut_out()

    def leave(self) -> None:
        """Write what was submitted, commit, leave the group. The last thing this thread does."""
        self.membership.leaving.set()
        self.fetcher.collection_threshold.restore()
        try:
            self.outbox.flush(_FLUSH_S)
            self.membership.leave()
        except:  # noqa: E722 - as in `run`
            self.stop_request.fail(raised())
        finally:
            # Not before: what handlers finish in the revocation is sent and committed.
            self.outbox.close(_FLUSH_S)


#: Seconds between two log lines about why a drain is not over.
_LOG_AGAIN_S = 5.0


class DrainLog:
    """Logs one drain. On the poll thread only, save `unfinished`."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._log_at = 0.0
        #: Messages in flight when the drain was cut short, by its time or a request to leave; 0 where it was not.
        self.unfinished = 0

    def begin(self, assignments: Iterable[Assignment], now: float, seconds: float) -> None:
        """Log that it begins."""
        self._log_at = now + _LOG_AGAIN_S
        count = _in_flight(assignments)
        _log.info("%s stops: %d messages are in flight, and have %.1f s to be done", self._group, count, seconds)

    def go_on(self, assignments: Iterable[Assignment], now: float, seconds: float, waits: Iterable[str]) -> None:
        """Log why it is not over, every few seconds."""
        if now < self._log_at:
            return
        self._log_at = now + _LOG_AGAIN_S
        _log.info(
            "%s is not done: %d messages are in flight (%s), and have %.1f s",
            self._group,
            _in_flight(assignments),
            ", ".join(waits) or "to be committed",
            max(0.0, seconds),
        )

    def cut_short(self, assignments: Iterable[Assignment], waits: Iterable[str]) -> None:
        """Log what is left undone by a drain that had not finished."""
        self.unfinished = _in_flight(assignments)
        if self.unfinished:
            _log.warning(
                "%s stops with %d messages not done (%s); they are handled again by the next owner",
                self._group,
                self.unfinished,
                ", ".join(waits),
            )


def _in_flight(assignments: Iterable[Assignment]) -> int:
    return sum(assignment.tracker.in_flight for assignment in assignments)
