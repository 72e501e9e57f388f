"""The outbox: sends messages to other topics, and then marks the messages they came from as done.

Results of handlers, dead letters and messages for retry topics are *submissions*. A transport sends them in the order
of submission, and ends each of them once:

- written: brokers have all its messages, and the offsets of its items are done;
- refused: a topic does not take a message, and `then` decides what to do;
- gone: its assignment is gone, or was given back before an answer came. Then nothing is decided: the next owner handles
  the message again.

A time-out is no fault of a message. It is sent again, in its order, until a broker answers, and no handler is called
again. Submissions made before an assignment is gone are still sent. So the results that handlers finish during a
revocation are written and committed within its budget.

`HandlerResults` counts results when they are written. A refused result fails its message, which has left its lane by
then. So the refusal is put on the lane like a woken key, and the next holder of the lane parks the message as if its
handler had failed.

Threads: any thread appends to `_queue`. The poll thread writes all other fields, serves the outbox at each of its
steps, and calls `then`. In a revocation and at the end the poll thread waits until all is sent, within the budgets.
Holders of lanes never wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from confluent_kafka import KafkaError

from penstock.clients.cluster import Cluster
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.ration import once_in, rationed
from penstock.clients.rights import Operation, missing_right_text, topic_right
from penstock.consumer.assignments import OVERHEAD_BYTES, Assignment, ConsumerLane, Item
from penstock.consumer.handlers.results import Result
from penstock.errors import PenstockError

_log = rationed(__name__)

#: Seconds between two log lines that say that one topic may not be written: all its messages lack the same right.
LOG_AGAIN_S = 60.0

#: Submissions of at least so many bytes count for back-pressure. Smaller ones are negligible next to their message.
_COUNTED_BYTES = 1024


class Submission:
    """Messages for other topics, and the items that are done once these messages are written.

    The items are of one assignment. Only a batch in the plain outbox may have several: it is gone when all are gone.

    Later submissions of the same `lane` must stay behind it. A parked message has no lane here, because its key waits.
    """

    __slots__ = ("is_written", "items", "lane", "left", "messages", "refusal", "sent", "size_bytes", "then")

    #: Whether brokers have all of it. Set before `then` is called.
    is_written: bool

    def __init__(
        self, items: Sequence[Item], messages: Sequence[Result], then: Then, lane: ConsumerLane | None
    ) -> None:
        self.items = items
        self.messages = messages
        self.then = then
        self.lane = lane
        # For the plain outbox: how many messages were sent, and how many have no answer.
        self.sent = 0
        self.left = count = len(messages)
        size_bytes = OVERHEAD_BYTES * count
        for message in messages:
            size_bytes += len(message.value or b"") + len(message.key or b"")
            if message.headers:
                size_bytes += sum(len(name) + len(content or b"") for name, content in message.headers)
        self.size_bytes = size_bytes
        #: The topic that refused a message, and the error. At the call of `then`, neither written nor refused is gone.
        self.refusal: tuple[str, KafkaError] | None = None

    @property
    def assignment(self) -> Assignment:
        """The assignment of the items; of the first item, if they are a batch of several partitions."""
        return self.items[0][0].assignment

    @property
    def topics(self) -> list[str]:
        """The topic of each of its messages."""
        return [message.topic for message in self.messages]

    @property
    def is_gone(self) -> bool:
        """Whether next owners handle all its items again. It is written as long as one of its partitions is here."""
        # The first item separately, for speed: usually its assignment is here.
        return self.items[0][0].assignment.is_gone and all(item[0].assignment.is_gone for item in self.items)

    def count_bytes(self, sign: int) -> None:
        """Count its bytes as unsent, or with `sign` -1 no longer. A parked message counts as parked instead."""
        if self.lane is not None:
            self.assignment.tracker.count_unsent(sign * self.size_bytes)

    def complete(self) -> None:
        """Mark the offsets of its items done."""
        for fetch, index, _ in self.items:
            fetch.assignment.tracker.complete(fetch.block, (index,))

    def end(self, *, is_written: bool, refusal: tuple[str, KafkaError] | None = None) -> None:
        """End it with an outcome, and call `then`. A refusal counts only while one of its assignments is active."""
        if self.size_bytes >= _COUNTED_BYTES:
            self.count_bytes(-1)
        self.is_written = is_written
        if refusal is not None:
            self.refusal = refusal if any(item[0].assignment.active for item in self.items) else None
        self.then(self)


#: Takes an ended submission. Called once, on the poll thread.
Then = Callable[[Submission], None]


class Submits(Protocol):
    """The interface of an outbox for its senders."""

    def submit(
        self, items: Sequence[Item], messages: Sequence[Result], then: Then, lane: ConsumerLane | None = None
    ) -> None:
        """Write messages, and then mark these items done. Any thread; with a `lane`, only its holder.

        Later submissions of the same `lane` are not written before these messages.
        """


def why_refused(topic: str, error: KafkaError, principal: str) -> str:
    """Return why a topic refuses a message; for a missing permission, with the command that grants it."""
    if not is_missing_right(error):
        return reason(error)
    text = missing_right_text(f"nothing can be written to {topic}", [topic_right(Operation.WRITE, topic)], principal)
    if error.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
        # Since Kafka 2.8 the permission to write to a topic includes idempotent writes.
        text += "; a broker before 2.8 asks for --operation IdempotentWrite --cluster as well"
    return f"{text} ({reason(error)})"


class Outbox(ABC):
    """A transport: plain, or in Kafka transactions. Only the poll thread uses it, unless a method says otherwise."""

    #: Whether only calls of `serve` move submissions on, so that the poll thread must come back soon.
    needs_serving = False

    def __init__(self) -> None:
        # Any thread appends, without a lock: the many holders of lanes would queue for it (measured: half of the
        # throughput).
        self._queue: deque[Submission] = deque()
        # Submissions that were taken from the queue and have not ended.
        self._under_way: list[Submission] | dict[Submission, None] = []

    def submit(
        self, items: Sequence[Item], messages: Sequence[Result], then: Then, lane: ConsumerLane | None = None
    ) -> None:
        """As `Submits` says."""
        submission = Submission(items, messages, then, lane)
        if submission.size_bytes >= _COUNTED_BYTES:
            submission.count_bytes(1)
        self._queue.append(submission)

    @abstractmethod
    def connect(self, cluster: Cluster, config: Mapping[str, Any]) -> None:
        """Set the cluster and the configuration of the producer. Before the poll thread starts."""

    @abstractmethod
    def serve(self) -> None:
        """Do the work that is due, without waiting."""

    @abstractmethod
    def due_in(self) -> float:
        """Return the seconds until `serve` has work."""

    @property
    def waiting(self) -> int:
        """The number of submissions that have not ended."""
        return len(self._queue) + len(self._under_way)

    def submissions(self) -> list[Submission]:
        """Return the submissions that have not ended. Any thread, because each copy is made in one step."""
        return [*self._queue.copy(), *self._under_way.copy()]

    def has_any_of(self, assignments: Sequence[Assignment]) -> bool:
        """Return whether a submission of these assignments has not ended."""
        return any(item[0].assignment in assignments for submission in self.submissions() for item in submission.items)

    def state_of(self, assignment: Assignment, offset: int) -> str | None:
        """Return where the results or the dead letter of a message go, in words; None if nowhere. Any thread."""
        for submission in self.submissions():
            if any(item[0].assignment is assignment and item[2].offset() == offset for item in submission.items):
                return f"its output is being written to {', '.join(sorted(set(submission.topics)))}"
        return None

    def expedite(self) -> None:  # noqa: B027 - a hook
        """Send the queued submissions without waiting for more."""

    def flush(self, timeout: float) -> None:  # noqa: B027 - a hook
        """Wait at most `timeout` seconds until all submissions have ended, before the consumer leaves its group."""

    def close(self) -> None:  # noqa: B027 - a hook
        """Close the clients, after the consumer has left its group. Does not wait."""


class ResultRefusedError(PenstockError):
    """A broker refused a result of a handler."""


class Tries(NamedTuple):
    """How often a message was handed to its handler before, and the time of the first try on the engine's clock."""

    attempts: int
    since: float


