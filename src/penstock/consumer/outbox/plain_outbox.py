"""The plain outbox: one idempotent producer, at least once. All but `submit` is the poll thread's.

Submissions are sent in their order without a wait between two of them, so what a key's messages leave behind stands in
their order too. While brokers are away the producer keeps what it has: nothing times out, unless the user's own
`message.timeout.ms` says so. A refusal is that of one submission; those behind it were sent already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.cluster import Cluster
from penstock.clients.kafka_errors import reason
from penstock.clients.renewal import LastingProducer
from penstock.consumer.outbox.outbox import Outbox, Submission

_log = logging.getLogger(__name__)

#: What is reported of a message that no broker answered in its time, or that a producer had which failed for ever.
_NOBODYS_FAULT = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,  # noqa: SLF001 - the client library's names of its local errors look so, here and below
        KafkaError._PURGE_QUEUE,  # noqa: SLF001 - as above
        KafkaError._PURGE_INFLIGHT,  # noqa: SLF001 - as above
        KafkaError._FATAL,  # noqa: SLF001 - as above
    }
)


class PlainOutbox(Outbox):
    """Sends with a producer, which is replaced when it has failed for ever."""

    needs_serving = True

    def __init__(self) -> None:
        super().__init__()
        self._make_producer: Callable[[], LastingProducer]
        self._producer: LastingProducer | None = None
        # What the producer has, in the order in which it was submitted. Others read copies, made in one step.
        self._sent: dict[Submission, None] = {}
        # Places of what nobody knows whether it was written.
        self._lost: dict[Submission, list[int]] = {}

    def connect(self, cluster: Cluster, config: Mapping[str, Any], *, at_once: bool) -> None:
        """As `Outbox` says; else the producer is made for the first submission."""
        self._make_producer = partial(LastingProducer, partial(cluster.producer, config), cluster.clock)
        if at_once:
            self._connected()

    @property
    def waiting(self) -> int:
        """As `Outbox` says."""
        return len(self._queue) + len(self._sent)

    def submissions(self) -> list[Submission]:
        """As `Outbox` says."""
        # In this order: what moves on meanwhile is in both, never in none.
        return [*self._queue.copy(), *self._sent.copy()]

    def serve(self) -> None:
        """Send what was submitted, and serve delivery reports."""
        if self._queue or self._sent:
            producer = self._connected()
            self._send_waiting(producer)
            producer.poll(0)

    def flush(self, timeout: float) -> None:
        """As `Outbox` says."""
        self.serve()
        if self._sent and self._producer is not None:
            self._producer.flush(timeout)

    def _connected(self) -> LastingProducer:
        if self._producer is None:
            self._producer = self._make_producer()
        return self._producer

    def _send_waiting(self, producer: LastingProducer) -> None:
        """Send as much as the producer takes, in the order in which it was submitted."""
        if producer.failure is not None and not self._is_replaced(producer):
            return
        while self._queue:
            submission = self._queue[0]
            if submission.is_gone and submission not in self._sent:
                self._queue.popleft().end(is_written=False)
                continue
            self._sent[submission] = None
            while submission.sent < len(submission.to_send):
                # Before: a refusal at once may be the last answer that it waits for.
                submission.sent += 1
                if not self._send(producer, submission, submission.sent - 1):
                    submission.sent -= 1
                    return
            self._queue.popleft()

    def _is_replaced(self, producer: LastingProducer) -> bool:
        """Replace a client that failed, and queue again what it had: nobody knows whether that was written."""
        failure = producer.failure
        if not producer.renew():
            return False
        if failure is not None:
            _log.warning("the producer failed, and another sends again what it had: %s", reason(failure))
        if self._queue and self._queue[0] in self._sent:
            self._sent[self._queue.popleft()] = None
        for submission in reversed(self._sent):
            lost = [submission.to_send[place] for place in sorted(self._lost.get(submission, ()))]
            submission.to_send = [*lost, *submission.to_send[submission.sent :]]
            submission.sent = 0
            self._queue.appendleft(submission)
        self._lost.clear()
        self._sent.clear()
        return True

    def _send(self, producer: LastingProducer, submission: Submission, place: int) -> bool:
        """Give the producer a message; return whether it took it, or refused it. Else it is tried again soon."""
        message = submission.to_send[place]
        try:
            producer.produce(
                message.topic,
                message.value,
                message.key,
                partition=message.partition,
                headers=message.headers,
                on_delivery=partial(self._delivered, submission, place),
            )
        except BufferError:
            return False
        except KafkaException as error:
            if producer.failure is not None:
                # A new client is made once all that the failed one had was reported.
                return False
            self._answered(submission, place, error.args[0])
        return True

    def _delivered(self, submission: Submission, place: int, error: KafkaError | None, _written: object) -> None:
        is_nobodys = error is not None and (error.fatal() or error.code() in _NOBODYS_FAULT)
        if error is None or not is_nobodys or submission.lane is None:
            # Nothing waits behind a parked message: who gave it up says why it is not written, and submits it again.
            self._answered(submission, place, error)
            return
        # What was sent later is to be written after it.
        self._connected().give_up(error)
        self._lost.setdefault(submission, []).append(place)

    def _answered(self, submission: Submission, place: int, error: KafkaError | None) -> None:
        if error is not None and submission.refusal is None:
            submission.refusal = submission.to_send[place].topic, error
        submission.left -= 1
        if submission.left:
            return
        # Before it is gone: who waits for what is on its way must see the offsets done, or the lane woken.
        refusal = submission.refusal
        if refusal is None:
            submission.complete()
        submission.end(is_written=refusal is None, refusal=refusal)
        del self._sent[submission]
