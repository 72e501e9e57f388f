"""The base of the stores outside Kafka (database, files): group commit of changes by one writer thread.

Producers, checks, the discard policy and operators submit changes. While the writer thread writes one batch, the next
batch collects. So there are few writes under load, and short waits without load.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from penstock import clients
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
from penstock.transactions.operator.administration import StoreAdministration
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.store import DecidedCallback, Prepared, PreparedCallback, Store
from penstock.transactions.stores.shards import CheckTerms, StoreShards
from penstock.transactions.stores.target_topics import TargetTopics
from penstock.transactions.wire.half import CheckRequest, Half
from penstock.transactions.wire.ops import Author, Verdict
from penstock.transactions.wire.topics import StoreTopics, require_prefix

_log = logging.getLogger("penstock.transactions")

#: Changes in one batch, and bytes of their halves.
_BATCH = 2_000
_BATCH_BYTES = 4 << 20
#: Approximate bytes of a change besides its payload.
_OVERHEAD_BYTES = 200


class Prepare(NamedTuple):
    """The change that stores the halves of a transaction."""

    halves: tuple[Half, ...]
    #: By this machine's clock. A database uses its own clock instead.
    birth_ms: int
    #: Chooses the shard. If None, the first half's key does, or else the transaction id.
    ordering_key: bytes | None = None

    def __repr__(self) -> str:
        """Name the transaction, never a key."""
        return f"<Prepare {self.halves[0].transaction_id}>"


class Decide(NamedTuple):
    """The change that decides a transaction, or counts an answered check (verdict UNKNOWN)."""

    transaction_id: str
    #: The producer group of the transaction; None accepts any group.
    group: str | None
    verdict: Verdict
    author: Author
    #: The number of the answered check; 0 if this is no answer.
    check_number: int
    now_ms: int
    #: The name of the operator, if a person decided.
    actor: str = ""
    #: Whether it only cancels: it takes back a committed transaction that is not due yet, and decides nothing else.
    cancels: bool = False


@dataclass(slots=True)
class Outcome:
    """The result of a durable change.

    Attributes:
        refused: the reason why the change does not count, or None if it counts.
        stands: the earlier decision that prevails, if it is known.
        is_known: whether the store has such a transaction of that group.
    """

    refused: str | None = None
    stands: Verdict | None = None
    is_known: bool = True


#: The result of a change, or the error after which it is unknown whether the change is stored.
Result = Outcome | Exception
ChangedCallback = Callable[[Any], None]
#: Makes changes durable (all or each separately) and returns their results. It never raises.
Write = Callable[[Sequence[Any]], Sequence[Result]]

#: The reason why a DISCARD of a committed transaction is refused.
NOT_HELD = (
    "COMMIT was decided before, and its messages are not held, or are being published now; only messages that Kafka "
    "refuses can be discarded: look at what they wait for, and try again"
)
#: The reason why a decision on an unknown transaction is refused.
UNKNOWN_ID = "the store has no such transaction of that group; it never existed, or was settled long ago"


def came_first(verdict: Verdict) -> str:
    """Return the reason why a decision is refused: an earlier decision prevails."""
    return f"{verdict.name} was decided before, and the first decision stands"


class GroupWriter:
    """Writes submitted changes in order, on one thread. Thread-safe; callbacks may submit, too."""

    def __init__(self, write: Write, label: str, name: str, most: int = _BATCH) -> None:
        self._write = write
        self._label = label
        self._most = most
        self._thread = threading.Thread(target=self._run, name=f"penstock-writer-{name}", daemon=True)
        # Guards the fields below; the writer waits on `_more`.
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)
        self._waiting: deque[tuple[Any, ChangedCallback]] = deque()
        self._stopping = False
        #: Set by stop() at its time limit: changes that are not written by then are refused.
        self.is_late = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write the submitted changes for at most `timeout_s` seconds, refuse the rest; return if the thread ended."""
        with self._lock:
            self._stopping = True
            self._more.notify_all()
        self._thread.join(timeout_s)
        self.is_late = True
        return not self._thread.is_alive()

    def submit(self, change: Any, callback: ChangedCallback) -> None:
        """Queue a change. The callback runs once: on the writer thread, or at once if the writer was stopped.

        Never waits: the producer's in-flight limits bound the queue.
        """
        with self._lock:
            is_taken = not self._stopping
            if is_taken:
                self._waiting.append((change, callback))
                self._more.notify()
        if not is_taken:
            callback(self.refusal())

    def refusal(self) -> StoppedError:
        """Return the error for changes after the stop."""
        return StoppedError(f"{self._label} was stopped")

    def _run(self) -> None:
        while batch := self._take():
            changes = [change for change, _ in batch]
            results = [self.refusal()] * len(batch) if self.is_late else self._write(changes)
            for (_, callback), result in zip(batch, results, strict=True):
                try:
                    callback(result)
                except Exception:  # noqa: BLE001 - a failing callback must not keep the other callbacks waiting
                    _log.exception("a change of %s could not be completed; this is an error in penstock", self._label)

    def _take(self) -> list[tuple[Any, ChangedCallback]]:
        with self._lock:
            while not self._waiting and not self._stopping:
                self._more.wait()
            batch: list[tuple[Any, ChangedCallback]] = []
            size = 0
            while self._waiting and len(batch) < self._most and (not batch or size < _BATCH_BYTES):
                batch.append(self._waiting.popleft())
                size += _size_of(batch[-1][0])
            return batch


def _size_of(change: Any) -> int:
    if not isinstance(change, Prepare):
        return _OVERHEAD_BYTES
    return _OVERHEAD_BYTES + sum(len(half.key or b"") + len(half.value or b"") for half in change.halves)


