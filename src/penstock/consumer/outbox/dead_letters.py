"""The dead-letter publisher: sends exhausted messages to a retry topic or a dead-letter topic, and limits their number.

The holder of a lane gives up a message. The outbox writes it to its retry topic or its dead-letter topic, and then its
offset is done. Its key stays parked until then. So a crash in between cannot change the order of its key. A message
that its topic refuses holds its offset, is logged, and is sent again.

A message that is too large for its topic would be refused for ever. A dead letter is then sent without the stack and
most of the texts. A message for a retry topic is given up at once, by its handler's `on_failure`. A message that no
topic takes stops the consumer: the offset stays, and nothing waits in silence. A consumer that loses all its messages
should stop too, instead of emptying its topics: see `DeadLetterLimits`.

Any thread calls `publish`. The poll thread notes the outcomes, alone writes the counts, and sends again by a timer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

from confluent_kafka import KafkaError

from penstock import options as check
from penstock.clients.cluster import Clock
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.ration import once_in, rationed
from penstock.consumer.assignments import Assignment, Item, size_in_bytes
from penstock.consumer.failure_text import short_text
from penstock.consumer.handlers.results import Result, Trace
from penstock.consumer.outbox.outbox import LOG_AGAIN_S, Submission, Submits, why_refused
from penstock.consumer.retry_topics import first_place, retry_topic, tries_before
from penstock.consumer.retry_topics import headers as retry_headers
from penstock.consumer.timers import Timers
from penstock.dead_letters.headers import DeadLetterOrigin, HeaderList, write
from penstock.errors import ConfigurationError, PenstockError, class_name
from penstock.message import Record, position_of
from penstock.places import counted
from penstock.routing import KeyState

_log = rationed(__name__)


@dataclass(frozen=True, slots=True)
class DeadLetterLimit:
    """A limit on messages given up, as dead letters or dropped. The consumer stops before it exceeds the limit.

    Give `consecutive`, `ratio` or both.

    Attributes:
        consecutive: most messages given up with none handled in between; None for no limit.
        ratio: largest part of all done messages that may be given up, from 0 to 1; None for no limit.
        at_least: messages that must be done before the ratio counts.
    """

    consecutive: int | None = None
    ratio: float | None = None
    at_least: int = 100

    def __post_init__(self) -> None:
        if self.consecutive is None and self.ratio is None:
            raise ConfigurationError(
                "DeadLetterLimit() sets no limit; give consecutive= or ratio=, or leave dead_letter_limit out"
            )
        if self.consecutive is not None:
            check.positive_int("consecutive", self.consecutive)
        if self.ratio is not None:
            check.positive("ratio", self.ratio)
            if self.ratio > 1:
                raise ConfigurationError(f"ratio must lie above 0 and at most at 1, but is {self.ratio!r}")
        check.positive_int("at_least", self.at_least)


class DeadLetterLimits:
    """Counts messages given up against a limit. Thread-safe: the holders of lanes count."""

    def __init__(self, limit: DeadLetterLimit | None, handled: Callable[[], int]) -> None:
        self._limit = limit
        self._handled = handled
        #: What happens to the message that stops the consumer, in words. A task of Spark writes its own.
        self.ends = "its offset stays"
        # Guards the fields below.
        self._lock = threading.Lock()
        self._count = 0
        self._in_a_row = 0
        self._handled_then = 0

    def refusal(self, place: str) -> str | None:
        """Count a message that is about to be given up; return the reason if the limit forbids it, else None."""
        limit = self._limit
        if limit is None:
            return None
        with self._lock:
            handled = self._handled()
            self._in_a_row = in_a_row = self._in_a_row + 1 if handled == self._handled_then else 1
            self._handled_then = handled
            self._count += 1
            count = self._count
        done = count + handled
        if limit.consecutive is not None and in_a_row > limit.consecutive:
            why = f"{limit.consecutive} messages were given up in a row with none handled in between"
        elif limit.ratio is not None and done >= limit.at_least and count > limit.ratio * done:
            why = f"{count - 1} of {done - 1} messages were given up, and the limit is {limit.ratio:g} of all"
        else:
            return None
        return f"{why}: {place} is not given up and {self.ends}; find what fails every message, then start again"


#: Number of reasons that are counted separately. All others are counted together.
_MOST_REASONS = 50
_OTHERS = "other errors"


@dataclass(frozen=True, slots=True)
class DeadLetterReason:
    """Dead letters of one topic and one class of error.

    Attributes:
        topic: topic that they came from, not a retry topic.
        dead_letter_topic: topic that they were written to.
        error: class of the error of the last try.
        count: number of dead letters.
        partition: partition of the last one, in `topic`.
        offset: offset of the last one.
        at: when the last one was written, on the engine's clock.
    """

    topic: str
    dead_letter_topic: str
    error: str
    count: int
    partition: int
    offset: int
    at: float


#: Seconds until a refused message is sent again.
RESEND_AFTER_S = 5.0

#: Length of texts in a dead letter that must be small.
_SHORT_CHARS = 64
#: Errors of a broker for a message that its topic will never take.
NEVER_TAKEN = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_RECORD})


class NoRetryError(Exception):
    """A retry topic will never take a message, so `on_failure` decides. `failure` is the error of its last try."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__()
        self.failure = failure


