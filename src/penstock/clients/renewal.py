"""Producers that outlive their clients: a client that has failed for ever is replaced by a new one.

An idempotent producer fails fatally where it is refused its id, or lost the order of its messages, and takes nothing
from then on. `ClientRenewal` is the rule: when a client has failed, why, and how often a new one is made. Its owner
keeps the messages, and sends them again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

from confluent_kafka import KafkaError, KafkaException

_FATAL = KafkaError._FATAL  # noqa: SLF001 - the client library's names of its local errors look so
#: Seconds between two new clients: each asks the brokers for an id.
RENEW_AFTER_S = 4.0

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


def cause_of(error: KafkaException, poll: Callable[[float], object]) -> KafkaError:
    """Return why a producer refused; of one that only says that it failed fatally, what its next `poll` raises."""
    found: KafkaError = error.args[0]
    if found.code() == _FATAL:
        try:
            poll(0)
        except KafkaException as polled:
            found = polled.args[0]
    return found
