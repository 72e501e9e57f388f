"""`RunningApp`: a started app. It starts and stops its parts in order."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, Unpack

from penstock.consumer import UNCHANGED, ConsumerStatistics, Explanation, LitePushConsumer, RetryPolicy, Unchanged
from penstock.consumer.handlers.environment import Lifespan, enter_all
from penstock.consumer.inspect.explain_server import explain_server
from penstock.consumer.inspect.statistics import Liveness
from penstock.consumer.settings import UNCHANGED_SETTINGS, LiveSettings
from penstock.description import description, stacks_of_blocking_calls
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

#: Seconds between two looks at a running app, so that the main thread receives signals.
LOOK_S = 0.2


def coordinator_of(
    given: bool | Coordinator, bootstrap_servers: str, prefix: str, telemetry: Telemetry | None
) -> Coordinator | None:
    """Return the coordinator of an app, not started, or None; `ConfigurationError` if the argument is invalid."""
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
        # None if the app does not report, or accepts no commands.
        self._reporter = self._listener = None
        if fleet is not None:
            self._reporter = fleet.reporter(partial(self.explanation, fleet.sender.group))
            self._listener = fleet.listener(Member(self.pause, self.resume, self.give_up, self.stacks))

    def start(self, name: str) -> None:
        """Start the parts. If one fails, stop those before it. Called once, by `App.start`.

        Until it is stopped, it answers `penstock explain` under the app's name.
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
            self._around.enter_context(explain_server(partial(self.explanation, name, with_stacks=True)))
            for service in (self._reporter, self._listener):
                if service is not None:
                    service.start()
        except BaseException:
            try:
                self.stop()
            except Exception:  # noqa: BLE001 - the error of the start says more
                _log.exception("stopping what had started of the app failed")
            raise

    def statistics(self) -> ConsumerStatistics:
        """Return the consumer's counts of this moment.

        Raises:
            ConfigurationError: the app has sinks only; use `sinks()`.
        """
        if self._consumer is None:
            raise ConfigurationError("the app has no handler to count for; its sinks are counted by sinks()")
        return self._consumer.statistics()

    def explain(self) -> list[Explanation]:
        """Return for every assigned partition which message holds its watermark, where it is, and since when.

        While this member has no partition, there is one entry for each topic, with partition -1 and the reason; else
        one for each topic of which nobody gets a partition, because it is absent or may not be read.
        """
        return [] if self._consumer is None else self._consumer.explain()

    def liveness(self) -> Liveness | None:
        """Return since when the consumer's threads have not turned; None for an app with sinks only."""
        return None if self._consumer is None else self._consumer.liveness()

    @property
    def has_consumer(self) -> bool:
        """Whether handlers run in this process; else it has sinks only."""
        return self._consumer is not None

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested, or the consumer stops by itself."""
        return self._stop_requested.is_set() or (self._consumer is not None and self._consumer.is_stopping)

    def sinks(self) -> list[SinkStatistics]:
        """Return a snapshot of each sink: rows read, lag, restarts."""
        return [] if self._sinks is None else self._sinks.statistics()

    @property
    def queries(self) -> list[StreamingQuery]:
        """The Spark query of each sink: the one that runs now, or ran last."""
        return [] if self._sinks is None else self._sinks.queries

    @property
    def unfinished(self) -> int:
        """Messages that were not done when a stop ended without them; 0 before a stop."""
        return 0 if self._consumer is None else self._consumer.unfinished

    def explanation(self, name: str, *, with_stacks: bool = False) -> dict[str, Any]:
        """Return the app's state for `penstock explain` and reports, as JSON values: keys as text, bytes escaped.

        Remove the keys before you show it to others. `with_stacks` adds the stacks of calls that block partitions. Show
        them on this machine only.
        """
        partitions = self.explain()
        described = description(name, partitions, self._consumer, self.sinks(), self._coordinator)
        described["commands"] = self._listener is not None
        return described | ({"stacks": stacks_of_blocking_calls(partitions, self.stacks)} if with_stacks else {})

    def stacks(self, workers: Iterable[str] | None = None) -> dict[str, str]:
        """Return the stacks of running handlers by worker name, innermost call last; default: of all workers."""
        return {} if self._consumer is None else self._consumer.stacks(workers)

    @takes_options(LiveSettings, UNCHANGED_SETTINGS)
    def change(self, **settings: Unpack[LiveSettings]) -> None:
        """Change settings while the app runs. Options that are left out stay. No message is lost, and order is kept.

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
        """Change the limits of a topic's handler while the app runs. Options that are left out stay.

        Args:
            topic: the topic; the change includes the handler's other topics and its retry topics.
            rate: messages/s over all keys; 0 stops the handler, None removes the limit.
            key_rate: messages/s of each key; None removes the limit.
            retry: the policy for failures from now on.

        Raises:
            ConfigurationError: a value is wrong, or the topic has no handler in this app.
        """
        self._require_consumer(topic).change_handler(topic, rate=rate, key_rate=key_rate, retry=retry)

    def pause(self, topic: str, partition: int | None = None) -> None:
        """Stop fetching a topic, or one partition, in this process, until `resume`.

        Fetched messages are finished and committed. A partition that goes to another member and comes back is still
        paused, and so are partitions of a paused topic that come later. Pausing a topic pauses its retry topics;
        pausing a partition does not. Other members do not notice: call it in each.

        Raises:
            ConfigurationError: the topic has no handler in this app, or the partition is no number.
        """
        self._require_consumer(topic).pause(topic, partition)

    def resume(self, topic: str, partition: int | None = None) -> None:
        """Fetch again after `pause`: a topic with all its partitions, or one partition.

        Pauses by back-pressure stay until it ends. Raises as `pause`.
        """
        self._require_consumer(topic).resume(topic, partition)

    def give_up(self, topic: str, partition: int, offset: int, timeout: float = 10.0) -> str:
        """Write the message that holds a partition to its dead-letter topic now, so that its key goes on.

        The message may wait for its next try, be held, or be in its handler. `on_failure` does not matter, and a
        missing dead-letter topic is created. A running handler is interrupted as by its `time_limit`. If it has not
        returned after 5 s, it is abandoned, and its key waits for it.

        Args:
            topic: the topic, or the retry topic.
            partition: a partition of this member.
            offset: the blocking offset, as `explain` shows it.
            timeout: seconds to wait until the dead letter is written.

        Returns:
            The dead-letter topic of the message.

        Raises:
            NotGivenUpError: the message was not given up, or is not written yet; the text says where it is.
            ConfigurationError: the app has no handler.
            MissingRightError: the dead-letter topic may not be created or written to.
        """
        return self._require_consumer(topic).give_up(topic, partition, offset, timeout)

    def _require_consumer(self, topic: str) -> LitePushConsumer:
        if self._consumer is None:
            raise ConfigurationError(f"topic {topic} has no handler in this app; it has sinks only")
        return self._consumer

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Stop with a drain at the first signal, at once at the second; the third interrupts what hangs in the stop."""
        if self._stop_requests.add(number, time.monotonic()):
            self._stop_requested.set()
            self._request_stop(now=self._stop_requests.count > 1)
            if self._stop_requests.count > 2:  # noqa: PLR2004 - the third
                raise KeyboardInterrupt

    def _request_stop(self, *, now: bool) -> None:
        for part in (self._consumer, self._sinks):
            if part is not None:
                part.request_stop(now=now)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the app has ended or a stop was requested; return whether that happened.

        Args:
            timeout: seconds; default: no limit.

        Raises:
            PenstockError: the error that stopped the app.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            # Read first: a query that ends after this is found with its failure in the next turn.
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
        """Drain, commit, leave the group, and end the sinks after their batches.

        Args:
            timeout: seconds for the drain and the batches; default: the app's `stop_timeout`.

        Returns:
            Whether all fetched messages are done and no batch was interrupted.

        Raises:
            PenstockError: the error that had stopped the consumer.
            ConfigurationError: a handler called this method.
        """
        if self._consumer is not None:
            self._consumer.refuse_own_threads()
        self._stop_requested.set()
        begun = time.monotonic()
        drained = finished = True
        # Ends them in reverse order, each one whatever the others raise.
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
                # In parallel to the drain: neither waits for the other.
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
    """Start an app, run it until a signal or its end, and stop it. For the main thread.

    Raises:
        PenstockError: the error that stopped the app, and the errors of `start`.
        StoppedError: fetched messages were not done in time, or a second signal did not wait for them.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("App.run() hears signals, so it needs the main thread; use App.start() elsewhere")
    early: list[int] = []
    requests = StopRequests()

    def on_early_signal(number: int, _frame: FrameType | None) -> None:
        if requests.add(number, time.monotonic()):
            early.append(number)
            if requests.count > 1:  # a lifespan may hang
                raise KeyboardInterrupt

    # Before the start, which may take seconds: a signal during it must not end the process silently.
    former = {number: signal.signal(number, on_early_signal) for number in _STOP_SIGNALS}
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