#: Lets the key of an exhausted message go on. Called once, by any thread, with the new state of the key's head.
#: Keywords: `error`, a new failure of the message; `why_not`, the reason why there is no dead letter.
Settle = Callable[..., None]


@dataclass(frozen=True, slots=True)
class ExhaustedMessage:
    """An exhausted message, the error of its last try, and the callback for its outcome."""

    item: Item = field(repr=False)
    error: BaseException = field(repr=False)
    #: Number of tries since it was fetched.
    attempts: int
    #: For a retry topic, the number of former rounds; None for the dead-letter topic.
    retry: int | None
    settle: Settle = field(repr=False)
    #: If it is given up by request, the former state of its key. It returns there if no topic takes the message, and
    #: `DeadLetterLimits` do not count it.
    asked_at: KeyState | None = None
    #: Whether its headers omit the stack and most of the texts.
    is_short: bool = False

    @property
    def assignment(self) -> Assignment:
        """The assignment that it was fetched from."""
        return self.item[0].assignment

    @property
    def record(self) -> Record:
        """The message as it was fetched."""
        return self.item[2]

    @property
    def tries(self) -> int:
        """The number of its tries in all rounds."""
        return tries_before(self.record, self.assignment.source) + self.attempts

    @property
    def form(self) -> str:
        """What was left out of its headers, as the end of a sentence."""
        return ", even without the stack and most of the texts" if self.is_short else ""

    @property
    def place(self) -> tuple[Assignment, int]:
        """Its assignment and offset."""
        return self.assignment, self.record.offset()


