"""The transactional publisher: results and the offsets they are for, in one Kafka transaction; readers see each once.

Holders of lanes put results here (`submit`). A thread of its own takes what has come together since the last
transaction (`interval_s`), writes it, adds the group's offsets of exactly those messages whose results are inside, with
the offset map, and commits. Handlers go on meanwhile, and what they return waits for the next one.

What was in a transaction that was aborted is written again, from the results at hand, before anything else: no handler
is called for it. One in doubt is settled first: a successor under the same id has ended it, so that the group's
committed offsets tell whether it was committed. Offsets are done in their trackers once the transaction is committed;
its positions are taken from the trackers as if they were. A result goes in only with its offset: one that the offset
map has no room for waits, with what is behind it in its lane.

What is given up goes the same way: its dead letter, or its message for a retry topic, is in the transaction that
commits its offset (`forward`).

Fencing is by the group's generation: positions of a member that was put out are refused, so a zombie's results never
become visible. The next owner of a partition asks for stable offsets, and so waits for a transaction that is open.

Who owns what: any thread appends to `_queue`, and the publisher's takes from it; `_is_expedited` and `_inside` are
changed under the lock; `_metadata` is written by the poll thread, which takes `_reports`; all else is the publisher's
own thread's. If that thread dies, the consumer stops with what ended it.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.clients.bounded_calls import NotAnsweredError
from penstock.clients.cluster import Clock, Cluster
from penstock.clients.kafka_errors import code_of, is_missing_right, is_rebalancing, reason
from penstock.clients.rights import THIS_CLIENT
from penstock.clients.transactional.end_watch import SURE_S, UnknownEndError
from penstock.clients.transactional.errors import GivenUpError, IdLostError, NotOpenedError
from penstock.consumer.assignments import Assignment, ConsumerLane, Item
from penstock.consumer.handlers.results import Result
from penstock.consumer.publishing.outlet import Delivered
from penstock.consumer.publishing.result_publisher import Tries, Unpublished, Wake, refusal, state_of
from penstock.consumer.publishing.transaction import ForwardedMessage, Places, Transaction, places_of, without_room
from penstock.consumer.publishing.transaction_runner import TransactionRunner
from penstock.errors import raised
from penstock.offsets import CommitPoint

_log = logging.getLogger(__name__)

#: What a transaction fails with, beside what the client library raises.
_FAILURES = (GivenUpError, NotAnsweredError, UnknownEndError, NotOpenedError, IdLostError)
#: Seconds between two tries of what failed for no message's fault.
_AGAIN_S = 0.2
#: Seconds that an answer may take which says that a transaction in doubt was not committed.
_QUICK_S = 1.0
#: Seconds between two log lines about failures of one kind.
_LOG_AGAIN_S = 10.0
#: The error of a message that was forwarded, and whose partition is gone.
_NOT_WRITTEN = KafkaError(KafkaError._PURGE_QUEUE)  # noqa: SLF001 - the client library's names of its local errors look so
#: Results in one transaction, at most, and how many messages that wait end one before its time.
_MOST_RESULTS = 20_000
_FULL = 5_000


def transactional_ids(group: str) -> str:
    """Return how the transactional ids of a group's members begin."""
    return f"penstock.{group}."


