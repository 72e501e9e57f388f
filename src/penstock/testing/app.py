"""`TestApp`: an app run unchanged on a Kafka in memory, in the caller's thread, for tests of handlers.

Nothing runs between its calls, and time stands until it is moved: a test sends, settles, and looks. Sinks are Spark's
and are not run, nor is a transaction coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
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

#: Seconds the clock goes on at a time at most, so that a member polls as often as its group wants.
_MAX_STEP_S = 10.0
#: Turns without rest after which something is taken to go round for ever.
_MAX_TURNS = 100_000
#: Turns in which nothing happened, after which nothing will.
_QUIET_TURNS = 2
#: How long the brokers' session is by default, where `group.protocol=consumer` leaves it to them.
_SESSION_MS = 45_000


class TestApp:
    """An app on a `TestBroker`: a context manager. Not thread-safe, save that completions may come from any thread.

    Plain handlers run one after the other in the caller's thread, as on one worker, each message of a key after the one
    before it; `async def` handlers run at once on an event loop of its own, whose time is real: what such a handler
    waits for is waited for, and so is the time that a `time_limit` counts. Retries, rates, delays and commits go by the
    broker's clock, which `advance` moves.

    Args:
        app: the app. It is not changed, and may be given to several.
        broker: where it runs; one of its own when left out.
        seed: decides what is left to chance in a broker of its own: where fetches break.
        partitions: of the topics that the app consumes, or names with `to`, and that are absent.
        topics: further topics to create, such as those of the `Outgoing` that handlers return, and those that patterns
            match.
        handler_timeout: real seconds that an `async def` handler may take before it is taken to hang.

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
        self._around = ExitStack()
        # Until when the group keeps partitions for a process that was killed.
        self._session_over = 0.0

    @property
    def clock(self) -> Clock:
        """The broker's clock."""
        return self.broker.clock

    # Start and end

    def start(self) -> Self:
        """Start the app: its lifespans, then its consumer. Entering the context does the same.

        Raises:
            StoppedError: it runs already.
            ConfigurationError: an `async def` lifespan has no event loop, an event loop runs in this thread, or Kafka
                would not take the name of a topic for dead letters or retries.
            Exception: what a lifespan raised.
        """
        if self._consumer is not None:
            raise StoppedError(f"app {self.app.name} runs already in this test; stop it first, or use restart()")
        app, context = self.app, Context(app=self.app, group=self.app.name)
        require_own_topics(app.name, app.handlers)
        # It is run as `App.start` runs it; but a Kafka in memory has no transactional producers, and nothing ends here
        # that would have results written twice.
        settings = replace(app._settings, exactly_once=False)  # noqa: SLF001 - as above
        self.broker.ensure_topics(TopicSpec(topic, self._partitions) for topic in self._topics)
        made_of = (app.name, app.handlers, settings, self.broker, app._middlewares)  # noqa: SLF001 - as above
        consumer = SteppedConsumer(*made_of, context=context, patterns=self._patterns, wait=self._wait)
        consumer.engine.executor = self._calls = HandlerCalls(consumer.engine, self._handler_timeout)
        self._consumer = consumer
        try:
            run_async = None if self._calls.tasks is None else self._calls.tasks.run_now
            context.state = enter_all(app._lifespans, self._around, run_async)  # noqa: SLF001 - as above
            consumer.connect()
            if consumer.engine.telemetry is not None:
                consumer.engine.telemetry.observe(self.statistics)
        except BaseException:
            self._end()
            raise
        return self

    def stop(self) -> bool:
        """Drain, commit and leave the group. Returns whether everything taken in was done.

        What waits (retries, rates) is waited for by the clock, at most the app's `stop_timeout`.

        Raises:
            PenstockError: what stopped the app, where it stopped by itself.
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
                before = self._traces()
                over = loop.drain_step()
                if not self._went_on(before) and not over:
                    self._move(min(loop.stop_request.end_by, consumer.next_due()))
            if loop.stop_request.failure is not None:
                raise loop.stop_request.failure
            return loop.drained
        finally:
            self._end()

    def _end(self, *, is_killed: bool = False) -> None:
        """End what belongs to the process; one that is not killed leaves the group and its lifespans first."""
        consumer, tasks = self._running(), self._calls.tasks
        try:
            if consumer.is_connected and not is_killed:
                consumer.loop.leave()
        finally:
            self._consumer = None
            if tasks is not None:
                tasks.cancel_all()
            if is_killed:
                self._around.pop_all()
            elif consumer.engine.telemetry is not None:
                consumer.engine.telemetry.close()
            for resource in self.app._resources:  # noqa: SLF001 - as above
                resource.close()
            try:
                self._around.close()
            finally:
                if tasks is not None:
                    tasks.close()

    def crash(self) -> None:
        """End the app as if its process were killed: nothing more is handled, committed or closed.

        Lifespans and worker resources do not end, as in a killed process. `restart` starts it again.
        """
        consumer = self._running()
        consumer.client.kill()
        session_ms = float(consumer.engine.settings.client_config("").get("session.timeout.ms", _SESSION_MS))
        self._session_over = self.clock.monotonic() + session_ms / 1000
        self._end(is_killed=True)

    def restart(self) -> None:
        """Stop, unless it crashed, and start as a new process does: from the committed offsets.

        After a crash the clock first goes on until the group has noticed: `session.timeout.ms`, 15 s by default.
        """
        self.stop()
        self._move(self._session_over)
        self.start()

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop; without draining when an exception passes through."""
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
        """Write a message to a topic and return it; `settle` lets the app get it. Texts become UTF-8.

        Raises:
            TopicNotFoundError: there is no such topic or partition.
        """
        record = self.broker.produce(topic, _bytes(value), key=_bytes(key), headers=list(headers), partition=partition)
        return _message(record)

    def settle(self) -> None:
        """Let the app run until nothing is left that it can do at this time of the clock.

        Raises:
            PenstockError: what stopped the app: a handler without dead letters that failed for good (its error is the
                cause), or limits on dead letters. Or the app does not come to rest.
            StoppedError: it does not run.
        """
        consumer = self._running()
        loop = consumer.loop
        if not consumer.is_connected:
            raise StoppedError(f"app {self.app.name} is still starting; settle once it has started")
        quiet = 0
        for _ in range(_MAX_TURNS):
            before = self._traces()
            consumer.step(loop.step)
            went_on = self._went_on(before)
            if loop.stop_request.failure is not None:
                self._end()
                raise loop.stop_request.failure
            quiet = 0 if went_on else quiet + 1
            if quiet == _QUIET_TURNS:
                return
        raise PenstockError(
            f"app {self.app.name} did not come to rest in {_MAX_TURNS} turns; does a handler write to a topic that it "
            "consumes?"
        )

    def advance(self, seconds: float) -> None:
        """Move the clock, and let the app do what is due on the way, in the order of the times.

        Raises:
            ValueError: `seconds` is negative.
            PenstockError: as `settle`.
        """
        end = self.clock.monotonic() + seconds
        if not seconds >= 0:
            raise ValueError(f"a clock does not go back: advance by {seconds!r} seconds; give zero or more")
        self.settle()
        while (now := self.clock.monotonic()) < end:
            due = min(self._running().next_due(), self.broker.next_due())
            # What is due now and was not done by settling waits for something else than the clock.
            self._move(min(end, now + _MAX_STEP_S, due if due > now else now + _MAX_STEP_S))
            self.settle()

    def statistics(self) -> ConsumerStatistics:
        """Return the counts of this moment.

        Raises:
            StoppedError: it does not run.
        """
        engine = self._running().engine
        return engine.statistics(len(engine.executor.slots))

    def explain(self) -> list[Explanation]:
        """Return, for every assigned partition, what holds its watermark, and since when."""
        return self._running().loop.explain()

    def pause(self, topic: str, partition: int | None = None) -> None:
        """Pause a topic, or a partition, as `RunningApp.pause` does."""
        self._running().loop.app_pauses.pause(topic, partition)

    def resume(self, topic: str, partition: int | None = None) -> None:
        """Let it go on, as `RunningApp.resume` does."""
        self._running().loop.app_pauses.resume(topic, partition)

    def give_up(self, topic: str, partition: int, offset: int) -> str:
        """Give up the message that holds a partition, as `RunningApp.give_up` does, and settle."""
        giving_up = GivingUp(self._running().engine, self.broker, self.explain)
        asked = giving_up.ask(topic, partition, offset)
        self.settle()
        return giving_up.wait(asked)

    def committed(self, topic: str) -> dict[int, int]:
        """Return the group's committed offset of each partition: what a new process starts from.

        Commits are made every `commit_interval` (1 s) of the clock, and by `stop`.
        """
        offsets = self.broker.committed(self.app.name)
        return {place[1]: found.offset for place, found in sorted(offsets.items()) if place[0] == topic}

    def published(self, topic: str) -> list[Message]:
        """Return the committed messages of a topic, as of those that handlers publish to, partition by partition.

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
        letters = handler.dead_letter_topic_of(topic)
        # The topic is made by an app with on_failure="dead_letter" when it starts.
        self.broker.ensure_topics([TopicSpec(letters, self._partitions)])
        return self.published(letters)

    def _running(self) -> SteppedConsumer:
        if self._consumer is None:
            raise StoppedError(f"app {self.app.name} does not run; use `with TestApp(app) as ...`, or restart() it")
        return self._consumer

    def _wait(self, seconds: float) -> None:
        """Serve a rebalance callback that waits for handlers: they go on, or else the clock does."""
        if not self._calls.go_on():
            self.broker.advance(seconds)

    def _went_on(self, before: tuple[object, ...]) -> bool:
        """Let handlers run as far as they get; tell whether one did, or the poll loop had done something since."""
        return self._calls.work() or self._traces() != before

    def _traces(self) -> tuple[object, ...]:
        """Return what changes whenever the poll loop has done something."""
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


def _bytes(given: bytes | str | None) -> bytes | None:
    return given.encode() if isinstance(given, str) else given


def _message(record: ClientMessage) -> Message:
    return Message(record)  # type: ignore[arg-type] # a logged message has a place