class RelayedStore(Store, ABC):
    """A store of halves and decisions outside Kafka. A relay publishes its committed messages. Thread-safe.

    Starts are counted.

    Args:
        label: its name in log lines and errors.
        bootstrap_servers: Kafka's addresses.
        prefix: the prefix of its topic names.
        own: the part of its own topics' names after the prefix, which other kinds of stores do not use.
        config: settings of the Kafka clients.
        answer_s: seconds to wait until a decision is durable; after that it counts as not stored.
    """

    #: Errors of the store that pass by themselves: the coordinator tries again.
    transient_errors: tuple[type[Exception], ...] = ()
    #: Whether a half may be stored although the write failed. Then it is rolled back.
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
        self._targets = TargetTopics(admin, self.may_publish_to)
        self._ration = RationedLog()
        # Guards starting and stopping. `_writer` is read without it.
        self._start_lock = threading.Lock()
        self._starts = 0
        self._pid = 0
        self._writer: GroupWriter | None = None

    @abstractmethod
    def _open(self) -> GroupWriter:
        """Open the store and return its writer, which is not started yet."""

    @abstractmethod
    def _close(self, *, has_ended: bool) -> None:
        """Close the store. `has_ended`: whether the writer thread has ended."""

    @abstractmethod
    def administration(self) -> StoreAdministration:
        """Return the operator's view of the store. The store must have been started."""

    @abstractmethod
    def open_shards(self, checks: CheckTerms, wake: Callable[[], object]) -> StoreShards:
        """Return the shards for one coordinator. The store must be started; any thread may call `wake`."""

    def may_publish_to(self, topic: str) -> bool:
        """Return whether a message may have this topic as its target."""
        return self.topics.may_publish_to(topic) and not topic.startswith(self._own_topics)

    def require_target(self, topic: str, partition: int | None) -> None:
        """Raise an error unless a message can be published to the topic; see `TargetTopics.require`."""
        self._targets.require(topic, partition)

    def start(self) -> None:
        """Open the store; later starts are only counted."""
        with self._start_lock:
            if self._starts == 0:
                writer = self._open()
                writer.start()
                self._writer, self._pid = writer, os.getpid()
            self._starts += 1

    def stop(self, timeout_s: float) -> None:
        """Take one start back. The last stop writes the submitted changes for `timeout_s` at most, and closes."""
        with self._start_lock:
            self._starts = max(0, self._starts - 1)
            writer = self._writer
            if self._starts or writer is None:
                return
            self._writer = None
            self._close(has_ended=writer.stop(timeout_s))

    def stopped(self) -> StoppedError | None:
        """Return the error if the store cannot be used in this process, else None."""
        if self._writer is None:
            return StoppedError(f"{self.label} is not started, or was stopped")
        if self._pid != os.getpid():
            return StoppedError(
                f"{self.label} belongs to process {self._pid}, from which this one was forked: its threads and "
                "connections are not here; make a store in this process"
            )
        return None

    def prepare(self, halves: Sequence[Half], callback: PreparedCallback, ordering_key: bytes | None = None) -> None:
        """Store the halves of one transaction, all or none; call back once they are durable."""
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
        """Store the producer's decision; call back once it is durable. The first decision prevails."""
        half = prepared.halves[0]
        self.submit(decision(half.transaction_id, half.group, verdict, Author.PRODUCER), callback)

    def answer(self, request: CheckRequest, verdict: Verdict, author: Author) -> None:
        """Store the answer to a check and return once it is durable, or raise `DecisionNotStoredError`."""
        half = request.half
        # If another decision came first, this answer is refused and counted. That is no error.
        with contextlib.suppress(TransactionRefusedError):
            self.await_decision(decision(half.transaction_id, half.group, verdict, author, request.check_number))

    def cancel(self, transaction_id: str, group: str, wait_s: float) -> None:  # noqa: ARG002 - no coordinator is needed
        """Take back a committed message that is not due yet by the store's clock; see `Store.cancel`."""
        change = decision(transaction_id, group, Verdict.ROLLBACK, Author.PRODUCER)._replace(cancels=True)
        outcome = self._await(change)
        if outcome.refused is not None and not outcome.is_known:
            raise not_pending(transaction_id, group)
        if outcome.refused is not None and outcome.stands is not Verdict.ROLLBACK:
            raise not_cancelled(transaction_id, outcome.stands)

    def submit(self, change: Decide, callback: DecidedCallback) -> None:
        """Store a decision of any author, or an answered check (UNKNOWN); call back once it is durable."""

        def changed(result: Result) -> None:
            if isinstance(result, Exception):
                callback(self._not_stored(change, result))
            else:
                callback(self._refusal(change, result))

        self._submit(change, changed)

    def await_decision(self, change: Decide) -> None:
        """Store a decision and return once it is durable, or raise the error that `submit` calls back with."""
        refusal = self._refusal(change, self._await(change))
        if refusal is not None:
            raise refusal

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
        """Return the error of a refused decision; None if the earlier decision says the same, which is harmless."""
        if outcome.refused is None:
            return None
        name, verdict, why = change.transaction_id, change.verdict.name, outcome.refused
        if self._ration.is_due("refused"):
            _log.warning("transaction %s: its %s was refused: %s", name, verdict, why)
        if outcome.stands is change.verdict:
            return None
        return TransactionRefusedError(f"transaction {name}: its {verdict} was refused: {why}")


def decision(transaction_id: str, group: str | None, verdict: Verdict, author: Author, check_number: int = 0) -> Decide:
    """Return a decision made now."""
    return Decide(transaction_id, group, verdict, author, check_number, int(time.time() * 1000))


def _said(why: Exception | str) -> object:
    """Return the text of an error, without a database's statements and parameters."""
    return why if isinstance(why, str | PenstockError) else cause_of(why)
