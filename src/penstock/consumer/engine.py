"""`LitePushConsumer`: the parts of a consumer put together, started and stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from confluent_kafka import Consumer, KafkaException, TopicPartition

from penstock import config as check
from penstock.config import ClientConfig
from penstock.consumer.assignments import Assignment, Assignments, Fetch
from penstock.consumer.commits import Commits
from penstock.consumer.dead_letters import DeadLetter, DeadLetterQueue
from penstock.consumer.intake import Intake
from penstock.consumer.ordering import Ordering
from penstock.consumer.poll_loop import PollLoop
from penstock.consumer.rebalance import Rebalance
from penstock.consumer.retries import Timers
from penstock.consumer.router import Router
from penstock.consumer.settings import ConsumerSettings, Handler, OnFailure
from penstock.consumer.statistics import ConsumerStatistics, PartitionStatistics
from penstock.consumer.workers import WorkerPool
from penstock.errors import ConfigurationError, StoppedError
from penstock.kafka import TopicSpec, admin_client, base_config, client_refused, ensure_topics, require_topics
from penstock.message import Record
from penstock.offsets import decode
from penstock.routing import Scheduler

_log = logging.getLogger(__name__)


class LitePushConsumer:
    """Consumes topics: messages that wait for each other one at a time and in order, all others at once.

    Nothing is started or connected before `start`. All methods may be called from any thread.

    Args:
        group: the consumer group; also names the threads.
        handlers: a handler for each topic, as made by `penstock.consumer.handler`.
        bootstrap_servers: addresses of brokers, `host:port` with commas in between.
        settings: the options.

    Raises:
        ConfigurationError: an option or a handler is wrong.
    """

    def __init__(
        self,
        group: str,
        handlers: Mapping[str, Handler],
        *,
        bootstrap_servers: str,
        settings: ConsumerSettings | None = None,
    ) -> None:
        check.not_empty("group", group)
        check.not_empty("bootstrap_servers", bootstrap_servers)
        if not handlers:
            raise ConfigurationError("there is no handler; give one for each topic to consume")
        for topic, one in handlers.items():
            check.not_empty("topic", topic)
            if not isinstance(one, Handler):
                raise ConfigurationError(
                    f"the handler of {topic} must be made by penstock.consumer.handler(...), but is a "
                    f"{type(one).__name__}"
                )
        self._group = group
        self._handlers = dict(handlers)
        self._bootstrap_servers = bootstrap_servers
        self._settings = settings or ConsumerSettings()
        self._thread: threading.Thread | None = None
        self._build()

    def _build(self) -> None:
        """Put the parts together; nothing runs yet."""
        settings = self._settings
        self._scheduler: Scheduler[Fetch, Record] = Scheduler(
            settings.workers, lanes_per_worker=settings.lanes_per_worker, pinned=settings.pinned
        )
        lanes = len(self._scheduler.lanes)
        self._orderings = {topic: Ordering(one.order, one.keyless, lanes) for topic, one in self._handlers.items()}
        self._assignments = Assignments()
        self._timers = Timers()
        self._dead_letters = DeadLetterQueue(self._group, self._timers, self._settle)
        self._pool = WorkerPool(
            self._group,
            workers=settings.workers,
            run_seconds=settings.run_seconds,
            scheduler=self._scheduler,
            timers=self._timers,
            dead_letters=self._dead_letters,
            fail=self._fail,
        )
        self._router = Router(self._assignments, self._scheduler, self._pool.wake)
        self._intake = Intake(settings.max_in_flight, settings.max_in_flight_bytes)
        self._commits = Commits(self._assignments, settings.commit_interval)
        self._rebalance = Rebalance(
            self._assignments, self._commits, self._pool, self._assignment, settings.revoke_timeout
        )
        self._loop: PollLoop | None = None

    def _assignment(self, committed: TopicPartition) -> Assignment:
        start, metadata = max(0, committed.offset), committed.metadata
        return Assignment(
            committed.topic,
            committed.partition,
            self._handlers[committed.topic],
            self._orderings[committed.topic],
            start=start,
            restored=decode(start, metadata),
        )

    def _settle(self, letter: DeadLetter) -> None:
        """Complete a dead letter that is durable and let its key go on. On the poll thread."""
        letter.fetch.assignment.tracker.complete(letter.fetch.block, (letter.index,))
        letter.parked.head_done = True
        self._pool.wake(self._scheduler.wake(self._scheduler.lanes[letter.lane], letter.key))

    def _fail(self, error: BaseException) -> None:
        if self._loop is not None:
            self._loop.fail(error)

    def start(self) -> Self:
        """Connect, check the topics and start the threads. Returns at once after that.

        Raises:
            BrokerConnectionError: no broker answered.
            TopicNotFoundError: a topic does not exist.
            ConfigurationError: the Kafka client refused its configuration.
            StoppedError: it was started before; make a new one.
        """
        if self._thread is not None:
            raise StoppedError(f"consumer {self._group} was started before; make a new one to start again")
        admin = admin_client(self._bootstrap_servers, self._settings.config)
        partitions = require_topics(admin, self._bootstrap_servers, self._handlers)
        letters = {
            one.dead_letter_topic.replace("{topic}", topic): TopicSpec(
                one.dead_letter_topic.replace("{topic}", topic), partitions[topic]
            )
            for topic, one in self._handlers.items()
            if one.on_failure is OnFailure.DEAD_LETTER
        }
        ensure_topics(admin, self._bootstrap_servers, letters.values())
        client_config = base_config(self._bootstrap_servers, self._settings.client_config(self._group))
        try:
            consumer = Consumer({**client_config, "on_commit": self._commits.on_commit})
            if letters:
                self._dead_letters.connect(base_config(self._bootstrap_servers, _shared(self._settings.config)))
        except KafkaException as error:
            raise client_refused(error) from error
        self._loop = PollLoop(
            consumer,
            list(self._handlers),
            self._settings,
            assignments=self._assignments,
            scheduler=self._scheduler,
            pool=self._pool,
            router=self._router,
            intake=self._intake,
            commits=self._commits,
            rebalance=self._rebalance,
            timers=self._timers,
            dead_letters=self._dead_letters,
        )
        self._thread = threading.Thread(target=self._loop.run, name=f"penstock-poll-{self._group}", daemon=True)
        self._pool.start()
        self._thread.start()
        return self

    def request_stop(self, timeout: float | None = None, *, now: bool = False) -> None:
        """Ask for a stop without waiting for it; safe in a signal handler.

        Args:
            timeout: seconds to drain; `stop_timeout` when left out.
            now: do not drain.
        """
        if self._loop is None:
            return
        if timeout is not None:
            self._loop.drain_timeout = timeout
        if now:
            self._loop.leave_now.set()
        self._loop.stopping.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the consumer has ended; return whether it has.

        Raises:
            PenstockError: what stopped the consumer, where it stopped by itself.
        """
        if self._thread is None or self._loop is None:
            return True
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self._loop.failure is not None:
            raise self._loop.failure
        return True

    def stop(self, timeout: float | None = None) -> bool:
        """Drain, commit, leave the group and end the threads.

        Args:
            timeout: seconds the drain may take; `stop_timeout` when left out.

        Returns:
            Whether everything taken in was done. What was not is handled again by the next owner.

        Raises:
            PenstockError: what stopped the consumer before, where it stopped by itself.
        """
        if self._loop is None:
            return True
        self.request_stop(timeout)
        begun = time.monotonic()
        try:
            self.wait()
        finally:
            stuck = self._pool.stop(max(0.0, self._loop.drain_timeout - (time.monotonic() - begun)))
            for worker in stuck:
                _log.warning("%s is still in its handler; its message is handled again", worker.thread.name)
        return self._loop.drained

    def statistics(self) -> ConsumerStatistics:
        """Return the counts of this moment, taken from live state."""
        partitions = tuple(
            PartitionStatistics(
                one.topic,
                one.partition,
                one.tracker.watermark,
                one.tracker.position,
                one.tracker.in_flight,
                one.tracker.bytes_in_flight,
                one.paused,
            )
            for one in self._assignments.all()
        )
        workers = self._pool.workers
        return ConsumerStatistics(
            received=self._router.received,
            handled=sum(worker.handled for worker in workers),
            failed=sum(worker.failed for worker in workers),
            retried=sum(worker.retried for worker in workers),
            dead_letters=self._dead_letters.written,
            dead_letter_failures=self._dead_letters.failures,
            dropped=sum(worker.dropped for worker in workers),
            in_flight=sum(one.in_flight for one in partitions),
            retries_waiting=len(self._timers),
            commits=self._commits.succeeded,
            failed_commits=self._commits.failed,
            pauses=dict(self._intake.pauses),
            assigned=self._rebalance.assigned,
            revoked=self._rebalance.revoked,
            lost=self._rebalance.lost,
            stale=self._router.stale,
            busy_workers=sum(worker.record is not None for worker in workers),
            partitions=partitions,
        )

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; without draining when an exception passes through."""
        self.request_stop(now=kind is not None)
        self.stop()


#: Settings of a consumer that a producer does not know, by prefix.
_CONSUMER_ONLY = (
    "auto.",
    "fetch.",
    "group.",
    "heartbeat.",
    "isolation.",
    "max.partition.",
    "max.poll.",
    "partition.assignment",
    "queued.",
    "session.",
    "check.crcs",
    "allow.auto",
)


def _shared(config: ClientConfig) -> ClientConfig:
    """Return the settings that a producer understands too."""
    return {key: value for key, value in config.items() if not key.startswith(_CONSUMER_ONLY)}


__all__ = ["LitePushConsumer"]
