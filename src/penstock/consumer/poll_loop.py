"""The poll loop: the one thread that owns the Kafka consumer.

It alone polls, commits, pauses, resumes, sends dead letters and serves rebalance callbacks, and it never waits for a
handler but in a revocation, within its budget. So the poll interval is met whatever handlers do (I6), and no lock is
held across a call of the client library: sharing a consumer between threads is a known deadlock there.

If this thread dies of a defect, the consumer is closed, `failure` holds the error, and whoever waits for the consumer
gets it raised.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import Message as ClientMessage

from penstock.consumer.assignments import Assignments, Fetch
from penstock.consumer.commits import Commits
from penstock.consumer.dead_letters import DeadLetter, DeadLetterQueue
from penstock.consumer.intake import STOPPING, Intake
from penstock.consumer.rebalance import Rebalance
from penstock.consumer.retries import Timers, WakeKey
from penstock.consumer.router import Router
from penstock.consumer.settings import ConsumerSettings
from penstock.consumer.workers import WorkerPool
from penstock.errors import PenstockError
from penstock.kafka import reason
from penstock.message import Record
from penstock.routing import Scheduler

_log = logging.getLogger(__name__)

#: Seconds to wait for a message before looking at timers and commits again.
_POLL_S = 0.05
#: Seconds to wait before asking again when everything is full for a moment.
_SATURATED_S = 0.002
#: Errors of a fetch that the client mends by itself; they are logged at debug level.
_TRANSIENT = frozenset({KafkaError._PARTITION_EOF, KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT})  # noqa: SLF001 - the client library's names of its local errors


class PollLoop:
    """Runs the parts of a consumer, in turn, on one thread."""

    def __init__(
        self,
        consumer: Consumer,
        topics: Sequence[str],
        settings: ConsumerSettings,
        *,
        assignments: Assignments,
        scheduler: Scheduler[Fetch, Record],
        pool: WorkerPool,
        router: Router,
        intake: Intake,
        commits: Commits,
        rebalance: Rebalance,
        timers: Timers,
        dead_letters: DeadLetterQueue,
    ) -> None:
        self._consumer = consumer
        self._topics = list(topics)
        self._settings = settings
        self._assignments = assignments
        self._scheduler = scheduler
        self._pool = pool
        self._router = router
        self._intake = intake
        self._commits = commits
        self._rebalance = rebalance
        self._timers = timers
        self._dead_letters = dead_letters
        #: Set to drain and leave. Any thread may set it.
        self.stopping = threading.Event()
        #: Set to leave without draining. Any thread may set it.
        self.leave_now = threading.Event()
        #: What ended the consumer, or None. Written once, by `fail`.
        self.failure: BaseException | None = None
        #: Seconds a drain may take. Written before `stopping` is set.
        self.drain_timeout = settings.stop_timeout
        #: Whether the drain ended with nothing left. Written by the poll thread before it ends.
        self.drained = False
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
            self._consumer.subscribe(
                self._topics,
                on_assign=self._rebalance.on_assign,
                on_revoke=self._rebalance.on_revoke,
                on_lost=self._rebalance.on_lost,
            )
            while not self.stopping.is_set():
                self._turn()
                self._fetch()
            self._drain()
        except BaseException as error:  # noqa: BLE001 - whatever it is, waiters must hear of it
            self.fail(error)
        finally:
            self._leave()

    def _turn(self) -> None:
        """Do what is due: retries, dead letters, commits."""
        now = time.monotonic()
        for due in self._timers.take_due(now):
            if isinstance(due, WakeKey):
                self._pool.wake(self._scheduler.wake(self._scheduler.lanes[due.lane], due.key))
            elif isinstance(due, DeadLetter):
                self._dead_letters.put(due)
        self._dead_letters.serve()
        self._commits.tick(self._consumer, now)

    def _fetch(self) -> None:
        """Take what is there; wait for a first message where nothing is."""
        if not self._intake.admit(self._consumer, self._assignments.all(), time.monotonic()):
            self.stopping.wait(_SATURATED_S)
            return
        size = self._settings.fetch_size
        batch = self._consumer.consume(size, 0)
        if not batch:
            first = self._consumer.poll(self._patience())
            if first is None:
                return
            batch = [first, *self._consumer.consume(size - 1, 0)]
        self._route(batch)

    def _route(self, batch: list[ClientMessage]) -> None:
        errors = [error for message in batch if (error := message.error()) is not None]
        if errors:
            batch = [message for message in batch if message.error() is None]
        if batch:
            self._router.route(batch)  # type: ignore[arg-type] # fetched messages have a topic, partition and offset
        for error in errors:
            self._fetch_error(error)

    def _fetch_error(self, error: KafkaError) -> None:
        if error.fatal():
            raise PenstockError(f"the Kafka client cannot go on: {reason(error)}; start the consumer again")
        if error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001 - as above
            raise PenstockError(
                f"the group's offset is not in the log and auto.offset.reset forbids another: {reason(error)}; "
                "reset the group's offsets, or set auto.offset.reset to earliest or latest"
            )
        _log.log(logging.DEBUG if error.code() in _TRANSIENT else logging.WARNING, "fetching: %s", reason(error))

    def _patience(self) -> float:
        due = self._timers.next_due()
        if due is None:
            return _POLL_S if not self._dead_letters.waiting else _SATURATED_S
        return min(_POLL_S, max(0.0, due - time.monotonic()))

    def _drain(self) -> None:
        """Finish what was taken in, within the time for it, and keep polling, so that the group keeps this member."""
        deadline = time.monotonic() + self.drain_timeout
        while not self.leave_now.is_set():
            for assignment in self._assignments.all():
                if assignment.paused != STOPPING:
                    self._intake.pause(self._consumer, assignment, STOPPING)
            self._turn()
            due = self._timers.next_due()
            waits = due is not None and due < deadline
            if self._scheduler.idle and not waits and not self._dead_letters.waiting:
                break
            if time.monotonic() >= deadline:
                break
            message = self._consumer.poll(_SATURATED_S)
            if message is not None:
                # Fetched before the pause took hold. It is out of the client, so it must be tracked.
                self._route([message])
        self.drained = not any(assignment.tracker.in_flight for assignment in self._assignments.all())
        self._commits.commit_last(self._consumer)

    def _leave(self) -> None:
        """Commit, leave the group, close. The last thing this thread does."""
        try:
            self._dead_letters.flush(1.0)
            # Closing revokes: running handlers are waited for and all that is done is committed there.
            self._consumer.close()
        except (KafkaException, RuntimeError) as error:
            why = reason(error) if isinstance(error, KafkaException) else str(error)
            _log.warning("leaving the group: %s; what was not committed is handled again", why)


__all__ = ["PollLoop"]
