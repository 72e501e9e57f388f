"""A store outside Kafka, as producers and its coordinator see it: what is the same in a database and in files."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from penstock import clients
from penstock.clients.bounded_calls import BriefQuestion
from penstock.errors import (
    DecisionNotStoredError,
    HalfNotStoredError,
    PenstockError,
    StoppedError,
    TransactionError,
    TransactionRefusedError,
)
from penstock.options import ClientConfig
from penstock.transactions.connections import cause_of
from penstock.transactions.core.decisions import not_cancelled, not_pending
from penstock.transactions.model import PendingTransaction
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.store import CheckSource, DecidedCallback, Prepared, PreparedCallback, SettledCallback
from penstock.transactions.stores.relay.changes import (
    ChangedCallback,
    Decide,
    GroupWriter,
    Outcome,
    Prepare,
    Result,
)
from penstock.transactions.stores.relay.shards import CheckTerms, StoreShards
from penstock.transactions.stores.target_topics import TargetTopics
from penstock.transactions.wire.check_request import CheckRequest
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict
from penstock.transactions.wire.topics import StoreTopics, require_prefix

_log = logging.getLogger("penstock.transactions")

#: Seconds that an error waits for the store to say more.
_MOMENT_S = 1.0


class StoreAdministration(Protocol):
    """What an operator may do on such a store, in the process of its coordinator. Safe from any thread."""

    def pending(self) -> Sequence[PendingTransaction]:
        """Return what is not settled, oldest first."""

    def oldest(self, most: int, shards: Collection[int]) -> Sequence[PendingTransaction]:
        """Return the oldest pending transactions of some shards, at most so many."""

    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None."""

    def decide(self, transaction_id: str, verdict: Verdict, actor: str, why: str) -> None:
        """Store an operator's decision, and write down who it was."""

    def resume(self, transaction_id: str, actor: str, why: str) -> object:
        """Bring a discarded transaction back, and write down who it was."""


