"""The plain outbox: one idempotent producer, at least once.

Submissions are sent in their order without a wait between two of them, so what a key's messages leave behind stands in
their order too. While brokers are away the producer keeps what it has: nothing times out, unless the user's own
`message.timeout.ms` says so. A refusal is that of one submission; those behind it were sent already.

A client that has failed for ever is replaced once it has reported all that it had, so no message of the old one arrives
behind one of the new. What it had is sent again, though it may have been written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property, partial
from math import inf
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.cluster import Cluster, ProducerClient
from penstock.clients.kafka_errors import reason
from penstock.clients.renewal import RENEW_AFTER_S, ClientRenewal
from penstock.consumer.handlers.results import Result
from penstock.consumer.outbox.outbox import Outbox, Submission

_log = logging.getLogger(__name__)

#: Seconds that one poll of a flush waits.
_FLUSH_POLL_S = 0.1
_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - the client library's names of its local errors look so, here and below
#: What is reported of a message that no broker answered in its time, or that a producer had which failed for ever.
_NOBODYS_FAULT = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,  # noqa: SLF001 - as above
        KafkaError._FATAL,  # noqa: SLF001 - as above
        *_PURGED,
    }
)


class PlainOutbox(Outbox):
    """Sends with a producer, which is replaced when it has failed for ever."""

    _cluster: Cluster
    _config: Mapping[str, Any]

    def __init__(self) -> None:
        super().__init__()
        # Messages of the present client that it has not reported yet.
        self._out = 0
        # What the producer has, in the order in which it was submitted.
        self._under_way: dict[Submission, None] = {}

    def connect(self, cluster: Cluster, config: Mapping[str, Any]) -> None:
        """As `Outbox` says."""
        self._cluster, self._config = cluster, config

    @cached_property
    def _clients(self) -> ClientRenewal[ProducerClient]:
        """The producer, made for the first submission, and its successors."""
        return ClientRenewal(
            partial(self._cluster.producer, self._config),
            # One that failed is dropped: it has reported all that it had by then.
            lambda _failed: None,
            RENEW_AFTER_S,
            self._cluster.clock.monotonic,
            at_once=False,
        )

    def serve(self) -> None:
        """Send what was submitted, and serve delivery reports."""
        if self._queue or self._under_way:
            self.needs_serving = True
            self._send_waiting(self._clients)
            self._poll(0)

    def due_in(self) -> float:
        """As `Outbox` says: at once while the client has something to take or to report."""
        return 0.0 if self.waiting else inf

    def flush(self, timeout: float) -> None:
        """As `Outbox` says."""
        self.serve()
        now = self._cluster.clock.monotonic
        end = now() + timeout
        # By polls: the client's own flush (confluent-kafka 2.16, seen) ends with a SystemError where the client fails
        # meanwhile, and the reason is lost.
        while self._out and (left := end - now()) > 0:
            self._poll(min(_FLUSH_POLL_S, left))

    def _poll(self, timeout: float) -> None:
        """Have delivery reports made, those of a client that failed included."""
        # A client that fails raises here instead of calling back, and goes on with its callbacks at the next call.
        clients = self._clients
        try:
            clients.client.poll(timeout)
        except KafkaException as error:
            if not clients.note_failure(error) and clients.failure is None:
                raise

    def _send_waiting(self, clients: ClientRenewal[ProducerClient]) -> None:
        """Send as much as the client takes, in the order in which it was submitted."""
        if clients.failure is not None and not self._is_replaced(clients):
            return
        while self._queue:
            submission = self._queue[0]
            if submission.is_gone and submission not in self._under_way:
                self._queue.popleft().end(is_written=False)
                continue
            self._under_way[submission] = None
            while submission.sent < len(submission.messages):
                # Before: a refusal at once may be the last answer that it waits for.
                submission.sent += 1
                if not self._send(clients, submission, submission.messages[submission.sent - 1]):
                    submission.sent -= 1
                    return
            self._queue.popleft()

    def _is_replaced(self, clients: ClientRenewal[ProducerClient]) -> bool:
        """Replace a client that failed, and queue again what it had: nobody knows whether that was written."""
        if self._out:
            clients.client.purge()
            self._poll(0)
        if self._out or not clients.replace(clients.client):
            return False
        if clients.failure is not None:
            _log.warning("the producer failed, and another sends again what it had: %s", reason(clients.failure))
        clients.failure = None
        if self._queue and self._queue[0] in self._under_way:
            # The client took a part of it.
            self._queue.popleft()
        for submission in reversed(self._under_way):
            submission.sent, submission.left = 0, len(submission.messages)
            self._queue.appendleft(submission)
        self._under_way.clear()
        return True

    def _send(self, clients: ClientRenewal[ProducerClient], submission: Submission, message: Result) -> bool:
        """Give the client a message; return whether it took it, or refused it. Else it is tried again soon."""
        try:
            clients.client.produce(
                message.topic,
                message.value,
                message.key,
                partition=message.partition,
                headers=message.headers,
                on_delivery=partial(self._delivered, submission, message.topic),
            )
        except BufferError:
            return False
        except KafkaException as error:
            clients.note_failure(error)
            # The client says no more than that it failed; its next poll says why.
            self._poll(0)
            if clients.failure is not None:
                return False
            self._answered(submission, message.topic, error.args[0])
        else:
            self._out += 1
        return True

    def _delivered(self, submission: Submission, topic: str, error: KafkaError | None, _written: object) -> None:
        self._out -= 1
        if error is not None:
            clients = self._clients
            if error.code() in _PURGED and clients.failure is not None:
                # "Purged" is what becomes of all that a failing client has: why it failed says more.
                error = clients.failure
            # Nothing waits behind a parked message: who gave it up says why it is not written, and submits it again.
            if submission.lane is not None and (error.fatal() or error.code() in _NOBODYS_FAULT):
                # What was sent later is to be written after it.
                clients.failure = clients.failure or error
                return
        self._answered(submission, topic, error)

    def _answered(self, submission: Submission, topic: str, error: KafkaError | None) -> None:
        if error is not None and submission.refusal is None:
            submission.refusal = topic, error
        submission.left -= 1
        if submission.left:
            return
        # Before it is gone: who waits for what is on its way must see the offsets done, or the lane woken.
        refusal = submission.refusal
        if refusal is None:
            submission.complete()
        submission.end(is_written=refusal is None, refusal=refusal)
        del self._under_way[submission]
