"""`RunningApp`: a started app, its parts and how they end."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from penstock.consumer import UNCHANGED, ConsumerStatistics, Explanation, LitePushConsumer, RetryPolicy, Unchanged
from penstock.errors import ConfigurationError, SinkError
from penstock.transactions import Coordinator

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger(__name__)

Lifespan = Callable[[], Generator[None, Any, Any]] | Callable[[], AsyncGenerator[None, Any]]

#: Seconds within which a signal that comes twice counts once.
_SAME_SIGNAL_S = 0.25
#: Seconds between two looks at a running app, so that the main thread hears signals.
LOOK_S = 0.2


class RunningApp:
    """A started app. Made by `App.start`. All methods may be called from any thread."""

    def __init__(
        self, coordinator: Coordinator | None, consumer: LitePushConsumer | None, lifespans: Sequence[Lifespan]
    ) -> None:
        self._coordinator = coordinator
        self._consumer = consumer
        self._lifespans = list(lifespans)
        self._entered = ExitStack()
        self._signals = 0
        self._signalled = (0, 0.0)
        self._stop_asked = threading.Event()
        #: Spark's queries of the app's sinks.
        self.queries: list[StreamingQuery] = []

    def start(self, start_sinks: Callable[[list[StreamingQuery]], None]) -> None:
        """Start the parts; where one fails, stop those before it. Called once, by `App.start`.

        Args:
            start_sinks: starts the sinks' queries and puts each into the list it is given.
        """
        try:
            for lifespan in self._lifespans:
                self._enter(lifespan)
            if self._coordinator is not None:
                self._coordinator.start()
            if self._consumer is not None:
                self._consumer.start()
            start_sinks(self.queries)
        except BaseException:
            try:
                self.stop()
            except Exception:  # noqa: BLE001 - why it did not start says more
                _log.exception("stopping what had started of the app failed")
            raise

    def _enter(self, lifespan: Lifespan) -> None:
        if not inspect.isasyncgenfunction(lifespan):
            span: AbstractContextManager[None] = contextmanager(lifespan)()  # type: ignore[arg-type] # asked just above
            span.__enter__()
            # Not as a context: what one raises at its end is no reason for those before it not to come to theirs.
            self._entered.callback(span.__exit__, None, None, None)
            return
        if self._consumer is None:
            raise ConfigurationError("an async lifespan needs an `async def` handler, whose event loop it runs on")
        manager: AbstractAsyncContextManager[None] = asynccontextmanager(lifespan)()
        self._consumer.run_async(manager.__aenter__())
        consumer = self._consumer
        self._entered.callback(lambda: consumer.run_async(manager.__aexit__(None, None, None)))

    def statistics(self) -> ConsumerStatistics:
        """Return the consumer's counts of this moment.

        Raises:
            ConfigurationError: the app has sinks only; ask its `queries` for their progress.
        """
        if self._consumer is None:
            raise ConfigurationError("the app has no handler to count for; its sinks' progress is in `queries`")
        return self._consumer.statistics()

    def explain(self) -> list[Explanation]:
        """Return, for every assigned partition, what holds its watermark, where that message is, and since when."""
        return [] if self._consumer is None else self._consumer.explain()

    def change(
        self,
        *,
        workers: int | None = None,
        max_concurrency: int | None = None,
        max_in_flight: int | None = None,
        max_in_flight_bytes: int | None = None,
        max_parked: int | None = None,
        max_parked_bytes: int | None = None,
        commit_interval: float | None = None,
    ) -> None:
        """Change settings while the app runs; those left out stay. No message is lost and no order broken by it.

        Raises:
            ConfigurationError: a value is wrong, or the number of workers cannot change because lanes are pinned.
        """
        if self._consumer is not None:
            self._consumer.change(
                workers=workers,
                max_concurrency=max_concurrency,
                max_in_flight=max_in_flight,
                max_in_flight_bytes=max_in_flight_bytes,
                max_parked=max_parked,
                max_parked_bytes=max_parked_bytes,
                commit_interval=commit_interval,
            )

    def change_handler(
        self,
        topic: str,
        *,
        rate: float | Unchanged | None = UNCHANGED,
        key_rate: float | Unchanged | None = UNCHANGED,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Change the limits of a topic's handler while the app runs; those left out stay.

        Args:
            topic: the topic; the handler's other topics and its retry topics follow.
            rate: messages/s over all keys; 0 holds all, None removes the limit.
            key_rate: messages/s of each key; None removes the limit.
            retry: the policy for failures from now on.

        Raises:
            ConfigurationError: a value is wrong, or the topic has no handler in this app.
        """
        if self._consumer is None:
            raise ConfigurationError(f"topic {topic} has no handler in this app; it has sinks only")
        self._consumer.change_handler(topic, rate=rate, key_rate=key_rate, retry=retry)

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Stop with a drain at the first signal, at once at the second."""
        # A terminal and a supervisor may both send one for the same wish.
        now, (former, then) = time.monotonic(), self._signalled
        if number == former and now - then < _SAME_SIGNAL_S:
            return
        self._signalled = (number, now)
        self._signals += 1
        self._stop_asked.set()
        if self._consumer is not None:
            self._consumer.request_stop(now=self._signals > 1)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the app has ended or was told to; return whether that is so.

        Args:
            timeout: seconds; for ever when left out.

        Raises:
            PenstockError: what stopped the app, where it stopped by itself.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            # Looked at first: a query that ends after this is found with its failure in the next turn.
            ended = not any(query.isActive for query in self.queries)
            self._raise_failed_query()
            step = LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
            if self._consumer is not None:
                if self._consumer.wait(step):
                    return True
            elif ended or self._stop_asked.wait(step):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def _raise_failed_query(self) -> None:
        for query in self.queries:
            failure = None if query.isActive else query.exception()
            if failure is not None:
                raise SinkError(
                    f"the query {query.name} ended: {str(failure).splitlines()[0]}; what it stored stands, "
                    "mend the cause and start again"
                ) from failure

    def stop(self, timeout: float | None = None) -> bool:
        """Drain, commit, leave the group; stop the sinks. Returns whether everything taken in was done.

        Args:
            timeout: seconds the drain may take; the app's `stop_timeout` when left out.

        Raises:
            PenstockError: what stopped the consumer before, where it stopped by itself.
        """
        self._stop_asked.set()
        # The last is ended first, and each whatever the others raise.
        with ExitStack() as parts:
            if self._consumer is not None:
                parts.callback(self._consumer.close)
            parts.callback(self._entered.close)
            if self._coordinator is not None:
                parts.callback(self._coordinator.stop)
            for query in reversed(self.queries):
                parts.callback(query.stop)
            return self._consumer is None or self._consumer.stop(timeout)

    def __enter__(self) -> Self:
        """Return itself, running."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; without draining when an exception passes through."""
        if self._consumer is not None:
            self._consumer.request_stop(now=kind is not None)
        self.stop()


__all__ = ["LOOK_S", "Lifespan", "RunningApp"]
