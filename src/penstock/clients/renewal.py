"""Replaces the client of a producer after a fatal error.

An idempotent producer fails fatally if it is refused its id, or has lost the order of its messages. From then on it
accepts nothing. `ClientRenewal` decides when a client has failed and how often a new one is made. Its owner keeps the
messages and sends them again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

from confluent_kafka import KafkaError, KafkaException

_FATAL = KafkaError._FATAL  # noqa: SLF001 - the client library's names of its local errors look so
#: Least seconds between two new clients: each asks the brokers for an id.
RENEW_AFTER_S = 4.0

ClientT = TypeVar("ClientT")


class ClientRenewal(Generic[ClientT]):
    """The client of a producer, replaced after a fatal error. Thread-safe.

    Two replacements are at least `every_s` seconds apart. With `at_once` the first may happen at once. `retire` is
    called with the replaced client, under the lock: it must neither wait nor raise.
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
        # Guards replacing. The public fields are read without it: each is a single value.
        self._lock = threading.Lock()
        self._made_at = -inf if at_once else monotonic()
        #: The present client. Copy it into a local variable before use.
        self.client = make()
        #: The most specific cause of a failure so far; None: no client failed.
        self.failure: KafkaError | None = None
        #: How often a client was replaced.
        self.replaced = 0

    def note_failure(self, error: KafkaException) -> bool:
        """Tell whether this error is fatal to its client, and remember the cause if so."""
        found = error.args[0] if error.args else None
        if not isinstance(found, KafkaError) or not (found.fatal() or found.code() == _FATAL):
            return False
        # Sends after the failure are refused with the bare code, which names no cause.
        if self.failure is None or found.code() != _FATAL:
            self.failure = found
        return True

    def replace(self, failed: ClientT) -> bool:
        """Replace a failed client; tell whether there is a new one by now.

        Raises `ConfigurationError` if the library refuses the configuration of the new client.
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


def cause_of(error: KafkaException, poll: Callable[[float], object]) -> KafkaError:
    """Return why a producer refused. A producer that failed fatally tells the cause in its next `poll`."""
    found: KafkaError = error.args[0]
    if found.code() == _FATAL:
        try:
            poll(0)
        except KafkaException as polled:
            found = polled.args[0]
    return found
