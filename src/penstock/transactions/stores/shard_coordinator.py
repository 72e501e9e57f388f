"""The coordinator of stores outside Kafka: it renews shard leases, sends checks and drives one relay per shard.

`StoreShards` hides what differs between the stores: the owned shards, their decided messages and their due checks. The
coordinator's thread only talks to the store. A relay publishes its shard on threads of its own. So leases are renewed
and checks are sent even when Kafka hangs. After a transient error of the store, the other parts of the round continue:
only a row that this part needs may be locked.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from penstock import clients
from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.rights import Operation
from penstock.clients.topics import TopicSpec, ensure_topics, single_copies
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.errors import TransactionError
from penstock.transactions.connections import cause_of
from penstock.transactions.core.discard import Exhausted
from penstock.transactions.model import CoordinatorStatistics, PendingTransaction
from penstock.transactions.publishing.publisher import PublishingClients
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.stores.relay import Relay
from penstock.transactions.stores.relayed_store import RelayedStore, decision
from penstock.transactions.stores.shards import CheckTerms, DueCheck, StoreShards
from penstock.transactions.stores.store_coordinator import CoordinatorOptions, Counts, StoreCoordinator
from penstock.transactions.wire.ops import Author, Verdict
from penstock.transactions.wire.topics import KEPT, ROOM

_log = logging.getLogger("penstock.transactions")
#: Seconds between two trims of the done logs.
_TRIM_INTERVAL_S = 5.0
#: Seconds to wait after a transient error of the store.
_RETRY_DELAY_S = 0.5
#: Least seconds between two rounds while a part waits for its next try, if nothing wakes the thread.
_RETRY_POLL_S = 0.1


def _log_failure(error: TransactionError | None) -> None:
    if error is not None:
        # The transaction is due again after the check interval.
        _log.warning("%s", error)


class ShardCoordinator(StoreCoordinator):
    """Publishes decided transactions of a store and checks undecided ones. Starts and stops the store. Thread-safe."""

    def __init__(self, store: RelayedStore, options: CoordinatorOptions) -> None:
        label = f"the coordinator of {store.label}"
        super().__init__(label, store.prefix, MissingRights(store.config), LeftBehind(label), options)
        self._store = store
        self._terms = CheckTerms(options.policy, options.session_timeout)
        # Made by start(), before the thread.
        self._shards: StoreShards
        self._clients: PublishingClients
        self._ration = RationedLog()
        # Used by the coordinator's thread only: relays by shard, the slow call last noted per shard, and the counts of
        # closed relays.
        self._relays: dict[int, Relay] = {}
        self._slow_calls: dict[int, str] = {}
        # By part of the round that failed: the monotonic second of its next try.
        self._retry_at: dict[str, float] = {}
        self._former_groups = self._former_recoveries = 0
        self._trim_at = time.monotonic() + _TRIM_INTERVAL_S

    def _open(self) -> None:
        with ExitStack() as undo:
            self._store.start()
            undo.callback(self._store.stop, 1.0)
            self._shards = self._store.open_shards(self._terms, self._wake.set)
            undo.callback(self._shards.close)
            self._clients = self._create(self._shards)
            undo.pop_all()
        self._closers.append(self._store.stop)

    def _create(self, shards: StoreShards) -> PublishingClients:
        """Create missing topics and return the clients' settings."""
        store = self._store
        servers, config, prefix = store.bootstrap_servers, store.config, store.prefix
        done, discarded = f"{shards.name}.done", f"{prefix}.discarded"
        admin = clients.admin(servers, config)
        ensure_topics(
            admin,
            [TopicSpec(done, shards.count, KEPT), TopicSpec(discarded, shards.count, KEPT | ROOM)],
            needs={done: (Operation.READ, Operation.WRITE, Operation.DELETE), discarded: (Operation.WRITE,)},
            of_store=True,
        )
        for found in single_copies(admin, (done, discarded)):
            _log.warning("%s", found)
        return self._publishing_clients(servers, config, admin, (done, discarded), shards.name)

    def pending(self, most: int) -> Sequence[PendingTransaction]:
        """Return up to `most` of the oldest pending transactions of its shards; none before start() and after stop().

        Any thread. Raises the store's error if the store cannot be read now.
        """
        if self._thread is None or self._stopping.is_set():
            return []
        return self._store.administration().oldest(most, list(self._shards.owned))

    def _held(self, *, own: bool) -> CoordinatorStatistics:
        if self._thread is None:
            return Counts().statistics()
        # list() of a dict is atomic under the interpreter lock: the coordinator's thread cannot change it meanwhile.
        return self._shards.statistics(list(self._shards.owned) if own else None)

    def _round(self) -> None:
        shards = self._shards
        try:
            busy = self._work(shards)
        except self._store.transient_errors as error:
            self._ration.warn("store", "%s lost its store: %s; trying again", self._label, cause_of(error))
            self._stopping.wait(_RETRY_DELAY_S)
        else:
            relays = list(self._relays.values())
            wait_s = shards.wait_s(takes_more=any(relay.is_ready for relay in relays), busy=busy)
            if not busy and max(self._retry_at.values(), default=0.0) > time.monotonic():
                # What is due now may be what waits.
                wait_s = max(wait_s, _RETRY_POLL_S)
            self._wake.wait(min([wait_s, *(relay.wait_s() for relay in relays)]))
            self._wake.clear()

    def _work(self, shards: StoreShards) -> bool:
        """Do all that needs no waiting; return whether something was published or settled."""
        self._left.require_few()
        self._renew(shards)
        self._clients.targets.look_now_and_then(time.monotonic())
        self._attempt("checks", partial(self._check, shards))
        busy = False
        for number in sorted(shards.owned):
            if self._stopping.is_set():
                break
            # A renewal after a part that failed may show that a shard is lost.
            if number in shards.owned:
                busy |= bool(self._attempt(f"shard {number}", partial(self._publish, shards, number)))
        if time.monotonic() >= self._trim_at:
            self._trim_at = time.monotonic() + _TRIM_INTERVAL_S
            for relay in self._relays.values():
                relay.trim()
            self._attempt("the purge", shards.purge)
        for number, relay in self._relays.items():
            self._note_slow_call(shards, number, *relay.slow_call())
        self._count(shards.counts)
        return busy

    def _attempt(self, part: str, act: Callable[[], bool | None]) -> bool | None:
        """Do a part of the round. After a transient error it waits as long as it took, so that the others have time."""
        began = time.monotonic()
        if began < self._retry_at.get(part, 0.0):
            return None
        try:
            return act()
        except self._store.transient_errors as error:
            now = time.monotonic()
            self._retry_at[part] = now + max(_RETRY_DELAY_S, now - began)
            self._ration.warn(part, "%s: %s failed: %s; trying again", self._label, part, cause_of(error))
            # All parts of a round may take longer than the leases last.
            self._renew(self._shards)
            return None

    def _renew(self, shards: StoreShards) -> None:
        """Renew the leases if they are due, and drop the relays of lost shards."""
        shards.renew()
        for number in [number for number in self._relays if number not in shards.owned]:
            self._drop(number)

    def _check(self, shards: StoreShards) -> None:
        """Send due checks; hand transactions with exhausted checks to the discard policy."""
        asked: list[DueCheck] = []
        for check in shards.due():
            if check.check_count < self._terms.policy.maximum:
                asked.append(check)
            else:
                half, settle = partial(shards.half, check), partial(self._settle, check)
                self._discarding.settle(Exhausted(check.transaction_id, check.group, check.check_count, half, settle))
        if not asked:
            return
        absent = shards.ask(asked)
        alone = Counter(check.group for check in asked if check.group in absent)
        shards.counts.checks += len(asked) - alone.total()
        shards.counts.no_producer += alone.total()
        for group, waiting in alone.items():
            if self._ration.is_due(group):
                _log.error(
                    "no producer of %s answers checks: %d transactions wait; start one with a check", group, waiting
                )

    def _settle(self, check: DueCheck, verdict: Verdict) -> None:
        change = decision(check.transaction_id, check.group, verdict, Author.COORDINATOR)
        self._store.submit(change, _log_failure)

    def _publish(self, shards: StoreShards, number: int) -> bool:
        """Let the relay of a shard publish; return whether there was something to do."""
        relay = self._relays.get(number)
        if relay is None:
            relay = Relay(shards.backlog(number), number, f"{shards.name}.{number}", self._clients)
            self._relays[number] = relay
        is_leaving = number in shards.leaving
        busy = relay.step(begins=not is_leaving)
        if relay.is_lost or (is_leaving and not relay.engine.is_busy):
            self._drop(number)
            shards.give_up(number)
        return busy

    def _drop(self, number: int) -> None:
        relay = self._relays.pop(number)
        self._slow_calls.pop(number, None)
        relay.close()
        self._former_groups += relay.engine.groups
        self._former_recoveries += relay.engine.recoveries

    def _note_slow_call(self, shards: StoreShards, number: int, call: str, age_s: float) -> None:
        """Store the name of a shard's hung call if it has changed."""
        # The first call for a shard always stores it: a former owner may have left a name there.
        if self._slow_calls.get(number) == call:
            return
        try:
            shards.note_slow_call(number, call, age_s)
        except OSError as error:
            # Only operators read it, and the log and the statistics have it, too.
            _log.warning("`penstock tx ls` does not know that %s hangs: %s", call or "no call", error)
        self._slow_calls[number] = call

    def _count(self, counts: Counts) -> None:
        relays = list(self._relays.values())
        counts.partitions = 0 if self._stopping.is_set() else sum(relay.is_open for relay in relays)
        counts.groups = self._former_groups + sum(relay.engine.groups for relay in relays)
        counts.recoveries = self._former_recoveries + sum(relay.engine.recoveries for relay in relays)
        slow_calls = (relay.slow_call() for relay in relays)
        counts.slow_call, counts.slow_call_s = max(slow_calls, key=lambda call: call[1], default=("", 0.0))

    def _end(self) -> None:
        relays = list(self._relays.values())
        try:
            # After a failure of its own there is nothing to wait for.
            for relay in relays if self._failure is None else ():
                self._finish(relay)
        finally:
            for relay in relays:
                relay.close()
            self._count(self._shards.counts)
            self._leave()

    def _finish(self, relay: Relay) -> None:
        """Let the relay's open Kafka transaction end while there is time."""
        try:
            relay.finish(max(0.0, self._finish_by - time.monotonic()))
        except self._store.transient_errors as error:
            _log.warning("what was published could not be settled: %s; the done log has it", cause_of(error))

    def _leave(self) -> None:
        try:
            self._shards.close()
        except self._store.transient_errors as error:
            _log.warning("shards could not be given up: %s; others take them when their leases end", cause_of(error))
