"""The poll loop: one thread owns the Kafka consumer. It alone polls, commits, pauses and serves rebalances.

It never waits for a handler, save within the budget of a revocation, so the poll interval is met whatever handlers do.
`run` is the body of that thread; a simulation takes the same steps one by one.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

from confluent_kafka import OFFSET_END, KafkaException, TopicPartition

from penstock.clients.cluster import Clock, ConsumerClient
from penstock.clients.gc_pause import collection_put_off
from penstock.clients.kafka import reason
from penstock.consumer.assignments import Assignment, Assignments, Fetch
from penstock.consumer.execution.lane_processor import LaneProcessor
from penstock.consumer.failures.dead_letter_publisher import DeadLetterPublisher
from penstock.consumer.failures.failure_text import failure_text, short_text
from penstock.consumer.failures.timers import Timers
from penstock.consumer.handlers.route import Route
from penstock.consumer.inspection.drain_report import DrainLog
from penstock.consumer.inspection.watchdog import Watchdog
from penstock.consumer.polling.back_pressure import STOPPING, BackPressure
from penstock.consumer.polling.commits import Commits
from penstock.consumer.polling.fetch_errors import FetchErrors
from penstock.consumer.polling.rebalance import Rebalance
from penstock.consumer.polling.rights_watch import RightsWatch
from penstock.consumer.polling.router import Router
from penstock.consumer.polling.topic_watch import TopicWatch
from penstock.consumer.settings import ConsumerSettings
from penstock.errors import PenstockError, raised
from penstock.message import Record
from penstock.routing import KeyState, Scheduler

if TYPE_CHECKING:
    from confluent_kafka import Message as ClientMessage

_log = logging.getLogger(__name__)

#: Seconds to wait for a message before looking at timers and commits again.
_POLL_S = 0.05
#: Seconds to wait before asking again when everything is full for a moment, or lanes wait and workers sleep.
_SATURATED_S = 0.002
#: Seconds until a new client takes the place of one that has ended, and between two.
_RENEW_S = 5.0

#: Told of each fetch, where telemetry is on: topic, messages by partition, seconds.
Polled = Callable[[str, dict[int, int], float], None]


class PollLoop:
    """Runs the parts of a consumer, in turn, on one thread."""

    def __init__(
        self,
        make_consumer: Callable[[], ConsumerClient],
        topics: Sequence[str],
        settings: ConsumerSettings,
        *,
        group: str,
        clock: Clock,
        routes: Sequence[Route],
        assignments: Assignments,
        scheduler: Scheduler[Fetch, Record],
        processor: LaneProcessor,
        router: Router,
        back_pressure: BackPressure,
        commits: Commits,
        rebalance: Rebalance,
        timers: Timers,
        publisher: DeadLetterPublisher,
        watchdog: Watchdog,
        topic_watch: TopicWatch,
        rights_watch: RightsWatch,
        relieve: Callable[[], bool],
        polled: Polled | None,
    ) -> None:
        self._make_consumer = make_consumer
        self._consumer = make_consumer()
        self._topics = list(topics)
        self._clock = clock
        self._routes = list(routes)
        self._assignments = assignments
        self._scheduler = scheduler
        self._processor = processor
        self._router = router
        self._back_pressure = back_pressure
        self._commits = commits
        self._rebalance = rebalance
        self._timers = timers
        self._publisher = publisher
        self._watchdog = watchdog
        self._offset_reset = settings.offset_reset
        #: Whether the topics are still those that they were.
        self.topic_watch = topic_watch
        #: Whether it may still do what it needs.
        self.rights_watch = rights_watch
        self._errors = FetchErrors(topic_watch, rights_watch, clock)
        # When a new client takes the place of one that has ended, on the engine's clock; None where none has.
        self._renew_at: float | None = None
        # Partitions of topics that were made anew, which the client could not be sent to the beginning of yet.
        self._anew: list[Assignment] = []
        self._relieve = relieve
        self._polled = polled
        self._hungry = False
        self._stop_timeout = settings.stop_timeout
        self._revoke_timeout = settings.revoke_timeout
        # Whether to drain and leave, and whether to leave without draining. They and the two times are plain fields,
        # written by who asks, read by the poll thread, and only ever raised and lowered: a signal handler asks too, on
        # a thread that may stand within this very code, so there is no lock it could meet.
        self._stopping = False
        self._leave_now = False
        # When the drain ends, and when one that is cut short does, on the engine's clock.
        self._drain_by = inf
        self._leave_by = inf
        #: What ended the consumer, or None. Written once, by `fail`.
        self.failure: BaseException | None = None
        #: Whether the drain ended with nothing left. Written by the poll thread before it leaves.
        self.drained = False
        #: What is said of the drain.
        self.drain_log = DrainLog(group)
        #: Set when nothing is left to do but to leave the group.
        self.leaving = threading.Event()
        self._fail_lock = threading.Lock()

    def fail(self, error: BaseException) -> None:
        """Stop the consumer because of an error. Any thread may call it; the first error is kept."""
        with self._fail_lock:
            if self.failure is not None:
                return
            self.failure = error
        _log.error(
            "the consumer stops: %s\n%s",
            short_text(error),
            failure_text(error, texts=self._publisher.exception_texts),
        )
        self.request_leave(self._revoke_timeout)

    def request_stop(self, drain_s: float | None = None) -> None:
        """Ask for a drain of so many seconds, `stop_timeout` when left out. Any thread; safe in a signal handler.

        The time counts from the first that asks: a later one can only shorten it.
        """
        wanted = self._clock.monotonic() + (self._stop_timeout if drain_s is None else drain_s)
        if drain_s is not None or not self._stopping:
            self._drain_by = min(self._drain_by, wanted)
        self._stopping = True

    def request_leave(self, grace_s: float) -> None:
        """Ask to leave undrained; handlers under way have `grace_s` seconds. Any thread; safe in a signal handler."""
        self._leave_by = min(self._leave_by, self._clock.monotonic() + grace_s)
        self._leave_now = self._stopping = True

    @property
    def end_by(self) -> float:
        """When running handlers are waited for no longer, on the engine's clock; infinity before a stop was asked for.

        One time for the drain, the revocation that follows it and the end of the workers: they share it.
        """
        return min(self._drain_by, self._leave_by)

    def run(self) -> None:
        """Consume until told to stop: the body of the poll thread."""
        try:
            self.join()
            while not self._stopping:
                self.step()
            self.begin_drain()
            while not self.drain_step(self.end_by):
                pass
        except:  # noqa: E722 - see `raised`; waiters must hear of it
            self.fail(raised())
        finally:
            self.leave()

    def join(self) -> None:
        """Ask to join the group."""
        self._consumer.subscribe(
            self._topics,
            on_assign=self._rebalance.on_assign,
            on_revoke=self._rebalance.on_revoke,
            on_lost=self._rebalance.on_lost,
        )

    def step(self) -> None:
        """Do what is due, and take a batch in."""
        self._turn()
        self._fetch()

    def _turn(self) -> None:
        """Do what is due: retries, rates, the dead-letter publisher, commits, a look at the handlers."""
        now = self._clock.monotonic()
        self._timers.serve(now)
        for route in self._routes:
            for wake in route.token_bucket.release(now):
                wake()
        self._publisher.serve()
        self._commits.tick(self._consumer, now)
        self._router.relieve()
        anew = self.topic_watch.look(now)
        if self.topic_watch.all_same:
            self._commits.repeat(self._consumer, now)
        if anew or self._anew:
            self._anew += [one for one in self._assignments.all() if one.topic in anew and one not in self._anew]
            self._begin_anew()
        self.rights_watch.look(now)
        self._renew_client(now)
        self._hungry = self._relieve()
        self._watchdog.look(now)

    def _begin_anew(self) -> None:
        """Begin by `auto.offset.reset` with partitions of topics that were deleted and created again."""
        waiting, self._anew = self._anew, []
        for former in waiting:
            if not former.active:
                continue
            if self._offset_reset is None:
                raise PenstockError(
                    f"topic {former.topic} was deleted and created again, and auto.offset.reset forbids to begin anew; "
                    "reset the group's offsets, or set auto.offset.reset to earliest or latest"
                )
            try:
                self._consumer.seek(TopicPartition(former.topic, former.partition, self._offset_reset))
            except KafkaException as error:
                _log.warning("%s cannot begin anew yet: %s; it is tried again", former, reason(error))
                self._anew.append(former)
                continue
            _log.warning(
                "topic %s was deleted and created again: partition %d begins anew by auto.offset.reset at its %s; it "
                "stood at offset %d of the former one, and what was handled of the new one since is handled again",
                former.topic,
                former.partition,
                "end" if self._offset_reset == OFFSET_END else "beginning",
                former.tracker.position,
            )
            self._router.begin_again(former, None)

    def _fetch(self) -> None:
        """Take what is there; wait for a first message where nothing is."""
        begun = self._clock.monotonic()
        if not self._back_pressure.admit(self._consumer, self._assignments.all(), begun):
            self._clock.sleep(_SATURATED_S)
            return
        most = self._back_pressure.room
        if not self._take_in([], most, begun):
            first = self._consumer.poll(self._patience(begun))
            if first is not None:
                self._take_in([first], most, begun)

    def _take_in(self, batch: list[ClientMessage], most: int, begun: float) -> bool:
        """Route a batch with what else is there; return whether there was anything."""
        # What is taken in lives until it is handled. Looking through thousands of new messages for garbage, again and
        # again while they come, finds none and took a fifth of the time.
        with collection_put_off():
            batch += self._consumer.consume(most - len(batch), 0)
            if batch:
                self._route(batch)
        if batch and self._polled is not None:
            self._tell(self._polled, batch, self._clock.monotonic() - begun)
        return bool(batch)

    def _route(self, batch: list[ClientMessage]) -> None:
        errors = [(error, message.topic()) for message in batch if (error := message.error()) is not None]
        if errors:
            batch = [message for message in batch if message.error() is None]
        if batch:
            self._router.route(batch, self._clock.monotonic())  # type: ignore[arg-type] # fetched messages have a place
        for error, topic in errors:
            if self._errors.take(error, topic) and self._renew_at is None:
                self._client_ended()

    def _tell(self, polled: Polled, batch: list[ClientMessage], seconds: float) -> None:
        topics: dict[str, Counter[int]] = {}
        for message in batch:
            topic, partition = message.topic(), message.partition()
            if message.error() is None and topic is not None and partition is not None:
                topics.setdefault(topic, Counter())[partition] += 1
        for topic, counts in topics.items():
            polled(topic, counts, seconds)

    def shut_out(self) -> str | None:
        """Return why the brokers do not take this member, or None where it was not refused lately. Any thread."""
        return self._errors.shut_out()

    def _client_ended(self) -> None:
        """Give up what a client had that has ended: nothing of that can be committed any more."""
        self._renew_at = self._clock.monotonic() + _RENEW_S
        assigned = [TopicPartition(one.topic, one.partition) for one in self._assignments.all()]
        if assigned:
            self._rebalance.on_lost(self._consumer, assigned)

    def _renew_client(self, now: float) -> None:
        """Go on with a new client where the last has ended for want of a right, once that is not missing."""
        if self._renew_at is None or now < self._renew_at:
            return
        self._renew_at = now + _RENEW_S
        if self.rights_watch.is_shut_out:
            return
        # The destructor of a client waits for its threads, so it runs on a thread that nobody waits for. Its callbacks
        # do not come from there: those are called by `close` only.
        former, self._consumer = [self._consumer], self._make_consumer()
        threading.Thread(target=former.clear, name="penstock-ended-consumer", daemon=True).start()
        self._commits.forget_answers()
        self._renew_at = None
        self.join()

    def _patience(self, now: float) -> float:
        """Return the seconds that may be spent waiting for a message."""
        if self._publisher.waiting or self._hungry:
            return _SATURATED_S
        times = [route.token_bucket.next_release(now) for route in self._routes]
        times.append(self._timers.next_due())
        due = min((time for time in times if time is not None), default=now + _POLL_S)
        return min(_POLL_S, max(0.0, due - now))

    def begin_drain(self) -> float:
        """Begin to finish what was taken in; returns when that must end, on the engine's clock."""
        self.request_stop()
        self._processor.hurry = True
        for lane in self._scheduler.lanes:
            if lane.runs:
                self._processor.wake_lane(lane)
        now, end_by = self._clock.monotonic(), self.end_by
        self.drain_log.begin(self._assignments.all(), now, max(0.0, end_by - now))
        return end_by

    def drain_step(self, deadline: float) -> bool:
        """Go on draining, and keep polling, so that the group keeps this member. Returns whether it is over."""
        assignments = self._assignments.all()
        for assignment in assignments:
            if assignment.paused != STOPPING:
                self._back_pressure.pause(self._consumer, assignment, STOPPING)
        self._turn()
        now = self._clock.monotonic()
        waits = self._drain_waits(deadline)
        over = now >= deadline or self._leave_now
        if over or not waits:
            self.drained = not any(assignment.tracker.in_flight for assignment in assignments)
            if self._commits.settle(self._consumer, now) or over:
                if waits:
                    self.drain_log.cut_short(assignments, waits)
                return True
        self.drain_log.go_on(assignments, now, deadline - now, waits)
        message = self._consumer.poll(_SATURATED_S)
        if message is not None:
            # Fetched before the pause took hold. It is out of the client, so it must be tracked.
            self._route([message])
        return False

    def _drain_waits(self, deadline: float) -> list[str]:
        """Return what a drain waits for, in words."""
        # What has no lane yet before the lanes, for it goes there. Lanes before and after all else: what a handler
        # leaves behind (a retry, a completion, a dead letter) is there before its lane is given back, and what brings a
        # lane back does so before it is gone.
        idle = self._router.idle and self._scheduler.idle
        waits = []
        if self._processor.deferred:
            waits.append("completions are put off")
        if self._publisher.unsettled:
            waits.append("dead letters or messages for a retry topic are not written")
        now = self._clock.monotonic()
        if any(route.token_bucket.next_release(now) is not None for route in self._routes):
            waits.append("some wait for their handler's rate")
        if self._retries_before(deadline):
            waits.append("some wait for their next try")
        if not (idle and self._scheduler.idle):
            waits.insert(0, "some are in a handler or next in line")
        return waits

    def _retries_before(self, deadline: float) -> bool:
        # Copies, made in one step: holders of lanes change the dictionaries meanwhile.
        parked = (key for lane in self._scheduler.lanes if lane.parked for key in list(lane.parked.values()))
        return any(key.state is KeyState.WAITING and key.due_at < deadline for key in parked)

    def leave(self) -> None:
        """Commit, leave the group, close. The last thing this thread does.

        The client waits here for a coordinator that is away, and knows no bound but its own.
        """
        self.leaving.set()
        try:
            self._publisher.flush(1.0)
            # Closing revokes: running handlers are waited for and all that is done is committed there.
            self._consumer.close()
        except (KafkaException, RuntimeError) as error:
            why = reason(error) if isinstance(error, KafkaException) else str(error)
            _log.warning("leaving the group: %s; what was not committed is handled again", why)
        except:  # noqa: E722 - as in `run`
            self.fail(raised())


__all__ = ["PollLoop", "Polled"]
