"""The outbox: what goes to other topics, after which the messages that it is for are done.

Results of handlers, dead letters and messages for retry topics are *submissions*. A transport sends them in the order
in which they were submitted, and ends each of them once:

- written: brokers have all of it, and the offsets of its items are done;
- refused: a topic does not take it, and `then` judges that;
- gone: its assignment is, or was given back before an answer came. Nothing is judged: the next owner handles it again.

Silence is nobody's fault: what timed out is sent again, in its order, until it is answered, and no handler is called.
What was submitted before an assignment is gone is sent, so what handlers finish in a revocation is written and
committed within its budget.

What handlers return is counted when it is written, and a refusal fails its message (`HandlerResults`). That message has
left its lane by then. So the refusal is put on the lane like a key that is woken, and the lane's next holder parks the
message as if its handler had failed.

Who owns what: any thread appends to `_queue`. All else is written by the poll thread, which serves the outbox at each
of its steps, and calls `then`. In a revocation and at the end it waits until all is sent, within their budgets; holders
of lanes never wait.
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

#: Bytes of a submission from which on they count for back-pressure. Fewer are nothing compared with its message.
_COUNTED_BYTES = 1024


class Submission:
    """Messages for other topics, and the items that are done once those are written.

    They are of one assignment, but those of a batch in the plain outbox: it is gone where all of its assignments are.

    `lane` is the one in which later submissions must stay behind it; None for a parked message, whose key waits.
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
        # Of the plain outbox: how many of its messages were sent, and how many are not answered.
        self.sent = 0
        self.left = count = len(messages)
        size_bytes = OVERHEAD_BYTES * count
        for message in messages:
            if message.value:
                size_bytes += len(message.value)
        self.size_bytes = size_bytes
        #: Which topic refused it, and why. Where `then` is called, it is gone if it is neither written nor refused.
        self.refusal: tuple[str, KafkaError] | None = None

    @property
    def assignment(self) -> Assignment:
        """What the items were fetched from; the first of them, where they are a batch of several partitions."""
        return self.items[0][0].assignment

    @property
    def is_gone(self) -> bool:
        """Whether the next owners handle all of it again. What is of other partitions too is written for their sake."""
        # The first alone, for speed: as a rule it is there.
        return self.items[0][0].assignment.is_gone and all(item[0].assignment.is_gone for item in self.items)

    def count_bytes(self, sign: int) -> None:
        """Count its bytes as waiting to be sent, or with -1 no more. A parked message counts as parked."""
        if self.lane is not None:
            self.assignment.tracker.count_unsent(sign * self.size_bytes)

    def complete(self) -> None:
        """Mark the offsets done."""
        for fetch, index, _ in self.items:
            fetch.assignment.tracker.complete(fetch.block, (index,))

    def end(self, *, is_written: bool, refusal: tuple[str, KafkaError] | None = None) -> None:
        """Say what became of it. A refusal is judged only while an assignment is here."""
        if self.size_bytes >= _COUNTED_BYTES:
            self.count_bytes(-1)
        self.is_written = is_written
        if refusal is not None:
            self.refusal = refusal if any(item[0].assignment.active for item in self.items) else None
        self.then(self)


#: Takes what became of a submission: called once, on the poll thread.
Then = Callable[[Submission], None]


class Submits(Protocol):
    """The face of an outbox for those who have something for it."""

    def submit(
        self, items: Sequence[Item], messages: Sequence[Result], then: Then, lane: ConsumerLane | None = None
    ) -> None:
        """Have messages written, and then these items done. Any thread; of a lane, its holder.

        Later submissions of the same `lane` are not written before them.
        """


def why_refused(topic: str, error: KafkaError, principal: str) -> str:
    """Return why a topic does not take a message; where a right is missing, with the command that grants it."""
    if not is_missing_right(error):
        return reason(error)
    text = missing_right_text(f"nothing can be written to {topic}", [topic_right(Operation.WRITE, topic)], principal)
    if error.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
        # Since Kafka 2.8 whoever may write to a topic may do so idempotently.
        text += "; a broker before 2.8 asks for --operation IdempotentWrite --cluster as well"
    return f"{text} ({reason(error)})"


