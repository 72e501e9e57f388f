"""`LitePushConsumer`: runs an engine on threads. It can be started, changed while it runs, and stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from penstock import options as check
from penstock.clients.cluster import Cluster
from penstock.consumer.engine import Engine
from penstock.consumer.giving_up import GivingUp
from penstock.consumer.handlers.environment import MiddlewareSpec, WorkerResource, middlewares_of
from penstock.consumer.handlers.functions import Context
from penstock.consumer.handlers.handler import Handler, Kind, require_own_topics
from penstock.consumer.handlers.options import RetryPolicy, check_rates, policy_of
from penstock.consumer.handlers.registry import TopicPatterns
from penstock.consumer.inspect.details import ConsumerDetails, details_of
from penstock.consumer.inspect.statistics import LOOP_BUDGET_S, ConsumerStatistics, Liveness, longest_in_handler
from penstock.consumer.poll.explain import Explanation
from penstock.consumer.poll.loop import PollLoop
from penstock.consumer.poll.topics import Needs, needs_of
from penstock.consumer.poll.watchdog import stack_of
from penstock.consumer.run.executor import ThreadsAndTasks
from penstock.consumer.settings import UNCHANGED, UNCHANGED_SETTINGS, ConsumerSettings, LiveSettings, Unchanged
from penstock.errors import ConfigurationError, StoppedError
from penstock.option_list import takes_options

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

#: Seconds between two checks of a poll thread that should end.
_JOIN_POLL_S = 0.5
#: Seconds that handlers under way have to end when nothing is drained, so that the work of short ones is not repeated.
_HANDLERS_GRACE_S = 1.0


class LitePushConsumer:
    """Consumes topics: messages that share a key one at a time and in order, all others concurrently.

    It starts and connects nothing before `start`. All methods may be called from any thread.

    Args:
        group: the consumer group; also names the threads.
        handlers: a handler for each topic, as made by `penstock.consumer.handler`.
        patterns: a handler for each pattern, a regular expression of Python. It takes the topics whose whole name
            matches, also topics that are created while the consumer runs.
        left_out: topics that are excluded from all patterns.
        bootstrap_servers: addresses of brokers, `host:port` with commas in between.
        settings: the options.
        middlewares: functions around every handler, the first outermost.
        resources: resources with one instance per worker, which closes its instance when the worker ends.
        cluster: the source of clients and the time, instead of a real cluster at `bootstrap_servers`.
        app: the value of `Context.app` for handlers.

    Raises:
        ConfigurationError: an option or a handler is wrong.
    """

    def __init__(
        self,
        group: str,
        handlers: Mapping[str, Handler],
        *,
        bootstrap_servers: str,
        patterns: Mapping[str, Handler] | None = None,
        left_out: Collection[str] = (),
        settings: ConsumerSettings | None = None,
        middlewares: Sequence[MiddlewareSpec] = (),
        resources: Sequence[WorkerResource[Any]] = (),
        cluster: Cluster | None = None,
        app: object = None,
    ) -> None:
        check.not_empty("group", group)
        check.not_empty("bootstrap_servers", bootstrap_servers)
        patterns = patterns or {}
        if not handlers and not patterns:
            raise ConfigurationError("there is no handler; give one for each topic to consume")
        for topic, handler in [*handlers.items(), *patterns.items()]:
            check.not_empty("topic", topic)
            if not isinstance(handler, Handler):
                raise ConfigurationError(
                    f"the handler of {topic} must be made by penstock.consumer.handler(...), but is a "
                    f"{type(handler).__name__}"
                )
        require_own_topics(group, handlers)
        self._group = group
        self._settings = settings or ConsumerSettings()
        if self._settings.exactly_once:
            check.printable_ascii("group", group)
            for key in ("client.id", "group.instance.id"):
                check.printable_ascii(f"config[{key!r}]", self._settings.config.get(key, ""))
        self._cluster = cluster or Cluster(bootstrap_servers, self._settings.config)
        #: The `Context` of the handlers. Its state is set before the start.
        self.context = Context(app=app, group=group)
        self._engine = engine = Engine(
            group,
            handlers,
            self._settings,
            self._cluster.clock,
            middlewares_of(middlewares),
            context=self.context,
            patterns=TopicPatterns(patterns, handlers, left_out),
        )
        self._resources = list(resources)
        self._loop = PollLoop(engine)
        self._thread: threading.Thread | None = None
        self._executor = engine.executor = ThreadsAndTasks(
            group, self._settings, plan=engine.lane_plan, processor=engine.processor, closing=self._close_resources
        )

    def needs(self, there: Collection[str] = ()) -> Needs:
        """Return the topics and permissions that it needs on a cluster with the topics `there`; starts nothing."""
        engine = self._engine
        for topic, handler in engine.patterns.matches(there).items():
            engine.routes.add(topic, handler)
        return needs_of(
            self._group, engine.routes.topics, engine.handlers, there, exactly_once=self._settings.exactly_once
        )

    def _close_resources(self) -> None:
        for resource in self._resources:
            resource.close()

    def start(self) -> Self:
        """Connect, check the topics, start the threads, and return.

        Raises:
            BrokerConnectionError: no broker answered.
            TopicNotFoundError: a topic does not exist.
            MissingRightError: the consumer lacks a permission.
            ConfigurationError: the Kafka client refused its configuration.
            StoppedError: it was started before; make a new one.
        """
        if self._thread is not None:
            raise StoppedError(f"consumer {self._group} was started before; make a new one to start again")
        self._loop.connect(self._cluster)
        self._thread = threading.Thread(target=self._loop.run, name=f"penstock-poll-{self._group}", daemon=True)
        self._executor.start()
        if self._engine.telemetry is not None:
            self._engine.telemetry.observe(self.statistics)
        self._thread.start()
        return self

    def run_async(self, awaitable: Awaitable[ResultT]) -> ResultT:
        """Run an awaitable on the event loop of the `async def` handlers and return its result; before `close`.

        Raises:
            ConfigurationError: there is no such handler, and so no loop.
        """
        return self._executor.run_async(awaitable)

    @takes_options(LiveSettings, UNCHANGED_SETTINGS)
    def change(self, **settings: Unpack[LiveSettings]) -> None:
        """Change settings while it runs; omitted settings stay. No message is lost, and the order holds.

        Excess workers end after their time slice. A limit below the messages in flight pauses until they are fewer.

        Raises:
            ConfigurationError: a value is wrong, or cannot change: no handler is of that kind, or lanes are pinned.
        """
        changes: dict[str, Any] = {option: value for option, value in settings.items() if value is not None}
        for option, value in changes.items():
            rule = check.positive if option == "commit_interval" else check.positive_int
            rule(option, value)
        self._executor.resize(changes.pop("workers", None), changes.pop("max_concurrency", None))
        self._loop.commits.interval_s = changes.pop("commit_interval", self._loop.commits.interval_s)
        for option, value in changes.items():
            setattr(self._loop.back_pressure, option, value)

    def change_handler(
        self,
        topic: str,
        *,
        rate: float | Unchanged | None = UNCHANGED,
        key_rate: float | Unchanged | None = UNCHANGED,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Change the limits of a topic's handler while it runs; see `RunningApp.change_handler`."""
        engine = self._engine
        handler = engine.handlers.get(topic)
        if handler is None:
            known = ", ".join(engine.handlers)
            raise ConfigurationError(f"no handler of {self._group} consumes {topic!r}; there are {known}")
        policy = None if retry is None else policy_of(retry)
        for route in engine.routes.of_handler(handler):
            new_rate = route.token_bucket.rate if isinstance(rate, Unchanged) else rate
            new_key_rate = route.key_rate_limiter.rate if isinstance(key_rate, Unchanged) else key_rate
            check_rates(handler.order, new_rate, new_key_rate)
            route.change(retry=policy, rate=new_rate, key_rate=new_key_rate)
        engine.processor.wake_all()

    def pause(self, topic: str, partition: int | None = None) -> None:
        """Fetch nothing more of a topic, or of one partition, until `resume`; see `RunningApp.pause`."""
        self._loop.app_pauses.pause(topic, partition)

    def resume(self, topic: str, partition: int | None = None) -> None:
        """Fetch again what `pause` has paused; see `RunningApp.resume`."""
        self._loop.app_pauses.resume(topic, partition)

    def give_up(self, topic: str, partition: int, offset: int, timeout: float = 10.0) -> str:
        """Have the message that holds a partition written to its dead letters; see `RunningApp.give_up`."""
        giving_up = GivingUp(self._engine, self._cluster, self._loop.explain)
        return giving_up.wait(giving_up.ask(topic, partition, offset), timeout)

    def request_stop(self, timeout: float | None = None, *, now: bool = False) -> None:
        """Request a stop without waiting for it; safe in a signal handler.

        Args:
            timeout: seconds to drain, counted from the first request; by default `stop_timeout`.
            now: do not drain; handlers under way have a second to end.
        """
        if self._thread is None:
            return
        if now:
            self._engine.stop_request.leave(_HANDLERS_GRACE_S)
        else:
            self._engine.stop_request.drain(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the consumer has ended; return whether it has.

        Raises:
            PenstockError: the error that stopped the consumer, if it stopped by itself.
        """
        if self._thread is None:
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._thread.is_alive() and not self._loop.membership.leaving_takes_too_long():
            step = _JOIN_POLL_S if deadline is None else min(_JOIN_POLL_S, deadline - time.monotonic())
            if step <= 0:
                return False
            self._thread.join(step)
        if (failure := self._engine.stop_request.failure) is not None:
            raise failure
        return True

    def refuse_own_threads(self) -> None:
        """Raise `ConfigurationError` on one of its own threads, because a stop there would wait for itself."""
        current = threading.current_thread()
        if current is self._thread or self._executor.has_thread(current.ident):
            raise ConfigurationError(
                f"stop() was called on {current.name}, by a handler or a middleware, and would wait for itself; have "
                "the thread that started the app stop it, for example on an event"
            )

    def stop(self, timeout: float | None = None) -> bool:
        """Drain, commit, leave the group and end the threads.

        Args:
            timeout: seconds the drain may take; by default `stop_timeout`.

        Returns:
            Whether all messages taken in are done. The next owner handles the others again.

        Raises:
            PenstockError: the error that stopped the consumer before, if it stopped by itself.
            ConfigurationError: a handler called it.
        """
        self.refuse_own_threads()
        if self._thread is None:
            return True
        self.request_stop(timeout)
        try:
            self.wait()
        finally:
            # The whole stop has one deadline: the drain and the revocation have used a part of the time.
            left = max(0.0, self._engine.stop_request.end_by - self._engine.clock.monotonic())
            for name in self._executor.stop(left):
                _log.warning("%s was still in its handler; its message is handled again", name)
            if self._engine.telemetry is not None:
                self._engine.telemetry.close()
        return self._loop.drained

    @property
    def unfinished(self) -> int:
        """Messages that were not done when a stop ran out of time, or did not wait; 0 before that."""
        return self._loop.unfinished

    def close(self) -> None:
        """End the event loop. It outlives `stop`, because lifespans may still use it."""
        self._executor.close()

    def committed(self) -> dict[tuple[str, int], int]:
        """Return the known committed offsets of this member's partitions, by topic and partition."""
        return {
            (assignment.topic, assignment.partition): assignment.committed.offset
            for assignment in self._engine.assignments.all()
            if assignment.known and assignment.acknowledged
        }

    def statistics(self) -> ConsumerStatistics:
        """Return the current counts, taken from live state."""
        return self._engine.statistics(self._executor.room(Kind.THREAD))

    def liveness(self) -> Liveness:
        """Return how long its threads have made no progress, and the message that is longest in a handler."""
        engine, loop, now = self._engine, self._loop, self._engine.clock.monotonic()
        is_polling = not loop.membership.leaving.is_set()
        turned_at = loop.watchdog.turned_at if is_polling else None
        return Liveness(
            turned_s=None if turned_at is None else max(0.0, now - turned_at),
            # A revocation waits for handlers and then for its commit.
            turn_limit_s=LOOP_BUDGET_S + 2 * self._settings.revoke_timeout,
            loop_blocked_s=self._executor.loop_lag().seconds,
            longest=longest_in_handler(engine.slots(), now),
        )

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested, or it stops by itself."""
        return self._engine.stop_request.is_requested

    def explain(self) -> list[Explanation]:
        """Return, for every assigned partition, the message that holds its watermark, its state and its age.

        While this member has no partition, it returns one explanation for each topic, with partition -1 and the
        reason; else one for each topic of which nobody gets a partition, because it is absent or may not be read.
        """
        return self._loop.explain()

    def details(self, most_parked: int) -> ConsumerDetails:
        """Return the lanes, the latencies, the dead letters and at most `most_parked` parked keys of this moment."""
        engine = self._engine
        reasons = engine.dead_letter_publisher.reasons.copy().values()
        return details_of(engine.scheduler, engine.slots(), reasons, engine.clock.monotonic(), most_parked)

    def stacks(self, workers: Iterable[str] | None = None) -> dict[str, str]:
        """Return the stacks of the handlers by worker name, for these workers or all. The innermost call is last."""
        workers = None if workers is None else set(workers)
        busy = {slot.name: slot for slot in self._engine.slots() if slot.record is not None}
        stacks = {
            name: "".join(stack_of(slot.thread_id, slot.task))
            for name, slot in busy.items()
            if workers is None or name in workers
        }
        for call in self._engine.abandoned:
            if workers is None or call.worker in workers:
                stacks[call.worker] = "".join(call.stack())
        return stacks

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; without draining when an exception passes through."""
        self.request_stop(now=kind is not None)
        try:
            self.stop()
        finally:
            self.close()
