"""The coordinator of stores that are not in Kafka: one thread, its lifecycle, its counts, and the relays it drives.

What differs between the stores is behind `StoreShards`: which shards are this coordinator's, what waits in each, which
checks are due. The thread speaks with the store alone. Each shard is published by threads of its relay, so that leases
are renewed and checks are sent whatever Kafka does. Where the store fails for a moment, all goes on where it was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from penstock import clients
from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.requests.topics import TopicSpec, ensure_topics, single_copies
from penstock.clients.rights import Operation, principal_of
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.pace import Pace
from penstock.errors import StoppedError, raised
from penstock.transactions.connections import cause_of
from penstock.transactions.core.discard import Discarding
from penstock.transactions.model import CoordinatorStatistics, PendingTransaction
from penstock.transactions.publishing.targets import cluster_targets
from penstock.transactions.stores.metrics import observe, publication_spans
from penstock.transactions.stores.options import CoordinatorOptions
from penstock.transactions.stores.relay.check_scheduler import CheckScheduler
from penstock.transactions.stores.relay.counts import Counts
from penstock.transactions.stores.relay.done_log import create_done_log
from penstock.transactions.stores.relay.relay import Relay, RelayClients
from penstock.transactions.stores.relay.shards import CheckTerms, StoreShards
from penstock.transactions.stores.relay.store import RelayedStore
from penstock.transactions.wire.topics import KEPT, ROOM

_log = logging.getLogger("penstock.transactions")

#: Seconds between two trims of the done logs.
_TRIM_S = 5.0
#: Seconds after an error of the store that may pass by itself.
_PAUSE_S = 0.5
#: Of the time that a stop has, the part in which what is under way may end; and most seconds for it.
_FINISH_PART = 0.6
_MOST_FINISH_S = 20.0


class RelayCoordinator:
    """Settles what was decided in a store, and asks about what was not; starts and stops the store. Thread-safe."""

    def __init__(self, store: RelayedStore, options: CoordinatorOptions) -> None:
        self._store = store
        self._label = f"the coordinator of {store.label}"
        self._discarding = Discarding(options.discard, options.check_timeout, store.prefix)
        self._terms = CheckTerms(options.policy, self._discarding, options.session_timeout)
        self._telemetry = options.telemetry
        self._left = LeftBehind(self._label)
        self._rights = MissingRights(store.config)
        self._pace = Pace(options.publish_timeout)
        # Made by start() under its lock.
        self._shards: StoreShards | None = None
        self._thread: threading.Thread | None = None
        # The thread's alone: by shard what publishes it, which call was written down as slow, counts of relays that are
        # gone.
        self._clients: RelayClients | None = None
        self._relays: dict[int, Relay] = {}
        self._slow_calls: dict[int, str] = {}
        self._former_groups = self._former_recoveries = 0
        self._trim_at = 0.0
        self._stopping = threading.Event()
        # Set by whoever has something for the thread to do.
        self._wake = threading.Event()
        # Monotonic second by which what is under way shall have ended; written before `_stopping` is set.
        self._finish_by = 0.0
        # Written by the thread when it dies of an error, read by stop() after joining it.
        self._failure: BaseException | None = None
        # Guards starting, stopping, and whether the store was given back.
        self._start_lock = threading.Lock()
        self._has_store = False

    def start(self) -> None:
        """Open the store, create what is absent in Kafka, and begin to settle. Raises as `Coordinator.start`."""
        with self._start_lock:
            if self._stopping.is_set():
                raise StoppedError(f"{self._label} was stopped; make a new one")
            if self._thread is None:
                self._store.start()
                try:
                    self._shards = shards = self._open()
                except BaseException:
                    self._store.stop(1.0)
                    raise
                self._has_store = True
                name = f"penstock-coordinator-{self._store.prefix}"
                self._thread = threading.Thread(target=self._run, args=(shards,), name=name, daemon=True)
                self._thread.start()

    def _open(self) -> StoreShards:
        store = self._store
        servers, config = store.bootstrap_servers, store.config
        shards = store.open_shards(self._terms, self._wake.set)
        try:
            done, discarded = f"{shards.name}.done", f"{store.prefix}.discarded"
            create_done_log(servers, config, done, shards.count)
            admin = clients.admin(servers, config)
            ensure_topics(
                admin,
                servers,
                [TopicSpec(discarded, shards.count, KEPT | ROOM)],
                needs={discarded: (Operation.WRITE,)},
                principal=principal_of(config),
                of_store=True,
            )
            for found in single_copies(admin, (done, discarded)):
                _log.warning("%s", found)
            self._clients = RelayClients(
                servers,
                config,
                done,
                self._rights,
                self._pace,
                cluster_targets(admin, servers, store.prefix, self._rights),
                self._left,
                self._wake.set,
                lambda: publication_spans(self._telemetry, store.prefix),
                discarded,
            )
        except BaseException:
            shards.close()
            raise
        return shards

    def stop(self, timeout: float = 30.0) -> None:
        """Finish the Kafka transactions under way, give the shards up, and end. Raises as `Coordinator.stop`."""
        if not self._stopping.is_set():
            self._finish_by = time.monotonic() + min(_FINISH_PART * timeout, _MOST_FINISH_S)
        self._stopping.set()
        self._wake.set()
        # A start under way is waited for: it may start a thread after all, which ends at once.
        has_started = self._start_lock.acquire(timeout=timeout)
        if has_started:
            self._start_lock.release()
        if not has_started or not self.wait(timeout):
            raise StoppedError(f"{self._label} did not end within {timeout:g} s; it goes on ending")
        with self._start_lock:
            has_store, self._has_store = self._has_store, False
        if has_store:
            self._store.stop(timeout)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise StoppedError(f"{self._label} had stopped by itself: {failure}") from failure

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds, and tell whether it has."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def statistics(self) -> CoordinatorStatistics:
        """Return counts since the start, and what the store holds now: all of its shards, whoever has them."""
        return self._statistics(own=False)

    def pending(self, most: int) -> Sequence[PendingTransaction]:
        """Return the oldest pending transactions of its shards, at most so many; none before the start and at the end.

        Safe from any thread. Raises what the store raises where it cannot be read now.
        """
        shards = self._shards
        if shards is None or self._stopping.is_set():
            return []
        return self._store.administration().oldest(most, list(shards.owned))

    def _statistics(self, *, own: bool) -> CoordinatorStatistics:
        shards = self._shards
        if shards is None:
            return Counts().statistics()
        # list() of a dict is one step under the interpreter lock: the coordinator's thread cannot change it midway.
        held = shards.statistics(list(shards.owned) if own else None)
        return replace(
            held,
            hung_checks=self._discarding.hung,
            left_behind=self._left.total,
            missing_rights=tuple(self._rights.missing().values()),
        )

    def _run(self, shards: StoreShards) -> None:
        observed = None
        try:
            # Of its own shards: what several coordinators show of themselves adds up to the store.
            observed = observe(self._telemetry, self._store.prefix, lambda: self._statistics(own=True))
            self._trim_at = time.monotonic() + _TRIM_S
            scheduler = CheckScheduler(shards, self._terms, self._store.submit)
            while not self._stopping.is_set():
                self._round(shards, scheduler)
            self._finish()
        except:  # noqa: E722 - see `raised`; kept for stop(), which raises it
            self._failure = raised()
            _log.error("%s stops", self._label, exc_info=self._failure)
        finally:
            self._stopping.set()
            if observed is not None:
                observed.close()
            self._end(shards)

    def _round(self, shards: StoreShards, scheduler: CheckScheduler) -> None:
        try:
            busy = self._work(shards, scheduler)
        except self._store.transient_errors as error:
            _log.warning("%s lost its store: %s; trying again", self._label, cause_of(error))
            self._stopping.wait(_PAUSE_S)
        else:
            relays = list(self._relays.values())
            wait_s = shards.wait_s(takes_more=any(relay.is_ready for relay in relays), busy=busy)
            self._wake.wait(min([wait_s, *(relay.wait_s() for relay in relays)]))
            self._wake.clear()

    def _work(self, shards: StoreShards, scheduler: CheckScheduler) -> bool:
        """Do all that can be done without waiting; tell whether something was published or settled."""
        self._left.require_few()
        shards.renew()
        for number in [number for number in self._relays if number not in shards.owned]:
            self._drop(number)
        self._discarding.tend()
        if self._clients is not None:
            self._clients.targets.look_now_and_then(time.monotonic())
        scheduler.round()
        busy = False
        for number in sorted(shards.owned):
            if self._stopping.is_set():
                break
            busy |= self._publish(shards, number)
        if time.monotonic() >= self._trim_at:
            self._trim_at = time.monotonic() + _TRIM_S
            if shards.is_durable():
                for relay in self._relays.values():
                    relay.trim()
            shards.purge()
        for number, relay in self._relays.items():
            self._note_slow_call(shards, number, *relay.slow_call())
        self._count(shards.counts)
        return busy

    def _publish(self, shards: StoreShards, number: int) -> bool:
        """Publish what can be published of a shard; tell whether there was something."""
        relay = self._relays.get(number) or self._relay(shards, number)
        is_leaving = number in shards.leaving
        busy = relay.step(takes=not is_leaving)
        if relay.is_lost or (is_leaving and not relay.engine.is_busy):
            self._drop(number)
            shards.give_up(number)
        return busy

    def _relay(self, shards: StoreShards, number: int) -> Relay:
        assert self._clients is not None  # noqa: S101 - made before the thread was started
        relay = self._relays[number] = Relay(shards.backlog(number), number, f"{shards.name}.{number}", self._clients)
        return relay

    def _drop(self, number: int) -> None:
        relay = self._relays.pop(number)
        self._slow_calls.pop(number, None)
        relay.close()
        self._former_groups += relay.engine.groups
        self._former_recoveries += relay.engine.recoveries

    def _note_slow_call(self, shards: StoreShards, number: int, call: str, age_s: float) -> None:
        """Write down which call of a shard has not gone on for long, where that has changed."""
        # Where nothing is known of it, a former owner may have left one.
        if self._slow_calls.get(number) == call:
            return
        try:
            shards.note_slow_call(number, call, age_s)
        except OSError as error:
            # It is for people who look; the log and the statistics have it, too.
            _log.warning("`penstock tx ls` does not know that %s hangs: %s", call or "no call", error)
        self._slow_calls[number] = call

    def _count(self, counts: Counts) -> None:
        relays = list(self._relays.values())
        counts.partitions = 0 if self._stopping.is_set() else sum(relay.is_open for relay in relays)
        counts.groups = self._former_groups + sum(relay.engine.groups for relay in relays)
        counts.recoveries = self._former_recoveries + sum(relay.engine.recoveries for relay in relays)
        slow_calls = (relay.slow_call() for relay in relays)
        counts.slow_call, counts.slow_call_s = max(slow_calls, key=lambda call: call[1], default=("", 0.0))

    def _finish(self) -> None:
        """Let what is under way end, as long as there is time."""
        for relay in self._relays.values():
            try:
                relay.finish(max(0.0, self._finish_by - time.monotonic()))
            except self._store.transient_errors as error:
                _log.warning("what was published could not be settled: %s; the done log has it", cause_of(error))

    def _end(self, shards: StoreShards) -> None:
        self._discarding.close()
        for relay in self._relays.values():
            relay.close()
        self._count(shards.counts)
        try:
            shards.close()
        except self._store.transient_errors as error:
            _log.warning("shards could not be given up: %s; others take them when their leases end", cause_of(error))
