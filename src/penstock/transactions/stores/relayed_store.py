"""A store outside Kafka, as producers and its coordinator see it: what is the same in a database and in files.

What producers, checks, the discard policy and operators change in it is written by one thread. While one batch is being
written the next one gathers: so writes are few when much is changed, and waits are short when little is.
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

#: Changes, and bytes of halves, in one batch.
_BATCH = 2_000
_BATCH_BYTES = 4 << 20
#: About what a change takes besides the payload.
_OVERHEAD_BYTES = 200


class Prepare(NamedTuple):
    """Store the halves of a transaction."""

    halves: tuple[Half, ...]
    #: By this machine's clock; a database takes its own.
    birth_ms: int
    #: What chooses the shard; the first half's key, or else the id, where it is None.
    ordering_key: bytes | None = None

    def __repr__(self) -> str:
        """Name the transaction, never a key."""
        return f"<Prepare {self.halves[0].transaction_id}>"


class Decide(NamedTuple):
    """Decide a transaction, or (UNKNOWN) count an answered check."""

    transaction_id: str
    #: None: of any group.
    group: str | None
    verdict: Verdict
    author: Author
    #: Of the check that is answered; 0: it is no answer.
    check_number: int
    now_ms: int
    #: Who it was, where a person decided.
    actor: str = ""
    #: It takes back what is committed and not due yet, and decides nothing else.
    cancels: bool = False


@dataclass(slots=True)
class Outcome:
    """What became of a change.

    Attributes:
        refused: why it does not count; None: it does.
        stands: the decision that stands against it, where that is known.
        is_known: whether the store knows of such a transaction, of that group.
    """

    refused: str | None = None
    stands: Verdict | None = None
    is_known: bool = True


#: What became of a change, or why it is not known to be stored.
Result = Outcome | Exception
ChangedCallback = Callable[[Any], None]
#: Makes changes durable, all of them or each alone, and returns what became of each. It raises nothing.
Write = Callable[[Sequence[Any]], Sequence[Result]]

#: Why a discard of what is committed does not count.
NOT_HELD = (
    "COMMIT was decided before, and it is not held, or is being published just now; what Kafka refuses can be "
    "discarded: look at what it waits for, and try again"
)
#: Why a decision on what the store does not know does not count.
UNKNOWN_ID = "the store has no such transaction of that group; it is unknown, or settled long ago"


def came_first(verdict: Verdict) -> str:
    """Return why a decision does not count where another one stands."""
    return f"{verdict.name} was decided before, and the first decision stands"


class GroupWriter:
    """One thread that writes what is submitted, in its order. Thread-safe, also from within a callback."""

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
        #: Set by stop(): what is not written by now is refused.
        self.is_late = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write what has come, at most `timeout_s` seconds, and end; tell whether it has ended. The rest is refused."""
        with self._lock:
            self._stopping = True
            self._more.notify_all()
        self._thread.join(timeout_s)
        self.is_late = True
        return not self._thread.is_alive()

    def submit(self, change: Any, callback: ChangedCallback) -> None:
        """Hand a change over; the callback comes once: from the writing thread, or at once if nothing is taken.

        Never waits: what waits to be written is in flight at its producer, whose limits bound it.
        """
        with self._lock:
            is_taken = not self._stopping
            if is_taken:
                self._waiting.append((change, callback))
                self._more.notify()
        if not is_taken:
            callback(self.refusal())

    def refusal(self) -> StoppedError:
        """Return why nothing more is taken."""
        return StoppedError(f"{self._label} was stopped")

    def _run(self) -> None:
        while batch := self._take():
            changes = [change for change, _ in batch]
            results = [self.refusal()] * len(batch) if self.is_late else self._write(changes)
            for (_, callback), result in zip(batch, results, strict=True):
                try:
                    callback(result)
                except Exception:  # noqa: BLE001 - one that fails shall not keep the others waiting
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
        self._targets = TargetTopics(admin, self.may_publish_to)
        self._ration = RationedLog()
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
    def administration(self) -> StoreAdministration:
        """Return what an operator may do, once it was started."""

    @abstractmethod
    def open_shards(self, checks: CheckTerms, wake: Callable[[], object]) -> StoreShards:
        """Return its shards, for one coordinator, once it was started; `wake` is called by any thread."""

    def may_publish_to(self, topic: str) -> bool:
        """Tell whether a message may name a topic as its target."""
        return self.topics.may_publish_to(topic) and not topic.startswith(self._own_topics)

    def require_target(self, topic: str, partition: int | None) -> None:
        """Raise unless a message can be published to a topic; as `TargetTopics.require`."""
        self._targets.require(topic, partition)

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
