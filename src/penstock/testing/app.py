"""`TestApp`: runs an unchanged app on a Kafka in memory, in the caller's thread, for tests of handlers.

Nothing runs between its calls, and the time stands still until the test moves it: a test sends, settles, and checks.
Sinks belong to Spark and do not run here. A transaction coordinator does not run either.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from typing import Self

from confluent_kafka import Message as ClientMessage

from penstock.app import App
from penstock.clients.cluster import Clock
from penstock.clients.topics import TopicSpec
from penstock.consumer import ConsumerStatistics, Explanation
from penstock.consumer.giving_up import GivingUp
from penstock.consumer.handlers.environment import enter_all
from penstock.consumer.handlers.functions import Context
from penstock.consumer.handlers.handler import require_own_topics
from penstock.consumer.handlers.registry import TopicPatterns
from penstock.errors import ConfigurationError, PenstockError, StoppedError
from penstock.message import Message
from penstock.testing.handler_calls import HandlerCalls
from penstock.testing.memory.broker import TestBroker
from penstock.testing.stepped_consumer import SteppedConsumer

#: Maximum step of the clock in seconds, so that a member polls as often as its group requires.
_MAX_STEP_S = 10.0
#: Number of turns without rest after which the app counts as an endless loop.
_MAX_TURNS = 100_000
#: Number of idle turns in a row after which the app is at rest.
_QUIET_TURNS = 2
#: The brokers' default session time-out; they choose it with `group.protocol=consumer`.
_SESSION_MS = 45_000


class TestApp:
    """An app on a `TestBroker`: a context manager. Not thread-safe, except that completions may come from any thread.

    Plain handlers run one after the other in the caller's thread, as on one worker. Messages of a key run in order.
    `async def` handlers run concurrently on an event loop of the `TestApp`. Their waits take real time, and a
    `time_limit` counts real time. Retries, rates, delays and commits use the broker's clock, which `advance` moves.

    Args:
        app: the app. It is not changed, and several `TestApp` may share it.
        broker: the broker to run on; a new one if left out.
        seed: seed of a new broker's random choices: the boundaries of fetches.
        partitions: number of partitions of the topics to create: those that the app consumes or names with `to`.
        topics: further topics to create, such as those of the `Outgoing` that handlers return, and those that patterns
            match.
        handler_timeout: real seconds after which an `async def` handler counts as hanging.

    Raises:
        ConfigurationError: the app has no handler.
    """

    __test__ = False  # pytest would take the name for a test case

    def __init__(
        self,
        app: App,
        broker: TestBroker | None = None,
        *,
        seed: int = 0,
        partitions: int = 1,
        topics: Iterable[str] = (),
        handler_timeout: float = 10.0,
    ) -> None:
        if not app.handlers and not app.patterns:
            raise ConfigurationError(
                f"app {app.name} has no handler to test; sinks are run by Spark and not here: call a sink's function "
                "with a DataFrame of yours, or register a handler with @app.handler(topic)"
            )
        self.app = app
        self.broker = broker or TestBroker(seed)
        self._partitions = partitions
        named = (handler.to for handler in (*app.handlers.values(), *app.patterns.values()) if handler.to is not None)
        self._topics = dict.fromkeys((*app.handlers, *named, *topics))
        self._patterns = TopicPatterns(app.patterns, app.handlers, app._left_out)  # noqa: SLF001 - it runs its parts
        self._handler_timeout = handler_timeout
        self._consumer: SteppedConsumer | None = None
        self._lifespans = ExitStack()
        # The group keeps the partitions of a killed process until then.
        self._session_end = 0.0

    @property
    def clock(self) -> Clock:
        """The broker's clock."""
        return self.broker.clock

    # Start and end

    def start(self) -> Self:
        """Start the app: first its lifespans, then its consumer. Entering the context does the same.

        Raises:
            StoppedError: the app already runs.
            ConfigurationError: an `async def` lifespan has no event loop, an event loop runs in this thread, or Kafka
                would refuse the name of a topic for dead letters or retries.
            Exception: the exception of a lifespan.
        """
        if self._consumer is not None:
            raise StoppedError(f"app {self.app.name} runs already in this test; stop it first, or use restart()")
        app, context = self.app, Context(app=self.app, group=self.app.name)
        require_own_topics(app.name, app.handlers)
        # As `App.start`, but without `exactly_once`: a Kafka in memory has no transactional producers, and no failure
        # here can write results twice.
        settings = replace(app._settings, exactly_once=False)  # noqa: SLF001 - as above
        self.broker.ensure_topics(TopicSpec(topic, self._partitions) for topic in self._topics)
        arguments = (app.name, app.handlers, settings, self.broker, app._middlewares)  # noqa: SLF001 - as above
        consumer = SteppedConsumer(*arguments, context=context, patterns=self._patterns, wait=self._wait)
        consumer.engine.executor = self._calls = HandlerCalls(consumer.engine, self._handler_timeout)
        self._consumer = consumer
        try:
            run_async = None if self._calls.tasks is None else self._calls.tasks.run_now
            context.state = enter_all(app._lifespans, self._lifespans, run_async)  # noqa: SLF001 - as above
            consumer.connect()
            if consumer.engine.telemetry is not None:
                consumer.engine.telemetry.observe(self.statistics)
        except BaseException:
            self._end()
            raise
        return self

    def stop(self) -> bool:
        """Drain, commit and leave the group. Returns whether all fetched messages are done.

        The clock moves until retries and rates are due, by at most the app's `stop_timeout`.

        Raises:
            PenstockError: the failure that stopped the app, if it stopped by itself.
        """
        if self._consumer is None:
            return True
        consumer, loop = self._consumer, self._consumer.loop
        try:
            if not consumer.is_connected or loop.stop_request.failure is not None:
                return False
            loop.begin_drain()
            over = False
            while not over:
                before = self._progress()
                over = loop.drain_step()
                if not self._made_progress(before) and not over:
                    self._move(min(loop.stop_request.end_by, consumer.next_due()))
            if loop.stop_request.failure is not None:
                raise loop.stop_request.failure
            return loop.drained
        finally:
            self._end()

    def _end(self, *, is_killed: bool = False) -> None:
        """End the parts of the process. Unless it is killed, it leaves the group and its lifespans."""
        consumer, tasks = self._running(), self._calls.tasks
        try:
            if consumer.is_connected and not is_killed:
                consumer.loop.leave()
        finally:
            self._consumer = None
            if tasks is not None:
                tasks.cancel_all()
            if is_killed:
                self._lifespans.pop_all()
            elif consumer.engine.telemetry is not None:
                consumer.engine.telemetry.close()
            for resource in self.app._resources:  # noqa: SLF001 - as above
                resource.close()
            try:
                self._lifespans.close()
            finally:
                if tasks is not None:
                    tasks.close()

    def crash(self) -> None:
        """End the app as if its process were killed: it handles, commits and closes nothing more.

        Lifespans and worker resources are not left, as in a killed process. `restart` starts the app again.
        """
        consumer = self._running()
        consumer.client.kill()
        session_ms = float(consumer.engine.settings.client_config("").get("session.timeout.ms", _SESSION_MS))
        self._session_end = self.clock.monotonic() + session_ms / 1000
        self._end(is_killed=True)

    def restart(self) -> None:
        """Stop, unless it crashed, and start as a new process: from the committed offsets.

        After a crash the clock first moves until the group has noticed it: `session.timeout.ms`, 15 s by default.
        """
        self.stop()
        self._move(self._session_end)
        self.start()

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop; without draining if an exception passes through."""
        if kind is None:
            self.stop()
        elif self._consumer is not None:
            self._end()

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Iterable[tuple[str, str | bytes | None]] = (),
        partition: int | None = None,
    ) -> Message:
        """Write a message to a topic and return it; the app receives it in `settle`. Text is encoded as UTF-8.

        Raises:
            TopicNotFoundError: there is no such topic or partition.
            TypeError: the key or the value is neither bytes nor text.
        """
        record = self.broker.produce(topic, _bytes(value), key=_bytes(key), headers=list(headers), partition=partition)
        return _message(record)

    def settle(self) -> None:
        """Run the app until it has nothing left to do at the current time of the clock.

        Raises:
            PenstockError: the failure that stopped the app: a handler without dead letters failed for good (its error
                is the cause), or a limit on dead letters was reached. Or the app does not come to rest.
            StoppedError: the app does not run.
        """
        consumer = self._running()
        loop = consumer.loop
        if not consumer.is_connected:
            raise StoppedError(f"app {self.app.name} is still starting; settle once it has started")
        quiet = 0
        for _ in range(_MAX_TURNS):
            before = self._progress()
            consumer.step(loop.step)
            made_progress = self._made_progress(before)
            if loop.stop_request.failure is not None:
                self._end()
                raise loop.stop_request.failure
            quiet = 0 if made_progress else quiet + 1
            if quiet == _QUIET_TURNS:
                return
        raise PenstockError(
            f"app {self.app.name} did not come to rest in {_MAX_TURNS} turns; does a handler write to a topic that it "
            "consumes?"
        )

    def advance(self, seconds: float) -> None:
        """Move the clock, and run the app whenever something is due, in order of time.

        Raises:
            ValueError: `seconds` is negative or infinite.
            PenstockError: as `settle`.
        """
        end = self.clock.monotonic() + seconds
        if not 0 <= seconds < inf:
            raise ValueError(f"a clock does not go back, and has no end: advance by {seconds!r} seconds")
        self.settle()
        while (now := self.clock.monotonic()) < end:
            due = min(self._running().next_due(), self.broker.next_due())
            # Work that is due and still not done after settling waits for something other than the clock.
            self._move(min(end, now + _MAX_STEP_S, due if due > now else now + _MAX_STEP_S))
            self.settle()

    def statistics(self) -> ConsumerStatistics:
        """Return the current counts.

        Raises:
            StoppedError: the app does not run.
        """
        engine = self._running().engine
        return engine.statistics(len(engine.executor.slots))

    def explain(self) -> list[Explanation]:
        """Return for every assigned partition which message holds its watermark, and since when."""
        return self._running().loop.explain()

    def pause(self, topic: str, partition: int | None = None) -> None:
        """Pause a topic, or a partition, as `RunningApp.pause` does."""
        self._running().loop.app_pauses.pause(topic, partition)

    def resume(self, topic: str, partition: int | None = None) -> None:
        """Resume a topic, or a partition, as `RunningApp.resume` does."""
        self._running().loop.app_pauses.resume(topic, partition)

    def give_up(self, topic: str, partition: int, offset: int) -> str:
        """Give up the message that blocks a partition, as `RunningApp.give_up` does, and settle."""
        giving_up = GivingUp(self._running().engine, self.broker, self.explain)
        request = giving_up.ask(topic, partition, offset)
        self.settle()
        return giving_up.wait(request)

    def committed(self, topic: str) -> dict[int, int]:
        """Return the group's committed offset of each partition. A new process starts there.

        The app commits every `commit_interval` (1 s) of the clock, and in `stop`.
        """
        offsets = self.broker.committed(self.app.name)
        return {place[1]: found.offset for place, found in sorted(offsets.items()) if place[0] == topic}

    def published(self, topic: str) -> list[Message]:
        """Return the committed messages of a topic, such as one that handlers publish to, partition by partition.

        Raises:
            TopicNotFoundError: there is no such topic: name it in `topics`.
        """
        return [_message(record) for record in self.broker.records(topic)]

    def dead_letters(self, topic: str) -> list[Message]:
        """Return the dead letters of a topic that the app consumes.

        Raises:
            ConfigurationError: the app does not consume the topic.
        """
        handler = self.app.handlers.get(topic) or self._patterns.matches([topic]).get(topic)
        if handler is None:
            known = ", ".join((*self.app.handlers, *self.app.patterns))
            raise ConfigurationError(f"app {self.app.name} does not consume {topic}; name one of {known}")
        dead_letter_topic = handler.dead_letter_topic_of(topic)
        # An app with on_failure="dead_letter" creates the topic when it starts.
        self.broker.ensure_topics([TopicSpec(dead_letter_topic, self._partitions)])
        return self.published(dead_letter_topic)

    def _running(self) -> SteppedConsumer:
        if self._consumer is None:
            raise StoppedError(f"app {self.app.name} does not run; use `with TestApp(app) as ...`, or restart() it")
        return self._consumer

    def _wait(self, seconds: float) -> None:
        """Run tasks for a rebalance callback that waits for handlers; without tasks, move the clock."""
        if not self._calls.run_tasks():
            self.broker.advance(seconds)

    def _made_progress(self, before: tuple[object, ...]) -> bool:
        """Run handlers as far as they get. Return whether one ran, or the poll loop did something since `before`."""
        return self._calls.work() or self._progress() != before

    def _progress(self) -> tuple[object, ...]:
        """Return values that change whenever the poll loop does something."""
        engine = self._running().engine
        publisher = engine.dead_letter_publisher
        return (
            replace(engine.counts),
            (publisher.held, publisher.dead_letters, publisher.retries, publisher.failures),
            (engine.outbox.waiting, engine.results.published),
            [assignment.paused for assignment in engine.assignments.all()],
            self.broker.generation(engine.group),
        )

    def _move(self, until: float) -> None:
        self.broker.advance(max(0.0, until - self.clock.monotonic()))


def _bytes(text: bytes | str | None) -> bytes | None:
    if not isinstance(text, bytes | str | None):
        raise TypeError(f"a key and a value are bytes, text or None, not {type(text).__name__}")
    return text.encode() if isinstance(text, str) else text


def _message(record: ClientMessage) -> Message:
    return Message(record)  # type: ignore[arg-type] # a logged message has a place
