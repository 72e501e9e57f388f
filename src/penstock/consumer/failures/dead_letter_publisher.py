"""The dead-letter publisher: it writes messages whose tries are exhausted to another topic; then their offset is done.

Holders of lanes put them here; the poll thread alone sends them and serves their delivery reports. The key stays parked
until the broker has acknowledged, so nothing of it is handled out of order should the process die in between. A message
that cannot be written holds its offset, is logged, and is sent again.

One that is too large for its topic would be refused for ever. A dead letter then sheds what we added, the stack first;
one for a retry topic is given up at once, as its handler says. What no topic takes stops the consumer: the offset
stays, and nothing waits in silence.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.cluster import Clock
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import THIS_CLIENT, Operation, missing_right_text, topic_right
from penstock.consumer.assignments import Assignment, Fetch, Item
from penstock.consumer.failures.dead_letter_reasons import DeadLetterReasons
from penstock.consumer.failures.failure_text import attached, failure_text
from penstock.consumer.failures.limits import DeadLetterLimits
from penstock.consumer.failures.timers import Timers
from penstock.consumer.handlers.options.handler_options import OnFailure
from penstock.consumer.handlers.results import Result
from penstock.consumer.publishing.outlet import Outlet
from penstock.consumer.retry_topics import headers as retry_headers
from penstock.consumer.retry_topics import origin_of, retry_topic, tries_before
from penstock.dead_letters.headers import DeadLetterOrigin, HeaderList, write
from penstock.errors import PenstockError, class_name
from penstock.message import Record, position_of

_log = logging.getLogger(__name__)

#: Seconds before a message that could not be written is sent again.
RESEND_AFTER_S = 5.0

#: Seconds between two log lines about a missing right: all messages for a topic lack the same.
_LOG_AGAIN_S = 60.0

#: Characters that are left of a text in a dead letter that must be small.
_SHORT_CHARS = 64
#: What a broker answers about a message that its topic will never take.
NEVER_TAKEN = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_RECORD})

Trace = Callable[[str, HeaderList], HeaderList]


class Shed(Enum):
    """What a dead letter leaves out of what we add, so that its topic takes it."""

    NOTHING = "nothing"
    STACK = "the stack"
    TEXTS = "the stack and most of the texts"


_NEXT_SHED = {Shed.NOTHING: Shed.STACK, Shed.STACK: Shed.TEXTS}


@dataclass(frozen=True, slots=True)
class ExhaustedMessage:
    """An exhausted message, what its last try raised, and what the poll thread calls when it is settled."""

    item: Item = field(repr=False)
    error: BaseException = field(repr=False)
    #: How often it was tried here.
    attempts: int
    #: For the retry topic, how often it has been there; None for the dead-letter topic.
    retry: int | None
    #: Completes its offset: called once, when the broker has it. Any thread.
    complete: Callable[[], None] = field(repr=False)
    #: Called by the poll thread after that: its key goes on.
    on_done: Callable[[], None] = field(repr=False)
    #: Called instead of that where no retry topic takes it and its handler holds it then, or where somebody asked for
    #: it and the dead-letter topic never takes it.
    hold: Callable[[], None] = field(repr=False)
    #: What its headers leave out.
    shed: Shed = Shed.NOTHING
    #: Whether it is sent again.
    again: bool = False
    #: Whether somebody asked for it: then no limit counts it, and a topic that never takes it stops nothing.
    is_asked_for: bool = False

    @property
    def fetch(self) -> Fetch:
        """What brought it."""
        return self.item[0]

    @property
    def record(self) -> Record:
        """The message as it was fetched."""
        return self.item[2]

    @property
    def place(self) -> tuple[Assignment, int]:
        """What it was fetched from, and its offset there."""
        return self.fetch.assignment, self.record.offset()


class DeadLetterPublisher:
    """Takes exhausted messages from any thread (`publish`); everything else is the poll thread's."""

    def __init__(
        self,
        group: str,
        clock: Clock,
        timers: Timers,
        limits: DeadLetterLimits,
        *,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._group = group
        self._clock = clock
        self._timers = timers
        #: What stops a consumer that gives up everything. Thread-safe: drops ask it too.
        self.limits = limits
        self._queue: deque[ExhaustedMessage] = deque()
        self._outlet: Outlet | None = None
        # When it was logged last that a right is missing, by topic.
        self._logged_at: dict[str, float] = {}
        self._unacknowledged = 0
        self._held = 0
        #: Passes the headers on with a trace in them, where telemetry is on. Set before the start.
        self.trace: Trace | None = None
        #: Whom the brokers take the producer for.
        self.principal = THIS_CLIENT
        #: Stops the consumer.
        self.fail = fail
        #: Where each message is, in words. Any thread: operations of a `dict` are atomic.
        self.states: dict[tuple[Assignment, int], str] = {}
        #: Messages that their handler drops because no retry topic takes them. Written by the poll thread.
        self.dropped = 0
        #: Dead letters written, messages written to retry topics, and sends that failed. Written by the poll thread.
        self.dead_letters = 0
        self.reasons = DeadLetterReasons()
        self.retries = 0
        self.failures = 0

    def connect(self, outlet: Outlet, principal: str = THIS_CLIENT) -> None:
        """Take what writes, and whom the brokers take it for. Before the poll thread starts."""
        self._outlet, self.principal = outlet, principal

    def publish(self, message: ExhaustedMessage) -> None:
        """Have a message written; its key must be parked. Any thread."""
        self.states[message.place] = "it is about to be written to another topic"
        self._queue.append(message)

    @property
    def waiting(self) -> int:
        """How many are on their way."""
        return len(self._queue) + self._unacknowledged

    @property
    def unwritten(self) -> int:
        """How many are not written yet: on their way, or waiting to be sent again."""
        return self.waiting + self._held

    def serve(self) -> None:
        """Send what was published, serve delivery reports."""
        if self._outlet is None:
            return
        while self._queue:
            self._send(self._outlet, self._queue.popleft())
        if self._unacknowledged:
            self._outlet.poll()

    def flush(self, timeout: float) -> None:
        """Wait for deliveries of what was sent, at most `timeout` seconds. What was not sent yet stays so."""
        if self._outlet is not None and self._unacknowledged:
            self._outlet.flush(timeout)

    def _send(self, outlet: Outlet, message: ExhaustedMessage) -> None:
        if not message.fetch.assignment.active:
            # Its next owner handles it again. The key is woken for what waits behind it.
            self._finish(message, message.on_done)
            return
        if message.retry is None and not message.again and not message.is_asked_for:
            self.limits.check(position_of(message.record), message.error)
        topic, headers = self._addressed(message)
        if self.trace is not None:
            headers = self.trace(topic, headers)

        def delivered(error: KafkaError | None) -> None:
            self._unacknowledged -= 1
            if error is None:
                self._written(message, topic)
                self._finish(message, message.on_done)
            elif not message.fetch.assignment.active:
                # As above.
                self._finish(message, message.on_done)
            else:
                self.not_written(message, topic, error)

        try:
            outlet.forward(
                message.item,
                Result(topic, message.record.value(), message.record.key(), headers, -1),
                message.complete,
                delivered,
            )
        except KafkaException as error:
            self.not_written(message, topic, error.args[0])
        except BufferError as error:
            self._hold(message, topic, str(error))
        else:
            self.states[message.place] = f"it is being written to {topic}"
            self._unacknowledged += 1

    def _finish(self, message: ExhaustedMessage, then: Callable[[], None]) -> None:
        self.states.pop(message.place, None)
        then()

    def not_written(self, message: ExhaustedMessage, topic: str, error: KafkaError) -> None:
        """Decide what becomes of a message that its topic did not take."""
        if error.code() in NEVER_TAKEN:
            self._refused(message, topic, error)
        else:
            self._hold(message, topic, self.why(topic, error), for_topic=is_missing_right(error))

    def _refused(self, message: ExhaustedMessage, topic: str, error: KafkaError) -> None:
        """Handle a message that its topic will never take as it is."""
        self.failures += 1
        handler = message.fetch.assignment.route.handler
        place = position_of(message.record)
        if message.retry is not None and handler.on_failure is not OnFailure.STOP:
            _log.error(
                "%s is not taken by %s: %s; it %s\n%s",
                place,
                topic,
                reason(error),
                "is held" if handler.on_failure is OnFailure.HOLD else "is given up at once",
                failure_text(message.error),
                extra=attached(message.error),
            )
            if handler.on_failure is OnFailure.DEAD_LETTER:
                self._queue.append(replace(message, retry=None, again=False))
            elif handler.on_failure is OnFailure.HOLD:
                self._finish(message, message.hold)
            else:
                self.dropped += 1
                message.complete()
                self._finish(message, message.on_done)
            return
        if message.retry is None and message.shed in _NEXT_SHED and error.code() != KafkaError.INVALID_RECORD:
            smaller = replace(message, shed=_NEXT_SHED[message.shed], again=True)
            _log.warning("%s is too large for %s, and is written without %s", place, topic, smaller.shed.value)
            self._queue.append(smaller)
            return
        if message.is_asked_for:
            _log.error("%s was to be given up, and %s does not take it: %s; it stays", place, topic, reason(error))
            self._finish(message, message.hold)
            return
        self._held += 1
        self.states[message.place] = f"{topic} does not take it: {reason(error)}"
        stop = PenstockError(
            f"{place} was given up after {message.attempts} tries, and {topic} does not take it, without what we add "
            f"either: {reason(error)}; {self.limits.ends}: raise max.message.bytes of {topic}, or choose on_failure "
            "'drop' for it"
        )
        stop.__cause__ = message.error
        self.fail(stop)

    def _addressed(self, message: ExhaustedMessage) -> tuple[str, HeaderList]:
        """Return the topic a message goes to, and its headers."""
        assignment = message.fetch.assignment
        handler = assignment.route.handler
        source = assignment.route.source or assignment.topic
        if message.retry is not None:
            delay = handler.retry_delays[message.retry]
            due = self._clock.time() + delay
            fields = retry_headers(message.record, source, message.retry + 1, due, message.attempts)
            return retry_topic(self._group, source, delay), fields
        tries = tries_before(message.record, source) + message.attempts
        origin = DeadLetterOrigin.of(message.record, message.error, group=self._group, attempts=tries)
        if message.shed is not Shed.NOTHING:
            origin = replace(origin, stack=None)
        if message.shed is Shed.TEXTS:
            origin = replace(
                origin,
                message=(origin.message or "")[:_SHORT_CHARS],
                exception=(origin.exception or "")[-_SHORT_CHARS:],
            )
        # Not the retry topic's: whoever searches for the message needs its first place.
        topic, partition, offset = origin_of(message.record, source)
        origin = replace(origin, topic=topic, partition=partition, offset=offset)
        return handler.dead_letter_topic.replace("{topic}", source), write(
            handler.dead_letter_format, message.record, origin
        )

    def _written(self, message: ExhaustedMessage, topic: str) -> None:
        self._logged_at.pop(topic, None)
        if message.retry is None:
            self.dead_letters += 1
            source = message.fetch.assignment.route.source or message.fetch.assignment.topic
            origin, *place = origin_of(message.record, source)
            self.reasons.count(origin, topic, class_name(message.error), (place[0], place[1]), self._clock.monotonic())
        else:
            self.retries += 1
        _log.log(
            logging.WARNING if message.retry is None else logging.INFO,
            "%s is in %s after %d tries (%s)",
            position_of(message.record),
            topic,
            message.attempts,
            type(message.error).__name__,
        )

    def why(self, topic: str, error: KafkaError) -> str:
        """Return why a message was not written; where a right is missing, with what gives it."""
        if not is_missing_right(error):
            return reason(error)
        text = missing_right_text(
            f"nothing can be written to {topic}", [topic_right(Operation.WRITE, topic)], self.principal
        )
        if error.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            # Since Kafka 2.8 whoever may write to a topic may do so idempotently.
            text += "; a broker before 2.8 asks for --operation IdempotentWrite --cluster as well"
        return f"{text} ({reason(error)})"

    def _hold(self, message: ExhaustedMessage, topic: str, why: str, *, for_topic: bool = False) -> None:
        """Keep a message that could not be written, and send it again after a while.

        With `for_topic`, which says that nothing gets into the topic, that is logged once in a while, not for each.
        """
        self.failures += 1
        now = self._clock.monotonic()
        if not for_topic or now - self._logged_at.get(topic, -_LOG_AGAIN_S) >= _LOG_AGAIN_S:
            if for_topic:
                self._logged_at[topic] = now
            _log.error(
                "%s cannot be written to %s: %s; its offset and its key are held, next try in %g s",
                position_of(message.record),
                topic,
                why,
                RESEND_AFTER_S,
            )
        self._held += 1
        self.states[message.place] = f"it cannot be written to {topic}: {why}"
        self._timers.add(now + RESEND_AFTER_S, partial(self._resend, replace(message, again=True)))

    def _resend(self, message: ExhaustedMessage) -> None:
        self._held -= 1
        self._queue.append(message)
