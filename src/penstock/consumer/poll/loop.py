"""The poll loop: one thread owns the Kafka consumer. It alone polls, commits, pauses and serves rebalances.

The poll thread waits for a handler only within the time budget of a revocation. So it meets the poll interval whatever
handlers do. While it drains it goes on polling: it finishes and commits the messages in flight, then leaves the group.
`run` is the body of the thread. A simulation takes the same steps one by one.
"""

from __future__ import annotations

import logging
from functools import partial

from penstock.clients.cluster import Cluster, ConsumerClient
from penstock.consumer.assignments import PauseReason
from penstock.consumer.engine import Engine
from penstock.consumer.outbox.transactional_outbox import TransactionalOutbox
from penstock.consumer.poll.back_pressure import AppPauses, BackPressure
from penstock.consumer.poll.commits import Commits, ConsumerCommits, TransactionalCommits
from penstock.consumer.poll.explain import Explainer, Explanation, no_partition
from penstock.consumer.poll.fetcher import SATURATED_S, Fetcher
from penstock.consumer.poll.membership import Membership
from penstock.consumer.poll.positions import Positions
from penstock.consumer.poll.refusals import Refusals
from penstock.consumer.poll.topics import Topics
from penstock.consumer.poll.watchdog import Watchdog
from penstock.errors import raised
from penstock.routing import KeyState

_log = logging.getLogger(__name__)

#: Seconds to wait for a message before timers and commits are served again.
_POLL_S = 0.05
#: The same while handlers run whose results are published.
_BUSY_POLL_S = 0.005
#: Seconds without a partition before the possible reason is logged.
_NO_PARTITION_LOG_AFTER_S = 5.0
#: Seconds between two log lines about a drain that is not over.
_LOG_INTERVAL_S = 5.0
#: Seconds that brokers have to acknowledge submitted messages before the member leaves the group.
_FLUSH_S = 1.0


