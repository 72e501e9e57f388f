"""Dead letters: messages whose retries are exhausted, written to another topic before their offset is done.

Workers put them here; the poll thread alone sends them and hears of their delivery. The key stays parked until the
broker has acknowledged, so nothing of it is handled out of order should the process die in between. A dead letter
that cannot be written holds its offset, says so, and is tried again.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from penstock.consumer.assignments import Fetch
from penstock.consumer.retries import Timers
from penstock.kafka import reason
from penstock.message import Record
from penstock.routing import ParkedKey

_log = logging.getLogger(__name__)

#: Seconds before a dead letter that could not be written is tried again.
RESEND_AFTER_S = 5.0
#: Characters kept of a stack trace and of an error's text.
_MAX_STACK_CHARS = 8192
_MAX_TEXT_CHARS = 1024


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An exhausted message, why it failed, and the parked key it is the head of."""

    fetch: Fetch
    index: int
    record: Record
    error: BaseException
    parked: ParkedKey[Fetch, Record]
    lane: int
    key: Hashable


class DeadLetterQueue:
    """Takes dead letters from workers (`put`, any thread); everything else is the poll thread's.

    Args:
        group: the consumer group, for the headers.
        timers: where a dead letter waits to be sent again.
        settle: called with each dead letter that is durable.
    """

    def __init__(self, group: str, timers: Timers, settle: Callable[[DeadLetter], None]) -> None:
        self._group = group
        self._timers = timers
        self._settle = settle
        self._outbox: deque[DeadLetter] = deque()
        self._producer: Producer | None = None
        self._unacknowledged = 0
        #: Dead letters written, and sends that failed. Written by the poll thread.
        self.written = 0
        self.failures = 0

    def connect(self, client_config: Mapping[str, Any]) -> None:
        """Make the producer. Before the poll thread starts."""
        self._producer = Producer({**client_config, "enable.idempotence": True, "linger.ms": 5})

    def put(self, letter: DeadLetter) -> None:
        """Hand a dead letter over; its key must be parked."""
        self._outbox.append(letter)

    @property
    def waiting(self) -> int:
        """How many are not durable yet."""
        return len(self._outbox) + self._unacknowledged

    def serve(self) -> None:
        """Send what was put, hear what was delivered."""
        if self._producer is None:
            return
        while self._outbox:
            self._send(self._producer, self._outbox.popleft())
        if self._unacknowledged:
            self._producer.poll(0)

    def flush(self, timeout: float) -> None:
        """Wait for deliveries, at most `timeout` seconds."""
        self.serve()
        if self._producer is not None and self._unacknowledged:
            self._producer.flush(timeout)

    def _send(self, producer: Producer, letter: DeadLetter) -> None:
        if not letter.fetch.assignment.active:
            self._settle(letter)
            return

        def delivered(error: KafkaError | None, _message: object) -> None:
            self._unacknowledged -= 1
            if error is None:
                self.written += 1
                _log.warning(
                    "%s@%d is a dead letter in %s after %d tries (%s)",
                    letter.fetch.assignment,
                    letter.record.offset(),
                    _topic(letter),
                    letter.parked.attempts,
                    type(letter.error).__name__,
                )
                self._settle(letter)
            else:
                self._hold(letter, reason(error))

        try:
            producer.produce(
                _topic(letter),
                key=letter.record.key(),
                value=letter.record.value(),
                headers=_headers(letter, self._group),
                on_delivery=delivered,
            )
        except (KafkaException, BufferError) as error:
            self._hold(letter, reason(error) if isinstance(error, KafkaException) else str(error))
        else:
            self._unacknowledged += 1

    def _hold(self, letter: DeadLetter, why: str) -> None:
        self.failures += 1
        _log.error(
            "%s@%d cannot be written to %s: %s; its offset and its key are held, next try in %g s",
            letter.fetch.assignment,
            letter.record.offset(),
            _topic(letter),
            why,
            RESEND_AFTER_S,
        )
        self._timers.add(time.monotonic() + RESEND_AFTER_S, letter)


def _topic(letter: DeadLetter) -> str:
    return letter.fetch.assignment.handler.dead_letter_topic.replace("{topic}", letter.record.topic())


def _headers(letter: DeadLetter, group: str) -> list[tuple[str, str | bytes | None]]:
    """Return the message's own headers and Kafka's dead-letter headers (KIP-1191, all text), the latter last."""
    record, error = letter.record, letter.error
    try:
        own = list(record.headers() or ())
        unreadable: list[tuple[str, str | bytes | None]] = []
    except UnicodeDecodeError:
        # A header's name may be any bytes on the wire; the client cannot carry such a name over.
        own, unreadable = [], [("penstock-headers-lost", "a header name is not UTF-8")]
    stack = "".join(traceback.format_exception(error))[-_MAX_STACK_CHARS:]
    return [
        *own,
        *unreadable,
        ("__dlq.errors.topic", record.topic()),
        ("__dlq.errors.partition", str(record.partition())),
        ("__dlq.errors.offset", str(record.offset())),
        ("__dlq.errors.group", group),
        ("__dlq.errors.delivery.count", str(letter.parked.attempts)),
        ("__dlq.errors.message", _text(str(error)[:_MAX_TEXT_CHARS])),
        ("penstock-exception-class", f"{type(error).__module__}.{type(error).__qualname__}"),
        ("penstock-exception-stack", _text(stack)),
    ]


def _text(text: str) -> bytes:
    """Return UTF-8, whatever surrogates an error's text holds."""
    return text.encode("utf-8", "backslashreplace")


__all__ = ["RESEND_AFTER_S", "DeadLetter", "DeadLetterQueue"]
