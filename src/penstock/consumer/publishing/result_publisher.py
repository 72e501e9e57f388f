"""The result publisher: it writes what handlers return; then the messages that it was returned for are done.

Holders of lanes put results here in the order of their keys (`submit`); the poll thread alone sends them, in that order
and with one idempotent producer, and serves their delivery reports. So the results of a key stand in the order of its
messages, without a wait between two messages. While brokers are away the producer keeps what it has: its messages do
not time out.

What a broker refuses is a failure of the message it was returned for. That message has left its lane, so the refusal is
put on the lane like a key that is woken, and the lane's next holder parks the message as if its handler had failed. A
message counts as done, and is committed, only when brokers have all its results: a process that ends in between leaves
it to its next owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple, Protocol

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.cluster import Cluster
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.renewal import LastingProducer
from penstock.clients.rights import THIS_CLIENT, Operation, missing_right_text, topic_right
from penstock.consumer.assignments import Assignment, ConsumerLane, Item
from penstock.consumer.handlers.results import Result
from penstock.errors import PenstockError

#: What is reported of a message that a producer had which failed for ever.
_FAILED_FOR_EVER = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._FATAL})  # noqa: SLF001 - the client library's names of its local errors look so


class ResultRefusedError(PenstockError):
    """A broker refused what a handler returned."""


class Tries(NamedTuple):
    """How often a message was handed over to its handler before, and since when on the engine's clock."""

    attempts: int
    since: float


class Unpublished:
    """Messages whose results are not all written: one message, or those of a batch."""

    __slots__ = ("error", "items", "lane", "left", "results", "sent", "tries")

    def __init__(
        self, lane: ConsumerLane, items: Sequence[Item], results: Sequence[Result], tries: Sequence[Tries] | None
    ) -> None:
        self.lane = lane
        self.items = items
        #: Of each item, where some were tried before.
        self.tries = tries
        self.results = results
        #: How many of the results the producer was given.
        self.sent = 0
        #: How many of them no broker has acknowledged or refused yet.
        self.left = len(results)
        #: Why the first of them was refused.
        self.error: ResultRefusedError | None = None

    @property
    def assignment(self) -> Assignment:
        """What the messages were fetched from; the first, where they are a batch of several partitions."""
        return self.items[0][0].assignment

    def complete(self) -> None:
        """Mark the offsets done."""
        for fetch, index, _ in self.items:
            fetch.assignment.tracker.complete(fetch.block, (index,))

    def refuse(self, error: ResultRefusedError, wake: Wake) -> None:
        """Put the refusal on the lane, for each of the messages."""
        for place, item in enumerate(self.items):
            wake(self.lane, RefusedResults(item, None if self.tries is None else self.tries[place], error))


class RefusedResults:
    """Put on a lane instead of a woken key: a message whose results were refused."""

    __slots__ = ("error", "item", "tries")

    def __init__(self, item: Item, tries: Tries | None, error: ResultRefusedError) -> None:
        self.item = item
        self.tries = tries
        self.error = error


#: Puts a refusal on a lane, and has the lane served.
Wake = Callable[[ConsumerLane, RefusedResults], None]


class ResultTaker(Protocol):
    """What the lane processor calls on that which publishes results."""

    def submit(
        self,
        lane: ConsumerLane,
        items: Sequence[Item],
        results: Sequence[Result],
        tries: Sequence[Tries] | None = None,
    ) -> None:
        """Have results published, and then these messages of one assignment done. By the holder of their lane."""

    def has_any_of(self, assignments: Sequence[Assignment]) -> bool:
        """Tell whether results of these assignments are on their way. Any thread."""


class Publisher(ResultTaker, Protocol):
    """What an engine calls on that which publishes results."""

    handled: int
    published: int
    is_used: bool
    #: Whether results move on by `serve` alone, so that the poll thread must come back soon.
    needs_serving: bool

    def connect(self, cluster: Cluster, config: Mapping[str, Any]) -> None:
        """Take where to publish. Before the poll thread starts."""

    def start(self) -> None:
        """Start the thread of its own, where it has one. By the poll thread."""

    @property
    def waiting(self) -> int:
        """How many submissions are not published yet. Any thread."""

    def state_of(self, assignment: Assignment, offset: int) -> str | None:
        """Return where the results of a message are, in words; None where none are on their way. Any thread."""

    def serve(self) -> None:
        """Do what is due. By the poll thread."""

    def expedite(self) -> None:
        """Publish what is there without waiting for more. Any thread."""

    def flush(self, timeout: float) -> None:
        """Wait at most so many seconds until what is there is published. By the poll thread, at the end."""


