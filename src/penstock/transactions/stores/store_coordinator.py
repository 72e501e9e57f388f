"""The base of all coordinators: options, counts, metrics, start and stop.

A coordinator has one thread. It runs rounds until the coordinator is stopped, or until a permanent error ends it. Each
kind of store defines its own round.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.factory import AdminClient
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.settings import MOST_S, Pace
from penstock.errors import StoppedError, raised
from penstock.options import ClientConfig, a_telemetry, seconds
from penstock.transactions.core.check_plan import CheckPolicy, require_checks
from penstock.transactions.core.discard import Discarding, require_discard
from penstock.transactions.model import FINISH_BUCKETS_S, CoordinatorStatistics, PendingTransaction
from penstock.transactions.publishing.publisher import PublishingClients
from penstock.transactions.publishing.targets import cluster_targets
from penstock.transactions.wire.ops import Verdict

if TYPE_CHECKING:
    from penstock.telemetry import Telemetry
    from penstock.telemetry.observed import CoordinatorTelemetry
    from penstock.telemetry.sending import PublicationSpans
    from penstock.transactions.model import DiscardPolicy

_log = logging.getLogger("penstock.transactions")
#: The share of a stop's time limit in which open Kafka transactions may end, and its upper bound in seconds.
_FINISH_PART = 0.6
_MAX_FINISH_S = 20.0
#: Counts that only a store in Kafka has: its topics can be forged by other writers, and lose records to retention.
_OF_TOPICS = {"forged": None, "lost": None}
# Enum members are slow to look up, and this code runs for every transaction.
_COMMIT, _DISCARD = Verdict.COMMIT, Verdict.DISCARD


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """The options that all stores share, with names, units and meaning of `Coordinator`.

    Raises:
        ConfigurationError: an option is wrong.
    """

    transaction_timeout: float = 6.0
    check_interval: float = 30.0
    check_max: int = 15
    check_backoff: float = 1.0
    discard: DiscardPolicy = "topic"
    check_timeout: float = 30.0
    publish_timeout: float = MOST_S
    session_timeout: float = 10.0
    telemetry: Telemetry | None = None

    def __post_init__(self) -> None:
        seconds("transaction_timeout", self.transaction_timeout)
        seconds("check_interval", self.check_interval)
        seconds("check_timeout", self.check_timeout)
        seconds("publish_timeout", self.publish_timeout)
        seconds("session_timeout", self.session_timeout)
        require_checks(self.check_max, self.check_backoff)
        require_discard(self.discard)
        a_telemetry(self.telemetry)

    @property
    def policy(self) -> CheckPolicy:
        """When and how often an undecided transaction is checked."""
        return CheckPolicy(self.transaction_timeout, self.check_interval, self.check_max, self.check_backoff)


@dataclass(slots=True)
class Counts:
    """Counts since the start, named as in `CoordinatorStatistics`. One thread writes each count, any thread reads.

    A store in Kafka holds `lock` while it counts settled transactions and removes them from the pending ones.
    `statistics` holds it while it reads. So no transaction is in both or in neither. No holder waits for anything.
    """

    partitions: int = 0
    committed: int = 0
    rolled_back: int = 0
    discarded: int = 0
    refused: int = 0
    forged: int = 0
    checks: int = 0
    answered_checks: int = 0
    no_producer: int = 0
    groups: int = 0
    recoveries: int = 0
    lost: int = 0
    #: The call into the Kafka client that has hung longest, and its age.
    slow_call: str = ""
    slow_call_s: float = 0.0
    #: Commits per bucket of `FINISH_BUCKETS_S`, plus one bucket for longer times; and the sum of all times.
    finish_times: list[int] = field(default_factory=lambda: [0] * (len(FINISH_BUCKETS_S) + 1))
    finish_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def settled(self, verdict: Verdict | None, age_s: float) -> None:
        """Count a settled transaction; `age_s` is the time since its birth. No verdict counts as a rollback."""
        if verdict is _COMMIT:
            age_s = max(0.0, age_s)
            self.finish_times[bisect_left(FINISH_BUCKETS_S, age_s)] += 1
            self.finish_seconds += age_s
            # Last: a reader of this count then finds the time counted, too.
            self.committed += 1
        elif verdict is _DISCARD:
            self.discarded += 1
        else:
            self.rolled_back += 1

    def statistics(self, held: Callable[[], Mapping[str, Any]] = dict) -> CoordinatorStatistics:
        """Return the counts and the values of `held`, which is called under the lock; missing values are 0."""
        nothing = {"pending": 0, "oldest_pending_age": 0.0, "held": 0}
        with self.lock:
            now = held()
            counted = {count.name: getattr(self, count.name) for count in fields(self) if count.name != "lock"}
        return CoordinatorStatistics(**{**nothing, **counted, "finish_times": tuple(self.finish_times), **now})


class StoreCoordinator(ABC):
    """A coordinator's life: one start, one thread, one stop. Thread-safe. Each kind of store has a subclass.

    `label` is its name in log lines and errors.
    """

    #: Whether the store is in Kafka's topics.
    in_kafka: ClassVar[bool] = False

    def __init__(
        self, label: str, prefix: str, rights: MissingRights, left: LeftBehind, options: CoordinatorOptions
    ) -> None:
        self._label = label
        self._prefix = prefix
        self._options = options
        self._rights = rights
        self._left = left
        self._discarding = Discarding(options.discard, options.check_timeout, prefix)
        # Guards starting and stopping.
        self._start_lock = threading.Lock()
        # Written by start() under its lock.
        self._thread: threading.Thread | None = None
        # Set by any thread that has work for the coordinator's thread.
        self._wake = threading.Event()
        # Set by stop(), read by all threads.
        self._stopping = threading.Event()
        # Close what `_open` has opened, within the given seconds, after the thread has ended. Added under the lock.
        self._closers: list[Callable[[float], object]] = []
        # The monotonic second by which open Kafka transactions should have ended. Written before `_stopping` is set.
        self._finish_by = 0.0
        # Written by the thread when it dies of an error, read by stop() after joining it.
        self._failure: BaseException | None = None

    @abstractmethod
    def _open(self) -> None:
        """Open the store, create missing topics or tables, and make all parts."""

    def _begin(self) -> None:  # noqa: B027 - only a store in Kafka needs it
        """Start what only the thread can end. The thread calls it first."""

    @abstractmethod
    def _round(self) -> None:
        """Run one round: read, check, publish."""

    @abstractmethod
    def _end(self) -> None:
        """Let open Kafka transactions end while there is time, and release all. The thread calls it last."""

    @abstractmethod
    def _held(self, *, own: bool) -> CoordinatorStatistics:
        """Return the counts and the store's content; with `own`, only this coordinator's part. Any thread."""

    @abstractmethod
    def pending(self, most: int) -> Sequence[PendingTransaction]:
        """Return up to `most` of the oldest pending transactions of its part of the store. Any thread."""

    def waits(self) -> list[str]:
        """Return sentences that say what pending transactions wait for besides their decisions. Any thread."""
        return list(self._rights.missing().values())

    def start(self) -> None:
        """Open the store and start the thread. Raises the errors of `Coordinator.start`."""
        with self._start_lock:
            if self._stopping.is_set():
                raise StoppedError(f"{self._label} was stopped; make a new one")
            if self._thread is None:
                self._open()
                name = f"penstock-coordinator-{self._prefix}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:
                    # The process may start no more threads. It counts as not started, for start() and for stop().
                    self._thread = None
                    raise

    def stop(self, timeout: float = 30.0) -> None:
        """Finish open Kafka transactions, release all and end. Raises the errors of `Coordinator.stop`."""
        if not self._stopping.is_set():
            self._finish_by = time.monotonic() + min(_FINISH_PART * timeout, _MAX_FINISH_S)
        self._stopping.set()
        self._wake.set()
        # Wait for a concurrent start: it may still start the thread, which then ends at once.
        has_started = self._start_lock.acquire(timeout=timeout)
        if has_started:
            self._start_lock.release()
        if not has_started or not self.wait(timeout):
            raise StoppedError(f"{self._label} did not end within {timeout:g} s; it is still ending")
        while self._closers:
            self._closers.pop()(timeout)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise StoppedError(f"{self._label} had stopped by itself: {failure}") from failure

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds until the thread has ended; return whether it has."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def statistics(self, *, own: bool = False) -> CoordinatorStatistics:
        """Return the counts and the store's content; with `own`, only this coordinator's part. Any thread."""
        return replace(
            self._held(own=own),
            hung_checks=self._discarding.hung,
            left_behind=self._left.hanging,
            missing_rights=tuple(self._rights.missing().values()),
        )

    def _publishing_clients(
        self, servers: str, config: ClientConfig, admin: AdminClient, topics: tuple[str, str], ids_begin: str
    ) -> PublishingClients:
        """Return what the publishing engine needs; `topics` are the done log and the topic of discarded messages."""
        telemetry, prefix = self._options.telemetry, self._prefix

        def spans() -> PublicationSpans | None:
            if telemetry is None:
                return None
            from penstock.telemetry.sending import PublicationSpans

            return PublicationSpans(telemetry, prefix)

        pace, targets = Pace(self._options.publish_timeout), cluster_targets(admin, prefix, self._rights)
        return PublishingClients(
            servers, config, *topics, ids_begin, self._rights, pace, targets, self._left, spans, self._wake.set
        )

    def _observe(self, telemetry: Telemetry) -> CoordinatorTelemetry:
        """Show the metrics until the result is closed."""
        from penstock.telemetry.observed import CoordinatorTelemetry

        def shown() -> SimpleNamespace:
            # Only its own part: then the metrics of several coordinators add up. Runs on the metric readers' threads.
            now = self.statistics(own=True)
            counts: dict[str, Any] = {count.name: getattr(now, count.name) for count in fields(now)}
            return SimpleNamespace(**counts | ({} if self.in_kafka else _OF_TOPICS), finish_bounds=FINISH_BUCKETS_S)

        return CoordinatorTelemetry(telemetry, self._prefix, shown)

    def _run(self) -> None:
        observed, telemetry = None, self._options.telemetry
        try:
            observed = None if telemetry is None else self._observe(telemetry)
            self._begin()
            while not self._stopping.is_set():
                self._discarding.tend()
                self._round()
        except:  # noqa: E722 - see `raised`; kept for stop(), which raises it
            # Bad input never comes here: this is a bug of penstock, or a permanent error.
            self._failure = raised()
            _log.error("%s stops", self._label, exc_info=self._failure)
        finally:
            self._stopping.set()
            if observed is not None:
                observed.close()
            self._discarding.close()
            try:
                self._end()
            except:  # noqa: E722 - see `raised`; an earlier failure is reported instead of this one
                self._failure = self._failure or raised()
                _log.error("%s did not end well", self._label, exc_info=raised())
