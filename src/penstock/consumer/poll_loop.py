"""The poll loop: one thread owns the Kafka consumer. It alone polls, commits, pauses and serves rebalances.

It never waits for a handler, save within the budget of a revocation, so the poll interval is met whatever handlers do.
`run` is the body of that thread; a simulation takes the same steps one by one.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from penstock.cluster import Clock, ConsumerClient
from penstock.consumer.assignments import Assignments, Fetch
from penstock.consumer.commits import Commits
from penstock.consumer.intake import STOPPING, Intake
from penstock.consumer.outbox import Outbox
from penstock.consumer.rebalance import Rebalance
from penstock.consumer.retries import Timers
from penstock.consumer.router import Router
from penstock.consumer.routes import Route
from penstock.consumer.settings import ConsumerSettings
from penstock.consumer.visits import Desk
from penstock.consumer.watch import Watchdog
from penstock.errors import PenstockError, raised
from penstock.garbage import collection_put_off
from penstock.kafka import reason
from penstock.message import Record
from penstock.routing import KeyState, Scheduler
from penstock.signal_event import SignalEvent

if TYPE_CHECKING:
    from confluent_kafka import Message as ClientMessage

_log = logging.getLogger(__name__)

#: Seconds to wait for a message before looking at timers and commits again.
_POLL_S = 0.05
#: Seconds to wait before asking again when everything is full for a moment, or lanes wait and workers sleep.
_SATURATED_S = 0.002
#: Errors of a fetch that the client mends by itself; they are logged at debug level.
_TRANSIENT = frozenset({KafkaError._PARTITION_EOF, KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT})  # noqa: SLF001 - the client library's names of its local errors
#: Seconds between two warnings that the group does not take this member.
_SAY_AGAIN_S = 60.0

#: Told of each fetch, where telemetry is on: topic, messages by partition, seconds.
Polled = Callable[[str, dict[int, int], float], None]


class PollLoop:
    """Runs the parts of a consumer, in turn, on one thread."""

    def __init__(
        self,
        consumer: ConsumerClient,
        topics: Sequence[str],
        settings: ConsumerSettings,
        *,
        clock: Clock,
        routes: Sequence[Route],
        assignments: Assignments,
        scheduler: Scheduler[Fetch, Record],
        desk: Desk,
        router: Router,
        intake: Intake,
        commits: Commits,
        rebalance: Rebalance,
        timers: Timers,
        outbox: Outbox,
        watchdog: Watchdog,
        relieve: Callable[[], bool],
        polled: Polled | None,
    ) -> None:
        self._consumer = consumer
        self._topics = list(topics)
        self._clock = clock
        self._routes = list(routes)
        self._assignments = assignments
        self._scheduler = scheduler
        self._desk = desk
        self._router = router
        self._intake = intake
        self._commits = commits
        self._rebalance = rebalance
        self._timers = timers
        self._outbox = outbox
        self._watchdog = watchdog
        self._relieve = relieve
        self._polled = polled
        self._hungry = False
        #: Set to drain and leave. Any thread may set it.
        self.stopping = SignalEvent()
        #: Set to leave without draining. Any thread may set it.
        self.leave_now = SignalEvent()
        #: What ended the consumer, or None. Written once, by `fail`.
        self.failure: BaseException | None = None
        #: Seconds a drain may take. Written before `stopping` is set.
        self.drain_timeout = settings.stop_timeout
        #: Whether the drain ended with nothing left. Written by the poll thread before it leaves.
        self.drained = False
        #: Set when nothing is left to do but to leave the group.
        self.leaving = threading.Event()
        # When and why the group did not take this member, and when that was said. Written by the poll thread.
        self._refusal: tuple[float, str] | None = None
        self._refusal_said = -_SAY_AGAIN_S
        self._fail_lock = threading.Lock()

    def fail(self, error: BaseException) -> None:
        """Stop the consumer because of an error. Any thread may call it; the first error is kept."""
        with self._fail_lock:
            if self.failure is not None:
                return
            self.failure = error
        _log.error("the consumer stops: %s", error)
        self.leave_now.set()
        self.stopping.set()

    def run(self) -> None:
        """Consume until told to stop: the body of the poll thread."""
        try:
            self.join()
            while not self.stopping.is_set():
                self.step()
            deadline = self.begin_drain()
            while not self.drain_step(deadline):
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
        """Do what is due: retries, rates, the outbox, commits, a look at the handlers."""
        now = self._clock.monotonic()
        self._timers.serve(now)
        for route in self._routes:
            for wake in route.meter.release(now):
                wake()
        self._outbox.serve()
        self._commits.tick(self._consumer, now)
        self._router.relieve()
        self._hungry = self._relieve()
        self._watchdog.look(now)

    def _fetch(self) -> None:
        """Take what is there; wait for a first message where nothing is."""
        begun = self._clock.monotonic()
        if not self._intake.admit(self._consumer, self._assignments.all(), begun):
            self._clock.sleep(_SATURATED_S)
            return
        most = self._intake.room
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
        errors = [error for message in batch if (error := message.error()) is not None]
        if errors:
            batch = [message for message in batch if message.error() is None]
        if batch:
            self._router.route(batch, self._clock.monotonic())  # type: ignore[arg-type] # fetched messages have a place
        for error in errors:
            self._fetch_error(error)

    def _tell(self, polled: Polled, batch: list[ClientMessage], seconds: float) -> None:
        topics: dict[str, Counter[int]] = {}
        for message in batch:
            topic, partition = message.topic(), message.partition()
            if message.error() is None and topic is not None and partition is not None:
                topics.setdefault(topic, Counter())[partition] += 1
        for topic, counts in topics.items():
            polled(topic, counts, seconds)

    def _fetch_error(self, error: KafkaError) -> None:
        # A fenced static member hears of it in a message whose error is not marked fatal.
        if error.fatal() or error.code() == KafkaError._FATAL:  # noqa: SLF001 - as above
            remedy = "start the consumer again"
            if "group.instance.id" in error.str():
                remedy = "give each member a group.instance.id of its own, or the two end each other in turn"
            raise PenstockError(f"the Kafka client cannot go on: {reason(error)}; {remedy}")
        if error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001 - as above
            raise PenstockError(
                f"the group's offset is not in the log and auto.offset.reset forbids another: {reason(error)}; "
                "reset the group's offsets, or set auto.offset.reset to earliest or latest"
            )
        if error.code() == KafkaError.INCONSISTENT_GROUP_PROTOCOL:
            self._refused(error)
            return
        _log.log(logging.DEBUG if error.code() in _TRANSIENT else logging.WARNING, "fetching: %s", reason(error))

    def _refused(self, error: KafkaError) -> None:
        """Say what to do where the group has members of another kind; the client tries again every other second."""
        why = (
            f"the group does not take this member: {reason(error)}; the group has members that do not rebalance "
            "cooperatively, such as with partition.assignment.strategy=range, and penstock does: stop them first, or "
            "give them cooperative-sticky, Java's in two rolling restarts (docs/coming-from.md); it is tried again"
        )
        now = self._clock.monotonic()
        self._refusal = (now, why)
        if now - self._refusal_said >= _SAY_AGAIN_S:
            self._refusal_said = now
            _log.warning("%s", why)

    def shut_out(self) -> str | None:
        """Return why the group does not take this member, or None where it was not refused lately. Any thread."""
        refusal = self._refusal
        lately = refusal is not None and self._clock.monotonic() - refusal[0] < _SAY_AGAIN_S
        return refusal[1] if refusal is not None and lately else None

    def _patience(self, now: float) -> float:
        """Return the seconds that may be spent waiting for a message."""
        if self._outbox.waiting or self._hungry:
            return _SATURATED_S
        times = [route.meter.next_release(now) for route in self._routes]
        times.append(self._timers.next_due())
        due = min((time for time in times if time is not None), default=now + _POLL_S)
        return min(_POLL_S, max(0.0, due - now))

    def begin_drain(self) -> float:
        """Begin to finish what was taken in; returns when that must end, on the engine's clock."""
        self._desk.hurry = True
        for lane in self._scheduler.lanes:
            if lane.runs:
                self._desk.wake_lane(lane)
        return self._clock.monotonic() + self.drain_timeout

    def drain_step(self, deadline: float) -> bool:
        """Go on draining, and keep polling, so that the group keeps this member. Returns whether it is over."""
        for assignment in self._assignments.all():
            if assignment.paused != STOPPING:
                self._intake.pause(self._consumer, assignment, STOPPING)
        self._turn()
        now = self._clock.monotonic()
        # What has no lane yet before the lanes, for it goes there. Lanes before and after all else: what a handler
        # leaves behind (a retry, a completion, a dead letter) is there before its lane is given back, and what brings a
        # lane back does so before it is gone.
        idle = self._router.idle and self._scheduler.idle
        waits = (
            self._desk.deferred
            or self._outbox.unsettled
            or any(route.meter.next_release(now) is not None for route in self._routes)
            or self._retries_before(deadline)
        )
        over = now >= deadline or self.leave_now.is_set()
        if over or (idle and not waits and self._scheduler.idle):
            self.drained = not any(assignment.tracker.in_flight for assignment in self._assignments.all())
            # What is still out at the end is committed once more while the group is left.
            if self._commits.settle(self._consumer, now) or over:
                return True
        message = self._consumer.poll(_SATURATED_S)
        if message is not None:
            # Fetched before the pause took hold. It is out of the client, so it must be tracked.
            self._route([message])
        return False

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
            self._outbox.flush(1.0)
            # Closing revokes: running handlers are waited for and all that is done is committed there.
            self._consumer.close()
        except (KafkaException, RuntimeError) as error:
            why = reason(error) if isinstance(error, KafkaException) else str(error)
            _log.warning("leaving the group: %s; what was not committed is handled again", why)
        except:  # noqa: E722 - as in `run`
            self.fail(raised())


__all__ = ["PollLoop", "Polled"]
