"""The coordinator of a file store: one thread that settles what was decided and asks about what was not.

Publication is the relay's, on threads of its own. Settling is not waited for before more is published: until it is
durable here, the done log knows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.kafka import TopicSpec, admin_client, ensure_topics
from penstock.clients.rights import Operation, principal_of
from penstock.errors import ConfigurationError, StoppedError, raised
from penstock.transactions.coordinator.metrics import observe
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.store import CoordinatorOptions
from penstock.transactions.stores.file.asking import FileAsker
from penstock.transactions.stores.file.backlog import FileBacklog
from penstock.transactions.stores.file.journal import Outcome, Settle
from penstock.transactions.stores.file.opened import OpenStore
from penstock.transactions.stores.file.redo import NoRoomError
from penstock.transactions.stores.file.store import FileStore
from penstock.transactions.stores.relay.done_log import DoneLog, create_done_log
from penstock.transactions.stores.relay.outbound import Outbound
from penstock.transactions.stores.relay.relay import Relay
from penstock.transactions.writing.missing_rights import MissingRights

_log = logging.getLogger("penstock.transactions")

_LONGEST_WAIT_S = 1.0
_POLL_S = 0.1
#: Seconds between two looks at whether the done log can be trimmed.
_TEND_S = 5.0
#: Of the time that a stop has, the part in which what is under way may end; and most seconds for it.
_ENDING_PART = 0.6
_ENDING_S = 20.0
_KEPT = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "max.message.bytes": str(2 << 20),
}


class FileSettler:
    """Settles the transactions of one file store, in its process. Thread-safe.

    Args:
        store: the store; it is started and stopped with this.
        options: times, limits and policies.
    """

    def __init__(self, store: FileStore, options: CoordinatorOptions) -> None:
        self._store = store
        self._options = options
        self._admin = admin_client(store.bootstrap_servers, store.config)
        # Written by start() under its lock.
        self._done_topic = ""
        self._discarded = f"{store.prefix}.discarded"
        self._stopping = threading.Event()
        self._start_lock = threading.Lock()
        # Written by start() under its lock.
        self._thread: threading.Thread | None = None
        self._opened: OpenStore | None = None
        self._relay: Relay | None = None
        self._left = LeftBehind(f"the coordinator of {store.path}")
        self._rights = MissingRights(store.config)
        self._asker: FileAsker | None = None
        # Written by the thread when it dies of an error, read by stop() after joining it.
        self._failure: BaseException | None = None
        # Whether the relay has something to do. Guarded by the store's lock.
        self._news = False
        # Monotonic second by which what is under way shall have ended; written before `_stopping` is set.
        self._end_by = 0.0
        # Ids of published transactions that could not be settled for lack of room. Guarded by the store's lock.
        self._unsettled: list[str] = []
        self._settling = 0
        self._tended_at = 0.0
        # Set once the done log was asked; read by statistics().
        self._taken_over = False

    def start(self) -> Self:
        """Open the store, create the topics that are absent, and start settling. May be repeated.

        Raises:
            StoreInUseError: another process has the store.
            StoreDamagedError: what it had acknowledged is missing or does not read.
            BrokerConnectionError: no broker answered.
            ConfigurationError: the store has a coordinator already, or the client library refused a setting.
            StoppedError: it was stopped before.
        """
        with self._start_lock:
            if self._stopping.is_set():
                raise StoppedError(f"the coordinator of {self._store.path} was stopped; make a new one")
            if self._thread is None:
                self._store.start()
                try:
                    self._thread = self._open()
                except BaseException:
                    self._store.stop(1.0)
                    raise
                self._thread.start()
        return self

    def _open(self) -> threading.Thread:
        store, opened = self._store, self._store.opened
        name = f"{store.prefix}.file.{opened.journal.redo.store_id}"
        servers, config = store.bootstrap_servers, store.config
        self._done_topic = f"{name}.done"
        create_done_log(servers, config, self._done_topic, 1)
        ensure_topics(
            self._admin,
            servers,
            [TopicSpec(self._discarded, 1, _KEPT)],
            needs={self._discarded: (Operation.WRITE,)},
            principal=principal_of(config),
        )
        asker = FileAsker(store, opened, self._options)
        with opened.lock:
            if opened.plan is not None:
                raise ConfigurationError(f"the file store in {store.path} has a coordinator already; use that one")
            opened.plan = asker.plan
            opened.shelf.begin_anew(one for one in opened.kept.values() if not one.settled)
            for kept in opened.table.live():
                asker.plan(kept)

        def make(transactional_id: str, *, apart: bool) -> Outbound:
            done = DoneLog(servers, config, self._done_topic, 0, self._rights)
            return Outbound(
                servers, config, transactional_id=transactional_id, done=done, apart=apart, rights=self._rights
            )

        def wake() -> None:
            with opened.lock:
                self._news = True
                opened.lock.notify_all()

        backlog = FileBacklog(opened, self._discarded, lambda ids: self._settle(opened, ids))
        self._relay = Relay(backlog, name, make, self._left, wake, wants_visible=backlog.is_watched)
        self._asker, self._opened = asker, opened
        return threading.Thread(target=self._run, name=f"penstock-coordinator-{store.path.name}", daemon=True)

    def stop(self, timeout: float = 30.0) -> None:
        """Finish the Kafka transaction under way and end, within `timeout` seconds.

        Raises:
            StoppedError: it did not end in time, or had ended by itself; then the cause is chained.
        """
        with self._start_lock:
            first = not self._stopping.is_set()
            if first:
                self._end_by = time.monotonic() + min(_ENDING_PART * timeout, _ENDING_S)
            self._stopping.set()
            thread, opened = self._thread, self._opened
        if thread is None or opened is None:
            return
        with opened.lock:
            opened.lock.notify_all()
        thread.join(timeout)
        if thread.is_alive():
            raise StoppedError(f"the coordinator of {self._store.path} did not end within {timeout:g} s")
        if first or self._failure is not None:
            with opened.lock:
                opened.plan = None
            self._store.stop(timeout)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise StoppedError(f"the coordinator of {self._store.path} had stopped by itself: {failure}") from failure

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds, and tell whether it has."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        opened, relay, asker = self._parts()
        observed = None
        try:
            observed = observe(self._options.telemetry, self._store.prefix, self.statistics)
            while not self._stopping.is_set():
                self._left.require_few()
                relay.step()
                self._taken_over = self._taken_over or relay.is_open
                asker.round()
                self._tend(opened, relay)
                self._wait(opened, relay)
            self._finish(opened, relay)
        except:  # noqa: E722 - see `raised`; kept for stop(), which raises it
            self._failure = raised()
            _log.error("the coordinator of %s stops", self._store.path, exc_info=self._failure)
        finally:
            self._stopping.set()
            if observed is not None:
                observed.close()
            asker.close()
            relay.close(max(1.0, self._end_by - time.monotonic()))

    def _parts(self) -> tuple[OpenStore, Relay, FileAsker]:
        assert self._opened is not None  # noqa: S101 - start() set all three
        assert self._relay is not None  # noqa: S101 - the same
        assert self._asker is not None  # noqa: S101 - the same
        return self._opened, self._relay, self._asker

    def _finish(self, opened: OpenStore, relay: Relay) -> None:
        """Let what is under way end, as long as there is time."""
        relay.step(takes=False)
        while relay.is_busy and time.monotonic() < self._end_by:
            with opened.lock:
                if not self._news:
                    opened.lock.wait(_POLL_S)
                self._news = False
            relay.step(takes=False)

    def _settle(self, opened: OpenStore, ids: Sequence[str]) -> None:
        """Have published transactions settled here; what fails for lack of room is tried again."""
        with opened.lock:
            ids, self._unsettled = (*self._unsettled, *ids), []
            if not ids:
                return
            self._settling += 1

        def told(outcome: Outcome | Exception) -> None:
            with opened.lock:
                self._settling -= 1
                if isinstance(outcome, NoRoomError):
                    self._unsettled.extend(ids)

        opened.writer.submit(Settle(ids), told)

    def _tend(self, opened: OpenStore, relay: Relay) -> None:
        """Let the done log go as far as all it tells is durable here."""
        failure = opened.writer.failure
        if failure is not None:
            raise failure
        now = time.monotonic()
        if now - self._tended_at < _TEND_S:
            return
        self._tended_at = now
        self._settle(opened, ())
        with opened.lock:
            all_durable = not self._settling and not self._unsettled
        if all_durable:
            relay.forget()

    def _wait(self, opened: OpenStore, relay: Relay) -> None:
        wait = min(_LONGEST_WAIT_S, relay.wait_s())
        takes_more = not relay.has_main_busy
        with opened.lock:
            if takes_more:
                wait = min(wait, opened.shelf.wait_s(int(time.time() * 1000), wait))
            wait = min(wait, opened.table.next_due() - time.monotonic())
            if wait > 0 and not self._news and not self._stopping.is_set():
                opened.lock.wait(wait)
            self._news = False

    def statistics(self) -> CoordinatorStatistics:
        """Return counts since the store was opened and what is pending now. Safe from any thread."""
        opened, relay, asker = self._opened, self._relay, self._asker
        if opened is None or relay is None or asker is None:
            return CoordinatorStatistics(0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        with opened.lock:
            pending = [kept for kept in opened.kept.values() if not kept.settled]
            oldest = min((kept.birth_ms for kept in pending), default=None)
            counts = opened.counts
            return CoordinatorStatistics(
                partitions=int(self._taken_over and not self._stopping.is_set()),
                pending=len(pending),
                oldest_pending_age=0.0 if oldest is None else max(0.0, time.time() - oldest / 1000),
                held=opened.shelf.refused,
                committed=counts.committed,
                rolled_back=counts.rolled_back,
                discarded=counts.discarded,
                refused=counts.refused,
                forged=0,
                checks=counts.checks,
                answered_checks=counts.answered_checks,
                no_producer=counts.no_producer,
                groups=relay.groups,
                recoveries=relay.recoveries,
                held_by_key=opened.shelf.held_by_key,
                delayed=opened.shelf.delayed,
                hung_checks=asker.hung,
                finish_times=tuple(counts.finish_times),
                finish_seconds=counts.finish_seconds,
                left_behind=self._left.total,
                missing_rights=tuple(self._rights.told().values()),
            )


__all__ = ["FileSettler"]