class PollLoop:
    """Fetches for an engine and commits what is done. On the poll thread, except where stated."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._clock = engine.clock
        self.stop_request = engine.stop_request
        self.refusals = Refusals(engine)
        self.commits: Commits = (
            TransactionalCommits(engine, self.refusals, engine.outbox)
            if isinstance(engine.outbox, TransactionalOutbox)
            else ConsumerCommits(engine, self.refusals)
        )
        self.app_pauses = AppPauses(engine)
        self.back_pressure = BackPressure(engine.settings, self.app_pauses.of)
        engine.counts.pauses = self.back_pressure.pauses
        self.positions = Positions(engine)
        self.topics = Topics(engine, self.refusals)
        self._explainer = Explainer(engine, self.topics, self.refusals, self.positions, self.app_pauses)
        self.watchdog = Watchdog(engine)
        self.membership = Membership(
            engine, self.commits, self.back_pressure, self.positions, self.refusals, watchdog=self.watchdog
        )
        if isinstance(engine.outbox, TransactionalOutbox):
            engine.outbox.generation = self.membership.generation
            engine.outbox.note_refusal = partial(self.refusals.note_missing_right, topic=None)
        self.fetcher = Fetcher(engine, self.membership, self.back_pressure, self.refusals, self.positions)
        #: Whether the drain finished everything; and the messages in flight if it was cut short. Written before the
        #: member leaves the group. Any thread may read them.
        self.drained = False
        self.unfinished = 0
        # Whether lanes wait while workers are idle: the next step then comes soon.
        self._workers_wanted = False
        # Times on the engine's clock: of the log line about a missing partition (None once it was logged), and of the
        # next log line about the drain.
        self._log_waiting_at: float | None = self._clock.monotonic() + _NO_PARTITION_LOG_AFTER_S
        self._log_drain_at = 0.0

    def connect(self, cluster: Cluster) -> None:
        """Check the topics and make the clients. Raises as `LitePushConsumer.start`."""
        engine, settings = self._engine, self._engine.settings
        self.topics.begin(cluster)
        producing = settings.config
        if not settings.exactly_once:
            producing = settings.producer_config()
            # Only a check: if the client refuses a setting, the start fails, not the first result.
            cluster.producer(producing)
        engine.outbox.connect(cluster, producing)
        if engine.telemetry is not None:
            engine.dead_letter_publisher.trace = engine.telemetry.sending
        config = {**settings.client_config(engine.group), "on_commit": self.commits.on_commit}
        self._explainer.no_partition = no_partition(config)
        self.positions.ask = cluster.ask_readable_ends
        self.membership.connect(cluster, config)

    def run(self) -> None:
        """Consume until a stop is requested: the body of the poll thread."""
        try:
            self.membership.join()
            while not self.stop_request.is_requested:
                self.step()
            self.begin_drain()
            while not self.drain_step():
                pass
        except:  # noqa: E722 - see `raised`; waiters must get the error
            self.stop_request.fail(raised())
        finally:
            self.leave()

    def step(self) -> None:
        """Do the due work, then fetch a batch."""
        self._do_due_work()
        now = self._clock.monotonic()
        if self.topics.search(now):
            self.membership.change_topics()
        self._log_waiting(now)
        self.fetcher.fetch(self._poll_timeout)

    def _log_waiting(self, now: float) -> None:
        """Log once why this member may have no partition, if it has had none for a while and was not refused."""
        if self._engine.assignments.all():
            self._log_waiting_at = now + _NO_PARTITION_LOG_AFTER_S
        elif self._log_waiting_at is not None and now >= self._log_waiting_at and self._engine.routes.topics:
            self._log_waiting_at = None
            if self.refusals.of_group() is None:
                _log.info("%s: %s", self._engine.group, self._explainer.no_partition)

    def _do_due_work(self) -> None:
        engine, client, now = self._engine, self.membership.client, self._clock.monotonic()
        engine.timers.serve(now)
        for token_bucket in engine.routes.token_buckets:
            for wake in token_bucket.release(now):
                wake()
        engine.outbox.serve()
        self.commits.tick(client, now)
        self.positions.restart(client, self.topics.check(now), now)
        self.positions.note_ends(client, now)
        self.membership.check(now)
        self._workers_wanted = engine.executor.wake_idle()
        self.watchdog.check(now)

    def _poll_timeout(self, now: float) -> float:
        """Return how many seconds to wait for a message."""
        engine, outbox = self._engine, self._engine.outbox
        # This thread sends the handlers' results.
        if self._workers_wanted or (sends_in := outbox.due_in()) <= 0:
            return SATURATED_S
        if outbox.needs_serving and self._in_flight():
            return _BUSY_POLL_S
        times = [token_bucket.next_release(now) for token_bucket in engine.routes.token_buckets]
        times.append(engine.timers.next_due())
        due = min((time for time in times if time is not None), default=now + _POLL_S)
        return min(_POLL_S, sends_in, max(0.0, due - now))

    def _in_flight(self) -> int:
        return sum(assignment.tracker.in_flight for assignment in self._engine.assignments.all())

    def begin_drain(self) -> None:
        """Start the drain: batches no longer need to be full."""
        self.stop_request.drain()
        self._engine.processor.drain()
        now = self._clock.monotonic()
        self._log_drain_at = now + _LOG_INTERVAL_S
        _log.info(
            "%s stops: %d messages are in flight, and have %.1f s to be done",
            self._engine.group,
            self._in_flight(),
            max(0.0, self.stop_request.end_by - now),
        )

    def drain_step(self) -> bool:
        """Drain, and poll so that the group keeps this member. Return whether the drain is over."""
        for assignment in self._engine.assignments.all():
            # Assignments may arrive during the drain.
            if assignment.paused is not PauseReason.STOPPING:
                self.back_pressure.set_pause(self.membership.client, assignment, PauseReason.STOPPING)
        self._do_due_work()
        client = self.membership.client
        if self._is_drained(client):
            return True
        message = client.poll(SATURATED_S)
        if message is not None:
            # Fetched before the pause took effect. The client has handed it out, so it must be tracked.
            self.fetcher.route([message])
        return False

    def _is_drained(self, client: ConsumerClient) -> bool:
        """Return whether everything is done and committed, or the time is over. Else log the reason now and then."""
        group, in_flight, now = self._engine.group, self._in_flight(), self._clock.monotonic()
        deadline = self.stop_request.end_by
        waits = self._waits_for(now, deadline)
        time_is_over = now >= deadline or self.stop_request.leaves_now
        if time_is_over or not waits:
            self.drained = not in_flight
            if self.commits.commit_drained(client, now) or time_is_over:
                self.unfinished = in_flight if waits else 0
                if self.unfinished:
                    _log.warning(
                        "%s stops with %d messages not done (%s); they are handled again by the next owner",
                        group,
                        in_flight,
                        ", ".join(waits),
                    )
                return True
        if now >= self._log_drain_at:
            self._log_drain_at = now + _LOG_INTERVAL_S
            _log.info(
                "%s is not done: %d messages are in flight (%s), and have %.1f s",
                group,
                in_flight,
                ", ".join(waits) or "to be committed",
                max(0.0, deadline - now),
            )
        return False

    def _waits_for(self, now: float, deadline: float) -> list[str]:
        """Return the reasons why the drain is not over, in words."""
        # Lanes are checked before and after everything else. A handler leaves its retry, completion or dead letter
        # before its lane is given back. Whatever brings a lane back does so before it disappears itself.
        engine, scheduler = self._engine, self._engine.scheduler
        idle = scheduler.idle
        # Copies, each made in one step: lane holders change the dictionaries meanwhile.
        parked = (key for lane in scheduler.lanes if lane.parked for key in list(lane.parked.values()))
        reasons = {
            "deferred completions are open": engine.processor.deferred,
            "results, dead letters or messages for a retry topic are not written": engine.outbox.waiting,
            "dead letters or messages for a retry topic were refused, and are written again": (
                engine.dead_letter_publisher.held
            ),
            "some wait for their handler's rate": any(
                bucket.next_release(now) is not None for bucket in engine.routes.token_buckets
            ),
            "some wait for their next try": any(
                key.state is KeyState.WAITING and not key.is_blocked and key.due_at < deadline for key in parked
            ),
        }
        at_work = [] if idle and scheduler.idle else ["some are in a handler or next in line"]
        return at_work + [why for why, holds in reasons.items() if holds]

    def leave(self) -> None:
        """Write submitted messages, commit, and leave the group. The last act of the poll thread."""
        self.membership.leaving.set()
        self.stop_request.leave()
        self.fetcher.collection_threshold.restore()
        try:
            self._engine.outbox.flush(_FLUSH_S)
            self.membership.leave()
        except:  # noqa: E722 - as in `run`
            self.stop_request.fail(raised())
        finally:
            # Last: results of handlers that finish during the revocation are sent and committed.
            self._engine.outbox.close()

    def explain(self) -> list[Explanation]:
        """Explain each assigned partition, or each topic if this member has no partition. Any thread."""
        return self._explainer.explain(is_leaving=self.membership.leaving.is_set())