@dataclass(frozen=True, slots=True, eq=False)
class RefusedResults:
    """A message whose results were refused. It is put on its lane in the way of a woken key."""

    item: Item
    tries: Tries | None
    error: ResultRefusedError


class HandlerResults:
    """Submits the results of handlers. The poll thread writes its counts.

    `principal` is the user that the brokers see behind the producer.
    """

    def __init__(self, outbox: Submits, wake: Callable[[ConsumerLane, RefusedResults], None], principal: str) -> None:
        self._outbox = outbox
        # Bound once, because nearly all messages use the same.
        self._then = self._ended
        #: Puts a refusal on a lane and wakes a worker for the lane.
        self.wake = wake
        self._principal = principal
        #: The number of messages whose results are all written, and the number of these results.
        self.handled = 0
        self.published = 0

    def submit(
        self, lane: ConsumerLane, items: Sequence[Item], results: Sequence[Result], tries: Sequence[Tries] | None = None
    ) -> None:
        """Write results, and then mark these messages done. The holder of their lane calls it.

        `tries` has the tries of each message, if any of them was tried before.
        """
        then = self._then if tries is None else partial(self._ended, tries=tries)
        self._outbox.submit(items, results, then, lane)

    def _ended(self, submission: Submission, tries: Sequence[Tries] | None = None) -> None:
        """Count written results; fail each message whose results were refused."""
        if submission.is_written:
            self.handled += len(submission.items)
            self.published += len(submission.messages)
        elif submission.refusal is not None and submission.lane is not None:
            topic, error = submission.refusal
            refusal = ResultRefusedError(
                f"{topic} refuses the result of a handler: {why_refused(topic, error, self._principal)}; change "
                "the handler or the topic"
            )
            if is_missing_right(error):
                # The messages fail by their retry policies, and those logs do not name the missing permission.
                _log.error("%s", refusal, extra=once_in(LOG_AGAIN_S, (self._principal, topic)))
            for index, item in enumerate(submission.items):
                self.wake(submission.lane, RefusedResults(item, None if tries is None else tries[index], refusal))