class ResultPublisher:
    """Takes results from holders of lanes; everything else is the poll thread's."""

    needs_serving = True

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._make_producer: Callable[[], LastingProducer] | None = None
        self._producer: LastingProducer | None = None
        self._principal = THIS_CLIENT
        # Appended by holders of lanes, taken by the poll thread.
        self._queue: deque[Unpublished] = deque()
        # What the producer has. The poll thread's; others read copies, made in one step.
        self._sent: dict[Unpublished, None] = {}
        # What a producer had that failed for ever: nobody knows whether it was written. A heap, by the number that each
        # result got when it was first sent, for the next producer may fail in the middle of them.
        self._again: list[tuple[int, Unpublished, Result]] = []
        self._numbers = count()
        #: Whether a handler ever returned something. Written by holders of lanes.
        self.is_used = False
        #: Messages whose results are all written, and results that were written. The poll thread's.
        self.handled = 0
        self.published = 0

    def connect(self, cluster: Cluster, config: Mapping[str, Any]) -> None:
        """Take what makes the producer, at the first result. Before the poll thread starts."""
        self._make_producer = partial(LastingProducer, partial(cluster.producer, config), cluster.clock)
        self._principal = cluster.principal

    def start(self) -> None:
        """Nothing: the poll thread does all."""

    def submit(
        self,
        lane: ConsumerLane,
        items: Sequence[Item],
        results: Sequence[Result],
        tries: Sequence[Tries] | None = None,
    ) -> None:
        """Have results written, and then these messages of one assignment done. By the holder of their lane."""
        self.is_used = True
        self._queue.append(Unpublished(lane, items, results, tries))

    @property
    def waiting(self) -> int:
        """How many submissions are not written yet. Any thread."""
        return len(self._queue) + len(self._sent)

    def has_any_of(self, assignments: Sequence[Assignment]) -> bool:
        """Tell whether results of these assignments are on their way. Any thread."""
        waiting = (*self._queue.copy(), *self._sent.copy())
        return any(item[0].assignment in assignments for unpublished in waiting for item in unpublished.items)

    def state_of(self, assignment: Assignment, offset: int) -> str | None:
        """Return where the results of a message are, in words; None where none are on their way. Any thread."""
        return state_of((*self._sent.copy(), *self._queue.copy()), assignment, offset)

    def serve(self) -> None:
        """Send what was submitted, and serve delivery reports."""
        if self._queue or self._again:
            self._send_waiting(self._connected())
        if self._sent and self._producer is not None:
            self._producer.poll(0)

    def expedite(self) -> None:
        """Nothing waits for more here."""

    def flush(self, timeout: float) -> None:
        """Wait for deliveries of what was sent, at most `timeout` seconds."""
        if self._producer is not None and self._sent:
            self._producer.flush(timeout)

    def _connected(self) -> LastingProducer:
        if self._producer is None:
            if self._make_producer is None:
                raise AssertionError("the engine connects before it handles messages")
            self._producer = self._make_producer()
        return self._producer

    def _send_waiting(self, producer: LastingProducer) -> None:
        """Send as much as the producer takes, in the order in which it was submitted."""
        while self._again:
            # Taken off first: a refusal at once may put a lower one there.
            oldest = heappop(self._again)
            if not self._send(producer, *oldest):
                heappush(self._again, oldest)
                return
        while self._queue:
            unpublished = self._queue[0]
            if not unpublished.sent and not any(item[0].assignment.active for item in unpublished.items):
                # Its next owner handles it again. What is of other partitions too is written for their sake.
                self._queue.popleft()
                continue
            self._sent[unpublished] = None
            while unpublished.sent < len(unpublished.results):
                # Before: a refusal at once may be the last answer that it waits for.
                unpublished.sent += 1
                if not self._send(
                    producer, next(self._numbers), unpublished, unpublished.results[unpublished.sent - 1]
                ):
                    unpublished.sent -= 1
                    return
            self._queue.popleft()

    def _send(self, producer: LastingProducer, number: int, unpublished: Unpublished, result: Result) -> bool:
        """Give the producer a result; return whether it is done with: taken or refused. Else it is tried again soon."""
        has_failed = producer.failure is not None  # what it is now: a check of types would take it for what it stays
        if has_failed:
            # What the failed client had is reported by this, and goes first.
            producer.renew()
            return False
        try:
            producer.produce(
                result.topic,
                result.value,
                result.key,
                partition=result.partition,
                headers=result.headers,
                on_delivery=partial(self._delivered, number, unpublished, result),
            )
        except BufferError:
            return False
        except KafkaException as error:
            if producer.failure is not None:
                # A new client is made once all that the failed one had was reported.
                return False
            self._answered(unpublished, result, error.args[0])
        return True

    def _delivered(
        self, number: int, unpublished: Unpublished, result: Result, error: KafkaError | None, _message: object
    ) -> None:
        if error is not None and error.code() == KafkaError._MSG_TIMED_OUT:  # noqa: SLF001 - as above
            # Nobody's fault. What was sent later is to be written after it.
            self._connected().give_up(error)
            heappush(self._again, (number, unpublished, result))
        elif error is not None and (error.fatal() or error.code() in _FAILED_FOR_EVER):
            heappush(self._again, (number, unpublished, result))
        else:
            self._answered(unpublished, result, error)

    def _answered(self, unpublished: Unpublished, result: Result, error: KafkaError | None) -> None:
        if error is None:
            self.published += 1
        elif unpublished.error is None:
            unpublished.error = refusal(result.topic, error, self._principal)
        unpublished.left -= 1
        if unpublished.left:
            return
        # Before it is gone: who waits for what is on its way must see the offsets done, or the lane woken.
        if unpublished.error is None:
            unpublished.complete()
            self.handled += len(unpublished.items)
        else:
            unpublished.refuse(unpublished.error, self._wake)
        del self._sent[unpublished]


def refusal(topic: str, error: KafkaError, principal: str) -> ResultRefusedError:
    """Return the error of a result that a topic does not take."""
    if is_missing_right(error):
        right = topic_right(Operation.WRITE, topic)
        what = f"what a handler returned cannot be written to {topic}"
        return ResultRefusedError(f"{missing_right_text(what, [right], principal)} ({reason(error)})")
    return ResultRefusedError(
        f"{topic} does not take what a handler returned: {reason(error)}; mend the handler or the topic"
    )


def state_of(unpublished: Iterable[Unpublished], assignment: Assignment, offset: int) -> str | None:
    """Return where the results of a message are, in words; None where it is not among these."""
    for submission in unpublished:
        if any(fetch.assignment is assignment and record.offset() == offset for fetch, _, record in submission.items):
            topics = ", ".join(sorted({result.topic for result in submission.results}))
            return f"what its handler returned is being written to {topics}"
    return None