class RelayedStore(ABC):
    """Halves and decisions outside Kafka; a relay publishes what commits. Thread-safe; starts are counted.

    Args:
        label: what it is called in messages.
        bootstrap_servers: Kafka's addresses.
        prefix: what the names of its topics begin with.
        own: how the names of its own topics go on, up to what tells it from other stores.
        config: settings of the Kafka clients.
        answer_s: seconds after which a decision that is waited for, and is not durable, counts as not stored.
    """

    #: Errors of the store that pass: it is tried again after them.
    transient_errors: tuple[type[Exception], ...] = ()
    #: Whether a half may be stored though that failed: then it is rolled back.
    may_be_stored = False

    def __init__(
        self, label: str, *, bootstrap_servers: str, prefix: str, own: str, config: ClientConfig | None, answer_s: float
    ) -> None:
        require_prefix(prefix, f"{own}{'0' * 36}.done")
        self.label = label
        self.bootstrap_servers = bootstrap_servers
        self.prefix = prefix
        self.config: ClientConfig = config or {}
        self.topics = StoreTopics(prefix)
        self._own_topics = prefix + own
        self._answer_s = answer_s
        admin = clients.admin(bootstrap_servers, self.config)
        #: Raises unless a message can be published to a topic: `TargetTopics.require`.
        self.require_target = TargetTopics(admin, bootstrap_servers, self.config, self.may_publish_to).require
        self._ration = RationedLog()
        self._question = BriefQuestion(f"look into {label}")
        # Guards starting and stopping; `_writer` is read without it.
        self._start_lock = threading.Lock()
        self._starts = 0
        self._pid = 0
        self._writer: GroupWriter | None = None

    @abstractmethod
    def _open(self) -> GroupWriter:
        """Open what was closed, and return what writes to it, not started."""

    @abstractmethod
    def _close(self, *, has_ended: bool) -> None:
        """Close it; `has_ended` tells whether the writer has."""

    @abstractmethod
    def checks(self, group: str) -> CheckSource:
        """Return the checks of a producer group."""

    @abstractmethod
    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled."""

    @abstractmethod
    def forget(self, transaction_id: str) -> None:
        """Give a watch up."""

    @abstractmethod
    def administration(self) -> StoreAdministration:
        """Return what an operator may do, once it was started."""

    @abstractmethod
    def open_shards(self, checks: CheckTerms, wake: Callable[[], object]) -> StoreShards:
        """Return its shards, for one coordinator, once it was started; `wake` is called by any thread."""

    def may_publish_to(self, topic: str) -> bool:
        """Tell whether a message may name a topic as its target."""
        return self.topics.may_publish_to(topic) and not topic.startswith(self._own_topics)

    def start(self) -> None:
        """Open it; a start more is counted."""
        with self._start_lock:
            if self._starts == 0:
                writer = self._open()
                writer.start()
                self._writer, self._pid = writer, os.getpid()
            self._starts += 1

    def stop(self, timeout_s: float) -> None:
        """Give one start back; the last one writes what has come, at most `timeout_s` seconds, and closes it."""
        with self._start_lock:
            self._starts = max(0, self._starts - 1)
            writer = self._writer
            if self._starts or writer is None:
                return
            self._writer = None
            self._close(has_ended=writer.stop(timeout_s))

    def stopped(self) -> StoppedError | None:
        """Return why it cannot be used in this process, or None."""
        if self._writer is None:
            return StoppedError(f"{self.label} is not started, or was stopped")
        if self._pid != os.getpid():
            return StoppedError(
                f"{self.label} belongs to process {self._pid}, from which this one was forked: its threads and "
                "connections are not here; make a store in this process"
            )
        return None

    def prepare(self, halves: Sequence[Half], callback: PreparedCallback, ordering_key: bytes | None = None) -> None:
        """Store the halves of one transaction, all or none, and call back once they are durable."""
        change = Prepare(tuple(halves), int(time.time() * 1000), ordering_key)

        def changed(result: Result) -> None:
            why = result if isinstance(result, Exception) else result.refused
            if why is None:
                callback(change)
                return
            first = change.halves[0]
            if self.may_be_stored and isinstance(why, Exception):
                self.decide(change, Verdict.ROLLBACK, lambda _: None)
            error = HalfNotStoredError(
                f"transaction {first.transaction_id} for {first.topic}: its half is not known to be stored in "
                f"{self.label}: {_said(why)}; the local transaction did not run, send it again"
            )
            error.__cause__ = why if isinstance(why, Exception) else None
            callback(error)

        self._submit(change, changed)

    def decide(self, prepared: Prepared, verdict: Verdict, callback: DecidedCallback) -> None:
        """Store the producer's decision, and call back once it is durable. The first one stands."""
        half = prepared.halves[0]
        self.submit(decision(half.transaction_id, half.group, verdict, Author.PRODUCER), callback)

    def answer(self, request: CheckRequest, verdict: Verdict, author: Author) -> None:
        """Store the answer to a check and return once it is durable, or raise `DecisionNotStoredError`."""
        half = request.half
        # An answer that came second is counted as refused, and nothing is wrong with it.
        with contextlib.suppress(TransactionRefusedError):
            self.await_decision(decision(half.transaction_id, half.group, verdict, author, request.check_number))

    def cancel(self, transaction_id: str, group: str, wait_s: float) -> None:  # noqa: ARG002 - nobody is waited for
        """Take a committed message back that is not due yet, by the store's clock; see `Store.cancel`."""
        change = decision(transaction_id, group, Verdict.ROLLBACK, Author.PRODUCER)._replace(cancels=True)
        outcome = self._await(change)
        if outcome.refused is not None and not outcome.is_known:
            raise not_pending(transaction_id, group)
        if outcome.refused is not None and outcome.stands is not Verdict.ROLLBACK:
            raise not_cancelled(transaction_id, outcome.stands)

    def submit(self, change: Decide, callback: DecidedCallback) -> None:
        """Store anybody's decision, or that a check was answered UNKNOWN, and call back once it is durable."""

        def changed(result: Result) -> None:
            if isinstance(result, Exception):
                callback(self._not_stored(change, result))
            else:
                callback(self._refusal(change, result))

        self._submit(change, changed)

    def await_decision(self, change: Decide) -> None:
        """Store a decision and return once it is durable, or raise what `submit` calls back with."""
        refusal = self._refusal(change, self._await(change))
        if refusal is not None:
            raise refusal

    def waits_for(self, transaction_id: str, topics: Sequence[str]) -> str:  # noqa: ARG002 - the store itself knows
        """Say what a committed transaction waits for; see `Store.waits_for`."""
        no_answer: tuple[type[Exception], ...] = (PenstockError, *self.transient_errors)
        try:
            shown = self._question.ask(partial(self.administration().show, transaction_id), _MOMENT_S)
        except no_answer:
            return ""
        return "" if shown is None else shown.waits_for

    def _submit(self, change: object, changed: ChangedCallback) -> None:
        writer, stopped = self._writer, self.stopped()
        if writer is None or stopped is not None:
            changed(stopped)
        else:
            writer.submit(change, changed)

    def _await(self, change: Decide) -> Outcome:
        results: SimpleQueue[Result] = SimpleQueue()
        self._submit(change, results.put)
        try:
            result = results.get(timeout=self._answer_s)
        except Empty:
            result = TimeoutError(f"it was not answered within {self._answer_s:g} s")
        if isinstance(result, Exception):
            raise self._not_stored(change, result)
        return result

    def _not_stored(self, change: Decide, why: Exception) -> TransactionError:
        what = f"transaction {change.transaction_id}: its {change.verdict.name}"
        error = DecisionNotStoredError(f"{what} is not known to be stored in {self.label}: {_said(why)}")
        error.__cause__ = why
        return error

    def _refusal(self, change: Decide, outcome: Outcome) -> TransactionRefusedError | None:
        """Return what stands against a decision; one that says the same and came first does no harm."""
        if outcome.refused is None:
            return None
        name, verdict, why = change.transaction_id, change.verdict.name, outcome.refused
        if self._ration.is_due("refused"):
            _log.warning("transaction %s: its %s was refused: %s", name, verdict, why)
        if outcome.stands is change.verdict:
            return None
        return TransactionRefusedError(f"transaction {name}: its {verdict} was refused: {why}")


def decision(transaction_id: str, group: str | None, verdict: Verdict, author: Author, check_number: int = 0) -> Decide:
    """Return a decision that is made now."""
    return Decide(transaction_id, group, verdict, author, check_number, int(time.time() * 1000))


def _said(why: Exception | str) -> object:
    """Return what an error says, without statements and parameters of a database."""
    return why if isinstance(why, str | PenstockError) else cause_of(why)
