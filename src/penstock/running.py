"""`RunningApp`: a started app, its parts and how they end."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Self, Unpack

from penstock.consumer import UNCHANGED, ConsumerStatistics, Explanation, LitePushConsumer, RetryPolicy, Unchanged
from penstock.consumer.handlers.environment import Lifespan, enter_all
from penstock.consumer.inspect.explain_server import explain_server
from penstock.consumer.inspect.statistics import Liveness
from penstock.consumer.settings import UNCHANGED_SETTINGS, LiveSettings
from penstock.description import description
from penstock.errors import ConfigurationError, StoppedError
from penstock.fleet_member import FleetMember, Member
from penstock.option_list import takes_options
from penstock.spark_sink.progress import SinkStatistics
from penstock.spark_sink.queries.app_sinks import AppSinks
from penstock.supervisor.stopping import SignalEvent, StopRequests
from penstock.transactions import Coordinator

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.telemetry import Telemetry
    from penstock.transactions.inboxes import InboxTrimmer

_log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

#: Seconds between two looks at a running app, so that the main thread hears signals.
LOOK_S = 0.2


def coordinator_of(
    given: bool | Coordinator, bootstrap_servers: str, prefix: str, telemetry: Telemetry | None
) -> Coordinator | None:
    """Return the coordinator that an app runs, not started, or None; `ConfigurationError` where given what is none."""
    if given is True:
        return Coordinator(bootstrap_servers=bootstrap_servers, prefix=prefix, telemetry=telemetry)
    if given is False or isinstance(given, Coordinator):
        return given or None
    raise ConfigurationError(
        f"coordinator must be True, False or a penstock.Coordinator, but is a {type(given).__name__}; make one with "
        "your arguments and give that"
    )


class RunningApp:
    """A started app. Made by `App.start`. All methods may be called from any thread."""

    def __init__(
        self,
        coordinator: Coordinator | None,
        consumer: LitePushConsumer | None,
        lifespans: Sequence[Lifespan],
        sinks: AppSinks | None = None,
        *,
        fleet: FleetMember | None = None,
        inboxes: Sequence[InboxTrimmer] = (),
    ) -> None:
        self._coordinator = coordinator
        self._consumer = consumer
        self._lifespans = list(lifespans)
        self._around = ExitStack()
        self._stop_requests = StopRequests()
        self._stop_requested = SignalEvent()
        self._sinks = sinks
        self._inboxes = inboxes
        # None where it does not report, or is not to be commanded.
        self._reporter = self._listener = None
        if fleet is not None:
            self._reporter = fleet.reporter(partial(self.explanation, fleet.sender.group))
            self._listener = fleet.listener(Member(self.pause, self.resume, self.give_up, self.stacks))

    def start(self, name: str) -> None:
        """Start the parts; where one fails, stop those before it. Called once, by `App.start`.

        By the app's name it answers `penstock explain` until it is stopped.
        """
        try:
            # Without an `async def` handler the consumer has no event loop, and says so.
            run_async = None if self._consumer is None else self._consumer.run_async
            state = enter_all(self._lifespans, self._around, run_async)
            if self._consumer is not None:
                self._consumer.context.state = state
            if self._coordinator is not None:
                self._coordinator.start()
            if self._consumer is not None:
                self._consumer.start()
                for inbox in self._inboxes:
                    inbox.start(name, self._consumer.committed)
            if self._sinks is not None:
                self._sinks.start()
            self._around.enter_context(explain_server(partial(self.explanation, name)))
            for service in (self._reporter, self._listener):
                if service is not None:
                    service.start()
        except BaseException:
            try:
                self.stop()
            except Exception:  # noqa: BLE001 - why it did not start says more
                _log.exception("stopping what had started of the app failed")
            raise

    def statistics(self) -> ConsumerStatistics:
        """Return the consumer's counts of this moment.

        Raises:
            ConfigurationError: the app has sinks only; they are counted by `sinks()`.
        """
        if self._consumer is None:
            raise ConfigurationError("the app has no handler to count for; its sinks are counted by sinks()")
        return self._consumer.statistics()

    def explain(self) -> list[Explanation]:
        """Return, for every assigned partition, what holds its watermark, where that message is, and since when.

        While this member has no partition, one for each topic, with partition -1, says why.
        """
        return [] if self._consumer is None else self._consumer.explain()

    def liveness(self) -> Liveness | None:
        """Return since when the consumer's threads have not come round; None for an app that has sinks only."""
        return None if self._consumer is None else self._consumer.liveness()

    @property
    def has_consumer(self) -> bool:
        """Whether handlers run in this process; else it has sinks only."""
        return self._consumer is not None

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was asked for, or the consumer stops by itself."""
        return self._stop_requested.is_set() or (self._consumer is not None and self._consumer.is_stopping)

    def sinks(self) -> list[SinkStatistics]:
        """Return each sink at this moment: what it has read, how far it is behind, how often it was started again."""
        return [] if self._sinks is None else self._sinks.statistics()

    @property
    def queries(self) -> list[StreamingQuery]:
        """Spark's queries of the app's sinks, those that run now or ended last."""
        return [] if self._sinks is None else self._sinks.queries

    @property
    def unfinished(self) -> int:
        """Messages that were not done when a stop ran out of time, or did not wait; 0 before that."""
        return 0 if self._consumer is None else self._consumer.unfinished

    def explanation(self, name: str) -> dict[str, object]:
        """Return what `penstock explain` and reports show of the app, as JSON has it: keys as text, bytes escaped.

        Whoever shows it to others takes the keys out.
        """
        described = description(name, self.explain(), self._consumer, self.sinks(), self._coordinator)
        return {**described, "commands": self._listener is not None}

    def stacks(self, workers: Iterable[str] | None = None) -> dict[str, str]:
        """Return the stacks of the handlers on these workers, or on all, by the name of each, the call last."""
        return {} if self._consumer is None else self._consumer.stacks(workers)

    @takes_options(LiveSettings, UNCHANGED_SETTINGS)
    def change(self, **settings: Unpack[LiveSettings]) -> None:
        """Change settings while the app runs; those left out stay. No message is lost and no order broken by it.

        Raises:
            ConfigurationError: a value is wrong, or cannot change: no handler is of that kind, or lanes are pinned.
        """
        if self._consumer is None:
            raise ConfigurationError("nothing of the app can change while it runs: it has sinks only")
        self._consumer.change(**settings)

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
        self._require_consumer(topic).change_handler(topic, rate=rate, key_rate=key_rate, retry=retry)

    def pause(self, topic: str, partition: int | None = None) -> None:
        """Fetch nothing more of a topic, or of one partition, in this process, until `resume`.

        What was taken in is finished and committed. A partition that goes to another member and comes back is paused
        still, and partitions that come later to a paused topic are paused, too. Retry topics are paused with their
        topic, not with a partition of it. It does not reach other members: call it in each.

        Raises:
            ConfigurationError: the topic has no handler in this app, or the partition is no number.
        """
        self._require_consumer(topic).pause(topic, partition)

    def resume(self, topic: str, partition: int | None = None) -> None:
        """Fetch again what `pause` has paused: a topic with all of its partitions, or one partition.

        What back-pressure has paused stays so as long as it must. Raises as `pause`.
        """
        self._require_consumer(topic).resume(topic, partition)

    def give_up(self, topic: str, partition: int, offset: int, timeout: float = 10.0) -> str:
        """Have the message that holds a partition written to its dead letters now, and its key go on.

        For a message that waits for its next try, that its handler holds, or that is in its handler, whatever
        `on_failure` says; its dead-letter topic is made where it is absent. A handler is interrupted as by its
        `time_limit`, and abandoned if it has not returned 5 s later; its key waits for it.

        Args:
            topic: the topic, or the retry topic.
            partition: the partition, which this member has.
            offset: the offset that holds it, as `explain` tells.
            timeout: seconds to wait until it is written.

        Returns:
            The dead-letter topic that has it.

        Raises:
            NotGivenUpError: it was not given up, or is not written yet; the text says where it is.
            ConfigurationError: the app has no handler.
            MissingRightError: the dead-letter topic may not be made or written to.
        """
        return self._require_consumer(topic).give_up(topic, partition, offset, timeout)

    def _require_consumer(self, topic: str) -> LitePushConsumer:
        if self._consumer is None:
            raise ConfigurationError(f"topic {topic} has no handler in this app; it has sinks only")
        return self._consumer

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Stop with a drain at the first signal, at once at the second."""
        if self._stop_requests.add(number, time.monotonic()):
            self._stop_requested.set()
            self._request_stop(now=self._stop_requests.count > 1)

    def _request_stop(self, *, now: bool) -> None:
        for part in (self._consumer, self._sinks):
            if part is not None:
                part.request_stop(now=now)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the app has ended or a stop was requested; return whether that is so.

        Args:
            timeout: seconds; for ever when left out.

        Raises:
            PenstockError: what stopped the app, where it stopped by itself.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            # Looked at first: a query that ends after this is found with its failure in the next turn.
            ended = self._sinks is None or self._sinks.ended
            if self._sinks is not None:
                self._sinks.raise_failure()
            step = LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
            if self._consumer is not None:
                if self._consumer.wait(step):
                    return True
            elif ended or self._stop_requested.wait(step):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def stop(self, timeout: float | None = None) -> bool:
        """Drain, commit, leave the group; let the sinks finish their batches and end them.

        Args:
            timeout: seconds the drain and the batches may take; the app's `stop_timeout` when left out.

        Returns:
            Whether everything taken in was done, and no batch interrupted.

        Raises:
            PenstockError: what stopped the consumer before, where it stopped by itself.
            ConfigurationError: a handler called it.
        """
        if self._consumer is not None:
            self._consumer.refuse_own_threads()
        self._stop_requested.set()
        begun = time.monotonic()
        drained = finished = True
        # The last is ended first, and each whatever the others raise.
        with ExitStack() as parts:
            if self._consumer is not None:
                parts.callback(self._consumer.close)
            if self._reporter is not None:
                parts.callback(self._reporter.stop)
            if self._listener is not None:
                parts.callback(self._listener.stop)
            for inbox in self._inboxes:
                parts.callback(inbox.stop)
            parts.callback(self._around.close)
            if self._coordinator is not None:
                parts.callback(self._coordinator.stop)
            if self._sinks is not None:
                # At the same time as the drain: neither waits for the other.
                self._sinks.request_stop()
            try:
                drained = self._consumer is None or self._consumer.stop(timeout)
            finally:
                if self._sinks is not None:
                    finished = self._sinks.stop(timeout, begun=begun)
        return drained and finished

    def __enter__(self) -> Self:
        """Return itself, running."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop; without draining when an exception passes through."""
        self._request_stop(now=kind is not None)
        self.stop()


def run_until_signal(name: str, start: Callable[[], RunningApp]) -> None:
    """Start an app and run it until a signal, or until it has ended; then stop it. For the main thread.

    Raises:
        PenstockError: what stopped the app, where it stopped by itself; and what `start` raises.
        StoppedError: messages that were taken in were not done in time, or a second signal did not wait for them.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("App.run() hears signals, so it needs the main thread; use App.start() elsewhere")
    # Before the start, which may take seconds: a signal meanwhile must not end the process without a word.
    early: list[int] = []
    former = {
        stop_signal: signal.signal(stop_signal, lambda number, _: early.append(number)) for stop_signal in _STOP_SIGNALS
    }
    try:
        running = start()
        try:
            for number in _STOP_SIGNALS:
                signal.signal(number, running.on_signal)
            if early:
                running.on_signal(early[0], None)
            while not running.wait(LOOK_S):
                pass
        finally:
            running.stop()
        if running.unfinished:
            raise StoppedError(
                f"app {name} stopped with {running.unfinished} messages not done: they are handled again by the next "
                "owner; where that is too often, give stop_timeout more seconds than a handler takes"
            )
    finally:
        for number, what in former.items():
            signal.signal(number, what)
