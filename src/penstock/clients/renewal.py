"""Producers that outlive their clients: a client that has failed for ever is replaced by a new one.

An idempotent producer fails fatally where it is refused its id, or lost the order of its messages, and takes nothing
from then on. `ClientRenewal` is the rule: when a client has failed, why, and how often a new one is made.
`LastingProducer` is a producer for one thread with that rule: its owner keeps the messages, and sends them again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import inf
from typing import Generic, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message

from penstock.clients.cluster import Clock, DeliveryCallback, ProducerClient

_FATAL = KafkaError._FATAL  # noqa: SLF001 - the client library's names of its local errors look so, here and below
_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - as above
#: Seconds between two new clients: each asks the brokers for an id.
RENEW_AFTER_S = 4.0
#: Seconds that one poll of a flush waits.
_FLUSH_LOOK_S = 0.1

ClientT = TypeVar("ClientT")


class ClientRenewal(Generic[ClientT]):
    """The client of a producer, replaced when it has failed for ever. Thread-safe.

    Between two clients lie at least `every_s` seconds, for each asks the brokers for an id; with `at_once` the first
    may be replaced at once. `retire` is called with one that was replaced, under the lock: it neither waits nor raises.
    """

    def __init__(
        self,
        make: Callable[[], ClientT],
        retire: Callable[[ClientT], object],
        every_s: float,
        monotonic: Callable[[], float],
        *,
        at_once: bool,
    ) -> None:
        self._make = make
        self._retire = retire
        self._every_s = every_s
        self._monotonic = monotonic
        # Guards replacing. What is public is read without it: each is a single value.
        self._lock = threading.Lock()
        self._made_at = -inf if at_once else monotonic()
        #: The present client; who uses it takes it into a local name first.
        self.client = make()
        #: Why a client failed, as exactly as is known; None: none did.
        self.failure: KafkaError | None = None
        #: How often a client was replaced.
        self.replaced = 0

    def note_failure(self, error: KafkaException) -> bool:
        """Remember why a client failed, if this error has ended it for ever; tell whether it has."""
        found = error.args[0] if error.args else None
        if not isinstance(found, KafkaError) or not (found.fatal() or found.code() == _FATAL):
            return False
        # What is sent after the failure is refused with the bare code, which says nothing.
        if self.failure is None or found.code() != _FATAL:
            self.failure = found
        return True

    def replace(self, failed: ClientT) -> bool:
        """Make a new client instead of one that has failed; tell whether there is another by now.

        `ConfigurationError` where the new client was refused its configuration.
        """
        with self._lock:
            if self.client is failed:
                now = self._monotonic()
                if now - self._made_at < self._every_s:
                    return False
                self.client = self._make()
                self._made_at = now
                self.replaced += 1
                self._retire(failed)
        return True


class LastingProducer:
    """A `ProducerClient` that replaces its client when that has failed fatally. For one thread.

    What the failed client had is reported as failed, each message once, by `poll` or `flush`, though it may have been
    written. The new client is made after that, so no message of the old one arrives behind one of the new.
    """

    def __init__(self, make: Callable[[], ProducerClient], clock: Clock) -> None:
        self._clock = clock
        # One that failed is dropped: all that it had is reported by then.
        self._renewal = ClientRenewal(make, lambda _failed: None, RENEW_AFTER_S, clock.monotonic, at_once=False)
        # Messages of the present client that are not reported yet.
        self._out = 0

    @property
    def failure(self) -> KafkaError | None:
        """Why the client takes nothing any more, or None."""
        return self._renewal.failure

    @property
    def replaced(self) -> int:
        """How often a client was replaced."""
        return self._renewal.replaced

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        partition: int = -1,
        headers: Sequence[tuple[str, str | bytes | None]] = (),
        on_delivery: DeliveryCallback | None = None,
    ) -> None:
        """Queue a message, of partition -1 for the partitioner's; `BufferError` where the queue is full.

        `KafkaException` where it is not taken; of a client that failed fatally, why that was: try again later.
        `ConfigurationError` where a new client was refused its configuration.
        """
        if self._renewal.failure is not None and not self._replace():
            raise KafkaException(self.failure)

        def delivered(error: KafkaError | None, message: Message) -> None:
            self._out -= 1
            # "Purged" is what becomes of all that a failing client has: why it failed says more.
            is_purged = error is not None and error.code() in _PURGED
            if on_delivery is not None:
                on_delivery(self.failure if is_purged and self.failure is not None else error, message)

        try:
            self._renewal.client.produce(
                topic, value, key, partition=partition, headers=list(headers), on_delivery=delivered
            )
        except KafkaException as error:
            self._renewal.note_failure(error)
            # The client says no more than that it failed; its next poll says why.
            self.poll(0)
            raise KafkaException(self.failure) if self.failure is not None else error from error
        self._out += 1

    def renew(self) -> bool:
        """Replace a client that failed, once all that it had is reported; return whether there is one that has not."""
        return self.failure is None or self._replace()

    def poll(self, timeout: float = 0) -> int:
        """Call the delivery callbacks that are due, those of a client that failed included."""
        # A client that fails raises here instead of calling back, and goes on with its callbacks at the next call.
        try:
            return self._renewal.client.poll(timeout)
        except KafkaException as error:
            if not self._renewal.note_failure(error) and self.failure is None:
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

    def give_up(self, why: KafkaError) -> None:
        """Replace the client as one that has failed: so that nothing is written before what it could not write."""
        if self._renewal.failure is None:
            self._renewal.failure = why

    def purge(self) -> None:
        """Give up what is queued and on its way; the delivery callbacks get an error."""
        self._renewal.client.purge()

    def _replace(self) -> bool:
        """Make a new client instead of the one that failed; return whether that was done."""
        if self._out:
            self._renewal.client.purge()
            self.poll(0)
        if self._out or not self._renewal.replace(self._renewal.client):
            return False
        self._renewal.failure = None
        return True


def cause_of(error: KafkaException, poll: Callable[[float], object]) -> KafkaError:
    """Return why a producer refused; of one that only says that it failed fatally, what its next `poll` raises."""
    found: KafkaError = error.args[0]
    if found.code() == _FATAL:
        try:
            poll(0)
        except KafkaException as polled:
            found = polled.args[0]
    return found
