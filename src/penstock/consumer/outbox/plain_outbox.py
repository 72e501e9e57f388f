"""The plain outbox: one idempotent producer, at-least-once delivery.

Submissions are sent in their order without a wait between them, so the results of a key stay in the order of its
messages. While brokers are away, the producer keeps its messages: nothing times out, unless the user sets
`message.timeout.ms`. A refusal concerns one submission; the submissions behind it were sent already.

A client that has failed for good is replaced after it has reported all its messages. So no message of the old client
arrives behind a message of the new one. The reported messages are sent again, although they may have been written.
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
_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - the client library names its local errors so, here and below
#: Errors that are no fault of the message: no broker answered in time, or the producer has failed for good.
_NO_FAULT = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,  # noqa: SLF001 - as above
        KafkaError._FATAL,  # noqa: SLF001 - as above
        *_PURGED,
    }
)


class PlainOutbox(Outbox):
    """Sends with a producer, and replaces the producer when it has failed for good."""

    _cluster: Cluster
    _config: Mapping[str, Any]

    def __init__(self) -> None:
        super().__init__()
        # Number of messages that the current client has not reported yet.
        self._unreported = 0
        # The submissions in the producer, in the order of submission.
        self._under_way: dict[Submission, None] = {}

    def connect(self, cluster: Cluster, config: Mapping[str, Any]) -> None:
        """As `Outbox` says."""
        self._cluster, self._config = cluster, config

    @cached_property
    def _clients(self) -> ClientRenewal[ProducerClient]:
        """The producer, made at the first submission, and its successors."""
        return ClientRenewal(
            partial(self._cluster.producer, self._config),
            # A failed producer needs no close: it has reported all its messages by then.
            lambda _failed: None,
            RENEW_AFTER_S,
            self._cluster.clock.monotonic,
            at_once=False,
        )

    def serve(self) -> None:
        """Send queued submissions, and serve delivery reports."""
        if self._queue or self._under_way:
            self.needs_serving = True
            self._send_waiting(self._clients)
            self._poll(0)

    def due_in(self) -> float:
        """As `Outbox` says: at once while there are submissions."""
        return 0.0 if self.waiting else inf

    def flush(self, timeout: float) -> None:
        """As `Outbox` says."""
        self.serve()
        now = self._cluster.clock.monotonic
        end = now() + timeout
        # By polls: if the client fails meanwhile, its own flush ends with a SystemError and loses the reason
        # (seen in confluent-kafka 2.16).
        while self._unreported and (left := end - now()) > 0:
            self._poll(min(_FLUSH_POLL_S, left))

    def _poll(self, timeout: float) -> None:
        """Serve delivery reports, also of a failed client."""
        # A client that fails raises once instead of calling back. The next call goes on with its callbacks.
        clients = self._clients
        try:
            clients.client.poll(timeout)
        except KafkaException as error:
            if not clients.note_failure(error) and clients.failure is None:
                raise

    def _send_waiting(self, clients: ClientRenewal[ProducerClient]) -> None:
        """Send as many submissions as the client takes, in the order of submission."""
        if clients.failure is not None and not self._replace_client(clients):
            return
        while self._queue:
            submission = self._queue[0]
            if submission.is_gone and submission not in self._under_way:
                self._queue.popleft().end(is_written=False)
                continue
            self._under_way[submission] = None
            while submission.sent < len(submission.messages):
                # Counted before the send: an immediate refusal may be its last missing answer.
                submission.sent += 1
                if not self._send(clients, submission, submission.messages[submission.sent - 1]):
                    submission.sent -= 1
                    return
            self._queue.popleft()

    def _replace_client(self, clients: ClientRenewal[ProducerClient]) -> bool:
        """Replace a failed client, and queue its messages again: it is unknown whether they were written."""
        if self._unreported:
            clients.client.purge()
            self._poll(0)
        if self._unreported or not clients.replace(clients.client):
            return False
        if clients.failure is not None:
            _log.warning("the producer failed, and a new one sends its messages again: %s", reason(clients.failure))
        clients.failure = None
        if self._queue and self._queue[0] in self._under_way:
            # The client took only some of its messages, so it is in both.
            self._queue.popleft()
        for submission in reversed(self._under_way):
            submission.sent, submission.left = 0, len(submission.messages)
            self._queue.appendleft(submission)
        self._under_way.clear()
        return True

    def _send(self, clients: ClientRenewal[ProducerClient], submission: Submission, message: Result) -> bool:
        """Produce a message; return whether the client took or refused it. If not, it is sent again later."""
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
            # This error only says that the client failed. Its next poll raises the cause.
            self._poll(0)
            if clients.failure is not None:
                return False
            self._answered(submission, message.topic, error.args[0])
        else:
            self._unreported += 1
        return True

    def _delivered(self, submission: Submission, topic: str, error: KafkaError | None, _written: object) -> None:
        self._unreported -= 1
        if error is not None:
            clients = self._clients
            if error.code() in _PURGED and clients.failure is not None:
                # All messages of a failed client are reported as "purged". The cause of its failure says more.
                error = clients.failure
            # No submission waits behind a parked message: `DeadLetterPublisher` logs the error and submits it again.
            if submission.lane is not None and (error.fatal() or error.code() in _NO_FAULT):
                # Later submissions must be written after it, so the client is replaced and all are sent again.
                clients.failure = clients.failure or error
                return
        self._answered(submission, topic, error)

    def _answered(self, submission: Submission, topic: str, error: KafkaError | None) -> None:
        if error is not None and submission.refusal is None:
            submission.refusal = topic, error
        submission.left -= 1
        if submission.left:
            return
        # Removed last: a revocation that waits for submissions must then see the offsets done, or the lane woken.
        refusal = submission.refusal
        if refusal is None:
            submission.complete()
        submission.end(is_written=refusal is None, refusal=refusal)
        del self._under_way[submission]
