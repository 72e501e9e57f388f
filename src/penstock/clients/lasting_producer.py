"""A producer that outlives its client: one that failed for ever is replaced.

An idempotent producer fails fatally where it is refused its id, or lost the order of its messages, and takes nothing
from then on. Whoever keeps a producer for long uses this, and sends its messages again after a while.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import inf

from confluent_kafka import KafkaError, KafkaException, Message

from penstock.clients.cluster import Clock, DeliveryCallback, ProducerClient

_FATAL = KafkaError._FATAL  # noqa: SLF001 - the client library's names of its local errors look so, here and below
_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - as above
#: Seconds between two new clients: each asks the brokers for an id.
RENEW_AFTER_S = 4.0
#: Seconds that one poll of a flush waits.
_FLUSH_LOOK_S = 0.1


class LastingProducer:
    """A `ProducerClient` that replaces its client when that has failed fatally. For one thread.

    What the failed client had is reported as failed, each message once, by `poll` or `flush`, though it may have been
    written. The new client is made after that, so no message of the old one arrives behind one of the new.
    """

    def __init__(self, make: Callable[[], ProducerClient], clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._client = make()
        self._made_at = clock.monotonic()
        # Of this client: messages that are not reported yet, and why it takes none any more.
        self._out = 0
        self._failure: KafkaError | None = None
        #: How often a client was replaced.
        self.replaced = 0

    @property
    def failure(self) -> KafkaError | None:
        """Why the client takes nothing any more, or None."""
        return self._failure

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        headers: Sequence[tuple[str, str | bytes | None]] = (),
        on_delivery: DeliveryCallback | None = None,
    ) -> None:
        """Queue a message.

        Raises:
            KafkaException: it is not taken; of a client that failed fatally, why that was. Try again later.
            BufferError: the queue is full.
            ConfigurationError: a new client was refused its configuration.
        """
        if self._failure is not None and not self._replace():
            raise KafkaException(self._failure)

        def delivered(error: KafkaError | None, message: Message) -> None:
            self._out -= 1
            # "Purged" is what becomes of all that a failing client has: why it failed says more.
            is_purged = error is not None and error.code() in _PURGED
            if on_delivery is not None:
                on_delivery(self._failure if is_purged and self._failure is not None else error, message)

        try:
            self._client.produce(topic, value, key, headers=list(headers), on_delivery=delivered)
        except KafkaException as error:
            self._note(error)
            # The client says no more than that it failed; what it was is told by its next poll.
            self.poll(0)
            raise KafkaException(self._failure) if self._failure is not None else error from error
        self._out += 1

    def poll(self, timeout: float = 0) -> int:
        """Call the delivery callbacks that are due, those of a client that failed included."""
        # A client that fails raises here instead of calling back, and goes on with its callbacks at the next call.
        try:
            return self._client.poll(timeout)
        except KafkaException as error:
            self._note(error)
            if self._failure is None:
                raise
            return 0

    def flush(self, timeout: float = -1) -> int:
        """Wait for deliveries; return how many are still out."""
        # By polls: the client's own flush (confluent-kafka 2.16, seen) ends with a SystemError where the client fails
        # meanwhile, and the reason is lost.
        end = self._clock.monotonic() + timeout if timeout >= 0 else inf
        self.poll(0)
        while self._out and (left := end - self._clock.monotonic()) > 0:
            self.poll(min(_FLUSH_LOOK_S, left))
        return self._out

    def purge(self) -> None:
        """Give up what is queued and on its way; the delivery callbacks are told so."""
        self._client.purge()

    def _note(self, error: KafkaException) -> None:
        found = error.args[0] if error.args else None
        if not isinstance(found, KafkaError) or not _is_fatal(found):
            return
        if self._failure is None or self._failure.code() == _FATAL:
            self._failure = found

    def _replace(self) -> bool:
        """Make a new client in place of the one that failed; return whether that was done."""
        if self._out:
            self._client.purge()
            self.poll(0)
        now = self._clock.monotonic()
        if self._out or now - self._made_at < RENEW_AFTER_S:
            return False
        former, self._client = [self._client], self._make()
        # The destructor of a client waits for its threads, so it runs on a thread that nobody waits for.
        threading.Thread(target=former.clear, name="penstock-failed-producer", daemon=True).start()
        self._made_at, self._failure = now, None
        self.replaced += 1
        return True


def cause_of(error: KafkaException, poll: Callable[[float], object]) -> KafkaError:
    """Return why a producer refused; of one that only says that it failed fatally, what its next `poll` raises."""
    found: KafkaError = error.args[0]
    if found.code() == _FATAL:
        try:
            poll(0)
        except KafkaException as told:
            found = told.args[0]
    return found


def _is_fatal(error: KafkaError) -> bool:
    return error.fatal() or error.code() == _FATAL


__all__ = ["RENEW_AFTER_S", "LastingProducer", "cause_of"]
