"""What the coordinators of all stores have in common: their options, what they count and show, and their life.

A coordinator has one thread, which does all round by round until it is stopped, or dies of an error that does not pass.
What a round does is the store's.
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
from penstock.options import ClientConfig, a_telemetry, positive, seconds
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
#: Of the time that a stop has, the part in which what is under way may end; and most seconds for it.
_FINISH_PART = 0.6
_MAX_FINISH_S = 20.0
#: What only a store in Kafka can tell: others write its topics, and topics have retentions.
_OF_TOPICS = {"forged": None, "lost": None}
# A member of an enumeration is slow to look up, and this is the way of every transaction.
_COMMIT, _DISCARD = Verdict.COMMIT, Verdict.DISCARD


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """What every coordinator is given, whatever its store. Names, units and meaning are those of `Coordinator`.

    Raises:
        ConfigurationError: one of them is wrong.
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
        positive("transaction_timeout", self.transaction_timeout)
        positive("check_interval", self.check_interval)
        seconds("check_timeout", self.check_timeout)
        seconds("publish_timeout", self.publish_timeout)
        positive("session_timeout", self.session_timeout)
        require_checks(self.check_max, self.check_backoff)
        require_discard(self.discard)
        a_telemetry(self.telemetry)

    @property
    def policy(self) -> CheckPolicy:
        """When the producers of a transaction are asked about it, and how often."""
        return CheckPolicy(self.transaction_timeout, self.check_interval, self.check_max, self.check_backoff)


@dataclass(slots=True)
class Counts:
    """Counts since the start, with names of `CoordinatorStatistics`. Each is written by one thread, and read by any.

    A store in Kafka holds the lock while settled transactions are counted and leave what is pending; `statistics` does
    while it reads, so that none is in both or in neither. Whoever holds it waits for nobody.
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
    #: The call into the Kafka client that has not gone on for longest, and its age.
    slow_call: str = ""
    slow_call_s: float = 0.0
    #: By `FINISH_BUCKETS_S`, with one more for what took longer; and their sum.
    finish_times: list[int] = field(default_factory=lambda: [0] * (len(FINISH_BUCKETS_S) + 1))
    finish_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def settled(self, verdict: Verdict | None, age_s: float) -> None:
        """Count a transaction that was settled, so long after its birth. One that nobody decided is rolled back."""
        if verdict is _COMMIT:
            age_s = max(0.0, age_s)
            self.finish_times[bisect_left(FINISH_BUCKETS_S, age_s)] += 1
            self.finish_seconds += age_s
            # Last: who reads it finds the time counted.
            self.committed += 1
        elif verdict is _DISCARD:
            self.discarded += 1
        else:
            self.rolled_back += 1

    def statistics(self, held: Callable[[], Mapping[str, Any]] = dict) -> CoordinatorStatistics:
        """Return the counts with what the store holds now, by the names there; what is not given is 0."""
        nothing = {"pending": 0, "oldest_pending_age": 0.0, "held": 0}
        with self.lock:
            now = held()
            counted = {count.name: getattr(self, count.name) for count in fields(self) if count.name != "lock"}
        return CoordinatorStatistics(**{**nothing, **counted, "finish_times": tuple(self.finish_times), **now})


class StoreCoordinator(ABC):
    """The life of one coordinator: started once, stopped once. Thread-safe. Subclasses are one for a kind of store.

    `label` is what it is called in messages; the others are those of `Coordinator`.
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
        # Set by whoever has something for the thread to do.
        self._wake = threading.Event()
        # Set by stop(), read by all threads.
        self._stopping = threading.Event()
        # Gives back what `_open` has opened, in so many seconds, once the thread has ended. Added under the lock.
        self._closers: list[Callable[[float], object]] = []
        # Monotonic second by which what is under way shall have ended; written before `_stopping` is set.
        self._finish_by = 0.0
        # Written by the thread when it dies of an error, read by stop() after joining it.
        self._failure: BaseException | None = None

    @abstractmethod
    def _open(self) -> None:
        """Open the store, create what is absent, and make all parts."""

    @abstractmethod
    def _begin(self) -> None:
        """Begin; the first thing that the thread does."""

    @abstractmethod
    def _round(self) -> None:
        """Do once what the thread does for ever."""

    @abstractmethod
    def _end(self) -> None:
        """Let what is under way end, as long as there is time, and give all up; the last thing that the thread does."""

    @abstractmethod
    def _held(self, *, own: bool) -> CoordinatorStatistics:
        """Return the counts and what the store holds; `own`: of what is this coordinator's alone. Any thread."""

    @abstractmethod
    def pending(self, most: int) -> Sequence[PendingTransaction]:
        """Return the oldest pending transactions of its part of the store, at most so many. Any thread."""

    def waits(self) -> list[str]:
        """Return in sentences what its pending transactions wait for besides their decisions. Any thread."""
        return list(self._rights.missing().values())

    def start(self) -> None:
        """Open the store, create what is absent, and begin to settle. Raises as `Coordinator.start`."""
        with self._start_lock:
            if self._stopping.is_set():
                raise StoppedError(f"{self._label} was stopped; make a new one")
            if self._thread is None:
                self._open()
                name = f"penstock-coordinator-{self._prefix}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """Finish the Kafka transactions under way, give up what is owned, and end. Raises as `Coordinator.stop`."""
        if not self._stopping.is_set():
            self._finish_by = time.monotonic() + min(_FINISH_PART * timeout, _MAX_FINISH_S)
        self._stopping.set()
        self._wake.set()
        # A start under way is waited for: it may start a thread after all, which ends at once.
        has_started = self._start_lock.acquire(timeout=timeout)
        if has_started:
            self._start_lock.release()
        if not has_started or not self.wait(timeout):
            raise StoppedError(f"{self._label} did not end within {timeout:g} s; it goes on ending")
        while self._closers:
            self._closers.pop()(timeout)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise StoppedError(f"{self._label} had stopped by itself: {failure}") from failure

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds, and tell whether it has."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def statistics(self, *, own: bool = False) -> CoordinatorStatistics:
        """Return counts since the start, and what the store holds now; `own`: in this coordinator's part of it."""
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
            # Of its own part: the metrics of several coordinators add up to the store. On the metric readers' threads.
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
                self._round()
        except:  # noqa: E722 - see `raised`; kept for stop(), which raises it
            # Bad input never comes here: this is a mistake of penstock, or what does not pass.
            self._failure = raised()
            _log.error("%s stops", self._label, exc_info=self._failure)
        finally:
            self._stopping.set()
            if observed is not None:
                observed.close()
            self._discarding.close()
            self._end_all()

    def _end_all(self) -> None:
        try:
            self._end()
        except:  # noqa: E722 - see `raised`; what ended it before counts more
            self._failure = self._failure or raised()
            _log.error("%s did not end well", self._label, exc_info=raised())
