"""The transactional publisher: results and the offsets they are for, in one Kafka transaction; readers see each once.

Holders of lanes put results here (`submit`). A thread of its own takes what has come together since the last
transaction (`interval_s`), writes it, adds the group's offsets of exactly those messages whose results are inside, with
the offset map, and commits. Handlers go on meanwhile, and what they return waits for the next one.

Nothing of the client library is called without a bound that we hold: a transaction runs on a `Disposable` (the library
ignores the time-out of `send_offsets_to_transaction` while the group's coordinator is away, librdkafka#5456). One that
does not answer is left behind, and its successor fences it by its transactional id.

What was in a transaction that was aborted is written again, from the results at hand, before anything else: no handler
is called for it. One in doubt is settled first: a successor under the same id has ended it, so that the group's
committed offsets tell whether it was committed. Offsets are marked done in their trackers when their results are stored
in the transaction, for the positions are taken from the trackers; a transaction that is aborted after that is done
again until it goes, or until its partitions are gone.

Fencing is by the group's generation: positions of a member that was put out are refused, so a zombie's results never
become visible. The next owner of a partition asks for stable offsets, and so waits for a transaction that is open.

Who owns what: `_queue` and `_hurry` are any thread's, under the lock; `_metadata` is written by the poll thread; all
else is the publisher's own thread's. If that thread dies, the consumer stops with what ended it.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from confluent_kafka import KafkaException, TopicPartition

from penstock.clients.bounded_calls import Disposable, LeftBehind, NotAnsweredError
from penstock.clients.cluster import Cluster
from penstock.clients.kafka_errors import reason
from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.clients.transactional.errors import NotOpenedError
from penstock.clients.transactional.writer import TransactionalWriter
from penstock.consumer.assignments import Assignment, ConsumerLane, Item
from penstock.consumer.handlers.results import Result
from penstock.consumer.publishing.result_publisher import (
    RefusedResults,
    ResultRefusedError,
    Tries,
    Unpublished,
    state_of,
)
from penstock.errors import raised
from penstock.offsets import CommitPoint

_log = logging.getLogger(__name__)

#: Seconds for all results of a transaction to be stored.
_DELIVERY_S = 5.0
#: Seconds after which a transaction is left behind: its calls have limits of their own, that the library may ignore.
_LIMIT_S = 20.0
#: Seconds of one try to initialise a producer, and of all of them.
_OPEN_S = 10.0
#: Seconds between two tries of what failed for no message's fault.
_AGAIN_S = 0.2
#: Results in one transaction, at most.
_MOST_RESULTS = 20_000


@dataclass(slots=True, eq=False)
class Ending:
    """One Kafka transaction: what is in it, and the positions that it commits."""

    inside: list[Unpublished]
    positions: dict[Assignment, CommitPoint] = field(default_factory=dict)
    #: Whether the commit was asked for, or may have been.
    may_be_committed: bool = False


class TransactionalPublisher:
    """Takes results from holders of lanes. Thread-safe.

    Args:
        wake: puts a refusal on a lane, and has the lane served.
        fail: stops the consumer.
    """

    def __init__(
        self,
        group: str,
        interval_s: float,
        *,
        wake: Callable[[ConsumerLane, RefusedResults], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._group = group
        self._interval_s = interval_s
        self._wake = wake
        self._fail = fail
        #: Returns assignments with what is to be committed of them now; only what the group does not have.
        self.changed: Callable[[], dict[Assignment, CommitPoint]]
        # Set before the start: makes a writer whose messages are a batch each or not, and asks for the group's offsets.
        self._make_writer: Callable[[bool], TransactionalWriter]
        self._committed: Callable[[list[TopicPartition]], list[TopicPartition]]
        # Guards the queue and what wakes the thread.
        self._lock = threading.Condition()
        self._queue: deque[Unpublished] = deque()
        self._hurry = False
        self._stopped = False
        # The group's metadata, of the generation in which positions are committed. Written by the poll thread.
        self._metadata: Any = None
        # What the transaction under way has, or the one to be done again. Others read the reference.
        self._inside: list[Unpublished] = []
        self._left = LeftBehind(f"the publisher of group {group}")
        self._calls: Disposable | None = None
        self._writer: TransactionalWriter | None = None
        self._apart = False
        self._doubt: Ending | None = None
        self._thread = threading.Thread(target=self._main, name=f"penstock-publisher-{group}", daemon=True)
        #: Whether a handler ever returned something. Written by holders of lanes.
        self.is_used = False
        #: Messages whose results are visible, results that are, and transactions. The publisher's thread's.
        self.handled = 0
        self.published = 0
        self.transactions = 0

    def connect(self, cluster: Cluster, config: Mapping[str, Any]) -> None:
        """Take where to publish, and start the thread. Once, before the poll thread starts."""
        # No other process has the id, so nobody fences this one but its own successor.
        transactional_id = f"penstock.{self._group}.{uuid.uuid4()}"
        self._make_writer = lambda apart: cluster.transactional_writer(transactional_id, config, apart=apart)
        self._committed = partial(cluster.stable_offsets, self._group)
        self._thread.start()

    def serve(self) -> None:
        """Nothing: it has a thread of its own."""

    def flush(self, timeout: float) -> None:
        """Publish what is there, and end the thread. By the poll thread, when it leaves the group."""
        self.stop(timeout)

    def state_of(self, assignment: Assignment, offset: int) -> str | None:
        """Return where the results of a message are, in words; None where none are on their way. Any thread."""
        with self._lock:
            return state_of((*self._inside, *self._queue), assignment, offset)

    def stop(self, timeout: float) -> bool:
        """End the thread once what is under way is over; return whether it did in time."""
        with self._lock:
            self._stopped = True
            self._lock.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def set_metadata(self, metadata: Any) -> None:
        """Take the group's metadata. By the poll thread, whenever the generation may have changed."""
        self._metadata = metadata

    def submit(
        self,
        lane: ConsumerLane,
        items: Sequence[Item],
        results: Sequence[Result],
        tries: Sequence[Tries] | None = None,
    ) -> None:
        """Have results published, and then these messages of one assignment done. By the holder of their lane."""
        self.is_used = True
        with self._lock:
            self._queue.append(Unpublished(lane, items, results, tries))

    def hurry(self) -> None:
        """Begin the next transaction at once. Any thread."""
        with self._lock:
            self._hurry = True
            self._lock.notify()

    @property
    def waiting(self) -> int:
        """How many submissions are not visible yet. Any thread."""
        with self._lock:
            return len(self._queue) + len(self._inside)

    def has_any_of(self, assignments: Sequence[Assignment]) -> bool:
        """Tell whether results of these assignments are on their way. Any thread."""
        with self._lock:
            return any(one.assignment in assignments for one in (*self._queue, *self._inside))

    # The publisher's own thread

    def _main(self) -> None:
        try:
            while self._wait():
                self._transact()
        except:  # noqa: E722 - see `raised`; the consumer must not go on without its publisher
            self._fail(raised())
        finally:
            self._drop_writer()
            if self._calls is not None:
                self._calls.close()

    def _wait(self) -> bool:
        """Wait until a transaction is to begin; return False where nothing is left to do."""
        until = time.monotonic() + self._interval_s
        with self._lock:
            while not self._stopped and not self._hurry and (left := until - time.monotonic()) > 0:
                self._lock.wait(left)
            self._hurry = False
            return not self._stopped or bool(self._queue or self._inside)

    def _transact(self) -> None:
        """Run one transaction: what is to be done again, or what has come together."""
        ending = Ending([])
        try:
            if self._writer is None:
                self._call("opening a transactional producer", self._open)
            if self._doubt is not None:
                self._call("asking for the group's offsets", self._settle)
            ending = Ending(self._take())
            if ending.inside or self.changed():
                self._call("a transaction", partial(self._run, ending))
                self._note_committed(ending)
        except (NotAnsweredError, UnknownEndError, NotOpenedError, KafkaException, BufferError) as error:
            self._note_failed(ending, error)

    def _take(self) -> list[Unpublished]:
        """Return what is in the next transaction: what is to be done again alone, for what came later stays behind."""
        with self._lock:
            inside = [one for one in self._inside if not one.assignment.is_gone]
            count = 0
            while not self._inside and self._queue and count < _MOST_RESULTS:
                one = self._queue.popleft()
                # Of one whose partition is gone, the next owner handles the message again.
                if not one.assignment.is_gone:
                    inside.append(one)
                    count += len(one.results)
            self._inside = inside
        return inside

    def _call(self, label: str, function: Callable[[], None]) -> None:
        if self._calls is None:
            self._left.require_few()
            self._calls = Disposable(f"penstock-publisher-{self._group}-calls", self._left)
        calls, writer = self._calls, self._writer
        try:
            calls.run(label, function, _LIMIT_S, lambda: None if writer is None else writer.close())
        except NotAnsweredError:
            self._calls = self._writer = None
            raise

    def _open(self) -> None:
        writer = self._make_writer(self._apart)
        # What a predecessor left open is ended when this returns.
        writer.open(_OPEN_S, _OPEN_S)
        self._writer = writer

    def _settle(self) -> None:
        """Find out whether the transaction in doubt was committed: its successor under the same id has ended it."""
        doubt, self._doubt = self._doubt, None
        if doubt is None:
            return
        try:
            found = self._committed([TopicPartition(one.topic, one.partition) for one in doubt.positions])
        except KafkaException:
            self._doubt = doubt
            raise
        stands = {(one.topic, one.partition): (one.offset, one.metadata or "") for one in found if one.error is None}
        sent = {(one.topic, one.partition): (at.offset, at.metadata) for one, at in doubt.positions.items()}
        if sent and all(stands.get(place) == at for place, at in sent.items()):
            self._note_committed(doubt)

    def _run(self, ending: Ending) -> None:
        """Write, add the positions, commit: on the disposable thread, which may be left behind in any call."""
        writer = self._writer
        if writer is None:
            raise NotOpenedError("the producer was given up")
        writer.begin()
        for number, one in enumerate(ending.inside):
            writer.produce(
                str(number),
                [(r.topic, None if r.partition < 0 else r.partition, r.key, r.value, r.headers) for r in one.results],
                room_s=_DELIVERY_S,
            )
        if not writer.deliver(_DELIVERY_S):
            raise BufferError(writer.blame.cause)
        for one in ending.inside:
            one.complete()
        ending.positions = self.changed()
        positions = [
            TopicPartition(one.topic, one.partition, point.offset, metadata=point.metadata)
            for one, point in ending.positions.items()
        ]
        writer.send_positions(positions, self._metadata)
        ending.may_be_committed = True
        writer.commit()

    def _note_committed(self, ending: Ending) -> None:
        for assignment, point in ending.positions.items():
            assignment.committed, assignment.acknowledged = point, True
        self.transactions += 1
        self.published += sum(len(one.results) for one in ending.inside)
        self.handled += sum(len(one.items) for one in ending.inside)
        self._apart = False
        with self._lock:
            self._inside = []

    def _note_failed(self, ending: Ending, error: BaseException) -> None:
        """Leave what was in it to be done again, without what the broker refused."""
        writer, self._writer = self._writer, None
        if ending.may_be_committed and isinstance(error, UnknownEndError | NotAnsweredError):
            self._doubt = ending
        elif writer is not None and isinstance(error, KafkaException | BufferError):
            self._refuse(ending, writer)
        if writer is not None and self._calls is not None:
            self._calls.start("closing", partial(_end, writer, abort=self._doubt is None))
        said = reason(error) if isinstance(error, KafkaException) else error
        _log.warning(
            "a Kafka transaction of group %s was not committed: %s; %s",
            self._group,
            said,
            "the group's offsets will tell" if self._doubt is not None else "it is done again from the results at hand",
        )
        time.sleep(_AGAIN_S)

    def _refuse(self, ending: Ending, writer: TransactionalWriter) -> None:
        """Fail the messages whose results the broker refused; where it is not known which, write each apart next."""
        blame = writer.blame
        topics = {**writer.not_let_in(), **blame.topics}
        if blame.messages and not self._apart:
            self._apart = True
            return
        refused = {int(number): why for number, (_, why) in blame.messages.items()}
        for number, one in enumerate(ending.inside):
            why = refused.get(number) or next((topics[r.topic] for r in one.results if r.topic in topics), None)
            # What is marked done can be taken back by nobody: it is tried until it goes.
            if why is None or one.is_complete:
                continue
            failure = ResultRefusedError(f"what a handler returned was refused: {why}; mend the handler or the topic")
            with self._lock:
                self._inside = [other for other in self._inside if other is not one]
            for place, item in enumerate(one.items):
                self._wake(one.lane, RefusedResults(item, None if one.tries is None else one.tries[place], failure))

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None and self._calls is not None:
            self._calls.start("closing", writer.close)


def _end(writer: TransactionalWriter, *, abort: bool) -> None:
    """Abort what a writer has open, so that it holds no readers back, and discard it. On its own thread."""
    try:
        if abort:
            writer.abort()
    except UnknownEndError as error:
        _log.info("%s; its successor ends it", error)
    finally:
        writer.close()