class Outbox(ABC):
    """A transport: the plain one, or that in Kafka transactions. The poll thread's, save where it says otherwise."""

    #: Whether submissions move on by `serve` alone, so that the poll thread must come back soon.
    needs_serving = False

    def __init__(self) -> None:
        # Any thread appends, without a lock: holders of lanes are many, and would stand in line for it (measured: half
        # of the throughput).
        self._queue: deque[Submission] = deque()
        # What was taken from the queue, and has not ended.
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
        """Take where to send. Before the poll thread starts."""

    @abstractmethod
    def serve(self) -> None:
        """Do what is due, and wait for nothing."""

    @abstractmethod
    def due_in(self) -> float:
        """Return the seconds after which `serve` has something to do."""

    @property
    def waiting(self) -> int:
        """How many submissions have not ended."""
        return len(self._queue) + len(self._under_way)

    def submissions(self) -> list[Submission]:
        """Return those that have not ended. Any thread: these are copies, each made in one step."""
        return [*self._queue.copy(), *self._under_way.copy()]

    def has_any_of(self, assignments: Sequence[Assignment]) -> bool:
        """Tell whether something of these assignments has not ended."""
        return any(item[0].assignment in assignments for submission in self.submissions() for item in submission.items)

    def state_of(self, assignment: Assignment, offset: int) -> str | None:
        """Return where the results of a message are, in words; None where none are on their way. Any thread."""
        for submission in self.submissions():
            if any(item[0].assignment is assignment and item[2].offset() == offset for item in submission.items):
                topics = ", ".join(sorted({message.topic for message in submission.messages}))
                return f"what its handler returned is being written to {topics}"
        return None

    def expedite(self) -> None:  # noqa: B027 - a hook
        """Send what is there without waiting for more."""

    def flush(self, timeout: float) -> None:  # noqa: B027 - a hook
        """Wait at most so many seconds until what is there has ended, before the group is left."""

    def close(self) -> None:  # noqa: B027 - a hook
        """Close what it has open, once the group was left; nobody waits for that."""


class ResultRefusedError(PenstockError):
    """A broker refused what a handler returned."""


class Tries(NamedTuple):
    """How often a message was handed over to its handler before, and since when on the engine's clock."""

    attempts: int
    since: float


@dataclass(frozen=True, slots=True, eq=False)
class RefusedResults:
    """Put on a lane instead of a woken key: a message whose results were refused."""

    item: Item
    tries: Tries | None
    error: ResultRefusedError


class HandlerResults:
    """Submits what handlers return. Its counts are written by the poll thread.

    The brokers take the producer for `principal`.
    """

    def __init__(self, outbox: Submits, wake: Callable[[ConsumerLane, RefusedResults], None], principal: str) -> None:
        self._outbox = outbox
        # Bound once: it is the same for nearly all messages.
        self._then = self._ended
        #: Puts a refusal on a lane, and has the lane served.
        self.wake = wake
        self._principal = principal
        #: Messages whose results are all written, and those results.
        self.handled = 0
        self.published = 0

    def submit(
        self,
        lane: ConsumerLane,
        items: Sequence[Item],
        results: Sequence[Result],
        tries: Sequence[Tries] | None = None,
    ) -> None:
        """Have results written, and then these messages done. By the holder of their lane.

        `tries` are those of each message, where some were tried before.
        """
        then = self._then if tries is None else partial(self._ended, tries=tries)
        self._outbox.submit(items, results, then, lane)

    def _ended(self, submission: Submission, tries: Sequence[Tries] | None = None) -> None:
        """Count what is written; fail each message whose results were refused."""
        if submission.is_written:
            self.handled += len(submission.items)
            self.published += len(submission.messages)
        elif submission.refusal is not None and submission.lane is not None:
            topic, error = submission.refusal
            refusal = ResultRefusedError(
                f"{topic} does not take what a handler returned: {why_refused(topic, error, self._principal)}; change "
                "the handler or the topic"
            )
            if is_missing_right(error):
                # Its messages fail, by the retry policies of their handlers: a policy does not say what is missing.
                _log.error("%s", refusal, extra=once_in(LOG_AGAIN_S, (self._principal, topic)))
            for place, item in enumerate(submission.items):
                self.wake(submission.lane, RefusedResults(item, None if tries is None else tries[place], refusal))