@dataclass(slots=True, eq=False, repr=False)
class DeadLetterPublisher:
    """Submits exhausted messages, and acts on the answers of their topics."""

    group: str
    clock: Clock
    timers: Timers
    #: Stops a consumer that gives up too many messages.
    limits: DeadLetterLimits
    outbox: Submits
    _: KW_ONLY
    #: The user that the brokers see behind the producer.
    principal: str
    #: Stops the consumer.
    fail: Callable[[BaseException], None]
    #: Adds a trace to headers. Set before the start if telemetry is on.
    trace: Trace | None = field(default=None, init=False)
    #: The last refusal of each message that is not written yet, in words. Any thread, because operations of a `dict`
    #: are atomic.
    states: dict[tuple[Assignment, int], str] = field(default_factory=dict, init=False)
    #: Number of dead letters written.
    dead_letters: int = field(default=0, init=False)
    #: Dead letters written, by topic, dead-letter topic and error.
    reasons: dict[tuple[str, str, str], DeadLetterReason] = field(default_factory=dict, init=False)
    #: Number of messages written to retry topics, and of refusals.
    retries: int = field(default=0, init=False)
    failures: int = field(default=0, init=False)
    # The messages that wait to be sent again. Operations of a `dict` are atomic.
    _refused: dict[tuple[Assignment, int], None] = field(default_factory=dict, init=False)

    @property
    def held(self) -> int:
        """The number of refused messages that wait to be sent again."""
        return len(self._refused)

    def publish(self, message: ExhaustedMessage) -> None:
        """Send a message to its topic. Its key must be parked. Any thread."""
        self._refused.pop(message.place, None)
        if not message.assignment.active:
            self._settle_gone(message)
            return
        topic, headers = self._addressed(message)
        if self.trace is not None:
            headers = self.trace(topic, headers)
        result = Result(topic, message.record.value(), message.record.key(), headers, -1)
        self.outbox.submit((message.item,), (result,), partial(self._ended, message))

    def _settle(self, message: ExhaustedMessage, state: KeyState, **details: Any) -> None:
        self.states.pop(message.place, None)
        message.settle(state, **details)

    def _ended(self, message: ExhaustedMessage, submission: Submission) -> None:
        if submission.refusal is not None:
            self._judge(message, *submission.refusal)
        elif submission.is_written:
            message.assignment.tracker.park(-1, -size_in_bytes(message.record))
            self._note_written(message, submission.messages[0].topic)
            self._settle(message, KeyState.DONE)
        else:
            self._settle_gone(message)

    def _settle_gone(self, message: ExhaustedMessage) -> None:
        """Let the key go on: another member has its partition and handles the message again."""
        why = f"{position_of(message.record)} went to another member of the group before it was written"
        self._settle(message, KeyState.DONE, why_not=why)

    def _note_written(self, message: ExhaustedMessage, topic: str) -> None:
        if message.retry is None:
            self.dead_letters += 1
            origin, partition, offset, _ = first_place(message.record, message.assignment.source)
            why = (origin, topic, class_name(message.error))
            if why not in self.reasons and len(self.reasons) >= _MOST_REASONS:
                why = ("", "", _OTHERS)
            count = self.reasons[why].count + 1 if why in self.reasons else 1
            self.reasons[why] = DeadLetterReason(*why, count, partition, offset, self.clock.monotonic())
        else:
            self.retries += 1
        _log.log(
            logging.WARNING if message.retry is None else logging.INFO,
            "%s is in %s after %s: %s",
            position_of(message.record),
            topic,
            counted(message.tries, "try", "tries"),
            short_text(message.error),
        )

    def _judge(self, message: ExhaustedMessage, topic: str, error: KafkaError) -> None:
        """Decide what to do with a message that its topic refused."""
        self.failures += 1
        place = position_of(message.record)
        if error.code() not in NEVER_TAKEN:
            self._send_again(message, topic, error)
        elif message.retry is not None:
            _log.error("%s is not taken by %s: %s; it is given up at once", place, topic, reason(error))
            self._settle(message, KeyState.FAILED, error=NoRetryError(message.error))
        elif not message.is_short and error.code() != KafkaError.INVALID_RECORD:
            _log.warning("%s is too large for %s, and is written without the stack and most of the texts", place, topic)
            self.publish(replace(message, is_short=True))
        elif message.asked_at is not None:
            _log.error("%s was to be given up, and %s does not take it: %s; it stays", place, topic, reason(error))
            why = f"{topic} does not take {place}{message.form}; the log has the cause"
            self._settle(message, message.asked_at, why_not=why)
        else:
            self._stop(message, topic, error)

    def _stop(self, message: ExhaustedMessage, topic: str, error: KafkaError) -> None:
        """Stop the consumer because no topic takes a message."""
        self._hold(message, f"{topic} does not take it: {reason(error)}")
        remedy = f"raise max.message.bytes of {topic}"
        if error.code() == KafkaError.INVALID_RECORD:
            remedy = f"if {topic} is compacted, which takes no message without a key, set its cleanup.policy to delete"
        tries = counted(message.tries, "try", "tries")
        stop = PenstockError(
            f"{position_of(message.record)} was given up after {tries}, and {topic} does not take it{message.form}: "
            f"{reason(error)}; {self.limits.ends}: {remedy}, or choose on_failure 'drop' for it"
        )
        stop.__cause__ = message.error
        self.fail(stop)

    def _hold(self, message: ExhaustedMessage, state: str) -> None:
        self._refused[message.place] = None
        self.states[message.place] = state

    def _send_again(self, message: ExhaustedMessage, topic: str, error: KafkaError) -> None:
        """Keep a message that was refused for now, and send it again by a timer."""
        now, why = self.clock.monotonic(), why_refused(topic, error, self.principal)
        _log.error(
            "%s cannot be written to %s: %s; its offset and its key are held, next try in %g s",
            position_of(message.record),
            topic,
            why,
            RESEND_AFTER_S,
            # A missing permission concerns all messages of the topic, so it is not logged for each of them.
            extra=once_in(LOG_AGAIN_S, (self.group, topic), now) if is_missing_right(error) else None,
        )
        self._hold(message, f"it cannot be written to {topic}: {why}")
        self.timers.add(now + RESEND_AFTER_S, partial(self.publish, message))

    def _addressed(self, message: ExhaustedMessage) -> tuple[str, HeaderList]:
        """Return the topic of a message and its headers."""
        handler, source = message.assignment.route.handler, message.assignment.source
        if message.retry is not None:
            delay = handler.retry_delays[message.retry]
            due = self.clock.time() + delay
            fields = retry_headers(message.record, source, message.retry + 1, due, message.attempts)
            return retry_topic(self.group, source, delay), fields
        origin = DeadLetterOrigin.of(message.record, message.error, group=self.group, attempts=message.tries)
        if message.is_short:
            origin = replace(
                origin,
                stack=None,
                message=(origin.message or "")[:_SHORT_CHARS],
                exception=(origin.exception or "")[-_SHORT_CHARS:],
            )
        # The first place, not the place in the retry topic: a search for the message needs it.
        topic, partition, offset, _ = first_place(message.record, source)
        origin = replace(origin, topic=topic, partition=partition, offset=offset)
        return handler.dead_letter_topic_of(source), write(handler.dead_letter_format, message.record, origin)