class TransactionalPublisher:
    """Takes results from holders of lanes. Thread-safe.

    Args:
        wake: puts a refusal on a lane, and has the lane served.
        fail: stops the consumer.
    """

    #: It has a thread of its own.
    needs_serving = False

    def __init__(
        self,
        group: str,
        interval_s: float,
        clock: Clock,
        *,
        wake: Wake,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._group = group
        self._interval_s = interval_s
        self._clock = clock
        self._wake = wake
        self._fail = fail
        #: Returns assignments with what is to be committed of them once these places are done; only what the group does
        #: not have.
        self.changed: Callable[[Mapping[Assignment, Places]], dict[Assignment, CommitPoint]]
        self._runner: TransactionRunner
        # Guards what wakes the thread, and moves from the queue to what is inside. Whoever appends to the queue does
        # without: holders of lanes are many, and would stand in line for it (measured: half of the throughput).
        self._lock = threading.Condition()
        self._queue: deque[Unpublished] = deque()
        self._began_at = 0.0
        # Until when a failure is not tried again. The publisher's thread's.
        self._again_at = 0.0
        self._is_expedited = False
        self._stopped = False
        # The group's metadata, of the generation in which positions are committed. Written by the poll thread.
        self._metadata: Any = None
        #: Whether a transaction failed, so that the metadata may be of a generation that is over.
        self.wants_metadata = False
        #: Whether one failed for want of a right. Taken back by the poll thread.
        self.lacks_right = False
        # When a failure was logged last, by its kind.
        self._logged_at: dict[object, float] = {}
        # What became of messages that were forwarded.
        self._reports: deque[tuple[Delivered, KafkaError | None]] = deque()
        self._principal = THIS_CLIENT
        # What the transaction under way has, or the one to be done again. Others read the reference.
        self._inside: list[Unpublished] = []
        self._apart = False
        self._doubt: Transaction | None = None
        # When the group's offsets did not have the one in doubt, for the first time.
        self._denied_at: float | None = None
        self._thread = threading.Thread(target=self._main, name=f"penstock-publisher-{group}", daemon=True)
        #: Whether a handler ever returned something. Written by holders of lanes.
        self.is_used = False
        #: Messages whose results are visible, results that are, and transactions. The publisher's thread's.
        self.handled = 0
        self.published = 0
        self.transactions = 0

    def connect(self, cluster: Cluster, config: Mapping[str, Any]) -> None:
        """Take where to publish. Once, before the poll thread starts."""
        # No other process has the id, so nobody fences this one but its own successor.
        transactional_id = f"{transactional_ids(self._group)}{uuid.uuid4()}"
        self._runner = TransactionRunner(self._thread.name, self._group, transactional_id, cluster, config)
        self._principal = cluster.principal

    def start(self) -> None:
        """Start the thread. Who steps the engine calls `transact` instead, whenever `due_at` has come."""
        self._thread.start()

    def serve(self) -> None:
        """Nothing: see `needs_serving`."""

    def flush(self, timeout: float) -> None:
        """Publish what is there, and end the thread. By the poll thread, when it leaves the group."""
        self.stop(timeout)
        self.poll()

    def state_of(self, assignment: Assignment, offset: int) -> str | None:
        """Return where the results of a message are, in words; None where none are on their way. Any thread."""
        with self._lock:
            return state_of((*self._inside, *self._queue.copy()), assignment, offset)

    def stop(self, timeout: float) -> bool:
        """End the thread once what is under way is over; return whether it did in time."""
        with self._lock:
            self._stopped = True
            self._lock.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def set_metadata(self, metadata: Any) -> None:
        """Take the group's metadata. By the poll thread, whenever the generation may have changed."""
        self._metadata, self.wants_metadata = metadata, False

    def submit(
        self,
        lane: ConsumerLane,
        items: Sequence[Item],
        results: Sequence[Result],
        tries: Sequence[Tries] | None = None,
    ) -> None:
        """Have results published, and then these messages of one assignment done. By the holder of their lane."""
        self.is_used = True
        self._append(Unpublished(lane, items, results, tries))

    def forward(self, item: Item, to: Result, complete: Callable[[], None], delivered: Delivered) -> None:
        """Have a message that was given up published with its offset, which `complete` marks done."""
        self._append(ForwardedMessage(item, to, complete, delivered))

    def poll(self) -> None:
        """Tell what became of messages that were forwarded. By the poll thread."""
        while self._reports:
            delivered, error = self._reports.popleft()
            delivered(error)

    def _append(self, unpublished: Unpublished) -> None:
        self._queue.append(unpublished)
        # Read without the lock: who sees it too late wakes the thread once too often.
        if len(self._queue) >= _FULL and not self._is_expedited:
            self.expedite()

    def expedite(self) -> None:
        """Begin the next transaction at once. Any thread."""
        with self._lock:
            self._is_expedited = True
            self._lock.notify()

    @property
    def waiting(self) -> int:
        """How many submissions are not visible yet. Any thread."""
        with self._lock:
            return len(self._queue) + len(self._inside)

    def has_any_of(self, assignments: Sequence[Assignment]) -> bool:
        """Tell whether results of these assignments are on their way. Any thread."""
        with self._lock:
            return any(unpublished.assignment in assignments for unpublished in (*self._queue.copy(), *self._inside))

    # The publisher's own thread

    def _main(self) -> None:
        try:
            while self._wait():
                self.transact()
        except:  # noqa: E722 - see `raised`; the consumer must not go on without its publisher
            self._fail(raised())
        finally:
            self._runner.close()

    def _wait(self) -> bool:
        """Wait until a transaction is to begin; return False where nothing is left to do."""
        with self._lock:
            while (left := self.due_at - self._clock.monotonic()) > 0:
                self._lock.wait(left)
            return not self._stopped or bool(self._queue or self._inside)

    @property
    def due_at(self) -> float:
        """When the next transaction begins, on the engine's clock."""
        return (
            self._again_at
            if self._stopped or self._is_expedited
            else max(self._again_at, self._began_at + self._interval_s)
        )

    def transact(self) -> None:
        """Run one transaction: what is to be done again, or what has come together."""
        with self._lock:
            self._is_expedited = False
            self._began_at = self._clock.monotonic()
        transaction: Transaction | None = None
        try:
            self._runner.require_open(apart=self._apart)
            if not self._is_settled():
                self._again_at = self._clock.monotonic() + SURE_S
                return
            # Read first: of a partition that goes away from here on, the group's generation is over then. The next one
            # would let this member commit what is another's.
            metadata = self._metadata
            if metadata is None:
                # The group has not given this member an id yet, or has taken it back.
                self.wants_metadata, self._again_at = True, self._clock.monotonic() + _AGAIN_S
                return
            transaction = self._next()
            if transaction.inside or transaction.positions:
                self._runner.run(transaction, metadata)
                self._note_committed(transaction)
        except (*_FAILURES, KafkaException, BufferError) as error:
            self._note_failed(transaction, error)

    def _next(self) -> Transaction:
        """Return the next transaction. What is to be done again is so alone, for what came later stays behind it."""
        with self._lock:
            taken, count = list(self._inside), 0
            while not self._inside and self._queue and count < _MOST_RESULTS:
                taken.append(unpublished := self._queue.popleft())
                count += len(unpublished.results)
            inside = self._inside = [unpublished for unpublished in taken if not unpublished.assignment.is_gone]
        # Of those whose partition is gone, the next owner handles the message again.
        self._reports.extend(
            (unpublished.delivered, _NOT_WRITTEN)
            for unpublished in taken
            if unpublished.assignment.is_gone and isinstance(unpublished, ForwardedMessage)
        )
        positions = self.changed(places := places_of(inside))
        while without := without_room(inside, places, positions):
            inside = [unpublished for unpublished in inside if unpublished not in without]
            with self._lock:
                self._queue.extendleft(reversed(without))
                self._inside = inside
            positions = self.changed(places := places_of(inside))
        return Transaction(inside, places, positions)

    def _is_settled(self) -> bool:
        """Find out whether the transaction in doubt was committed: its successor under the same id has ended it.

        That it was not is believed when it is answered at once, and again some seconds later: a broker that stood still
        tells what was, until it hears that another coordinates the group now. False: ask again.
        """
        if (doubt := self._doubt) is None:
            return True
        begun = self._clock.monotonic()
        found = self._runner.committed(
            [TopicPartition(position.topic, position.partition) for position in doubt.positions]
        )
        stands = {(partition.topic, partition.partition): partition for partition in found}
        # A partition that is gone may have been moved on by its next owner.
        ours = [
            (stands.get((assignment.topic, assignment.partition)), sent)
            for assignment, sent in doubt.positions.items()
            if not assignment.is_gone and sent != assignment.committed
        ]
        for at, _ in ours:
            if at is not None and at.error is not None:
                # A partition without an answer is not known: it may have been committed.
                raise KafkaException(at.error)
        # It took effect whole or not at all.
        if any(at is not None and (at.offset, at.metadata or "") == (sent.offset, sent.metadata) for at, sent in ours):
            self._doubt = None
            self._note_committed(doubt)
            return True
        now = self._clock.monotonic()
        if ours and (self._denied_at is None or now - begun > _QUICK_S or now < self._denied_at + SURE_S):
            self._denied_at = now if self._denied_at is None else self._denied_at
            return False
        self._doubt = None
        return True

    def _note_committed(self, transaction: Transaction) -> None:
        inside, places = transaction.inside, transaction.places
        if forwarded := [unpublished for unpublished in inside if isinstance(unpublished, ForwardedMessage)]:
            for message in forwarded:
                message.complete()
                self._reports.append((message.delivered, None))
            inside = [unpublished for unpublished in inside if not isinstance(unpublished, ForwardedMessage)]
            places = places_of(inside)
        self.published += sum(len(message.results) for message in inside)
        self.handled += sum(len(message.items) for message in inside)
        for assignment, blocks in places.items():
            for block, indexes in blocks.items():
                assignment.tracker.complete(block, indexes)
        for assignment, point in transaction.positions.items():
            assignment.committed, assignment.acknowledged = point, True
        self.transactions += 1
        self._apart = False
        # Last: who waits for what is on its way must see the offsets done.
        with self._lock:
            self._inside = []

    def _note_failed(self, transaction: Transaction | None, error: BaseException) -> None:
        """Leave what was in it to be done again, without what the broker refused."""
        if transaction is not None and isinstance(error, UnknownEndError) and error.is_committed:
            self._note_committed(transaction)
            self._runner.discard(abort=False)
            _log.info("%s: its producer is replaced", error)
            return
        if transaction is not None:
            # What is left behind in its end may return, and be committed, until a successor has taken its id.
            if isinstance(error, UnknownEndError | NotAnsweredError):
                self._doubt, self._denied_at = transaction, None
            elif isinstance(error, KafkaException | BufferError):
                self._refuse(transaction)
        self._runner.discard(abort=self._doubt is None)
        self.wants_metadata = True
        if isinstance(error, KafkaException):
            self.lacks_right = self.lacks_right or is_missing_right(error)
        self._log_failure(error)
        self._again_at = self._clock.monotonic() + _AGAIN_S

    def _log_failure(self, error: BaseException) -> None:
        """Log why a transaction failed: the same one now and then only, for it is tried again at once."""
        kind: object = type(error)
        said: object = error
        if isinstance(error, KafkaException):
            kind, said = code_of(error), reason(error)
        now = self._clock.monotonic()
        level = logging.DEBUG
        if now - self._logged_at.get(kind, -_LOG_AGAIN_S) >= _LOG_AGAIN_S:
            routine = isinstance(error, KafkaException) and is_rebalancing(error)
            self._logged_at[kind], level = now, logging.INFO if routine else logging.WARNING
        _log.log(
            level,
            "a Kafka transaction of group %s was not committed: %s; %s",
            self._group,
            said,
            "the group's offsets will tell" if self._doubt is not None else "it is done again from the results at hand",
        )

    def _refuse(self, transaction: Transaction) -> None:
        """Fail the messages whose results the broker refused; where it is not known which, write each apart next."""
        refused, has_refused_some = self._runner.refused(transaction)
        if has_refused_some and not self._apart:
            self._apart = True
            return
        for unpublished, (topic, error) in refused.items():
            if isinstance(unpublished, ForwardedMessage):
                self._reports.append((unpublished.delivered, error))
            else:
                unpublished.refuse(refusal(topic, error, self._principal), self._wake)
        # After: who waits for what is on its way must see the lanes woken.
        with self._lock:
            self._inside = [unpublished for unpublished in self._inside if unpublished not in refused]
