"""The receipt of one send."""

from __future__ import annotations

import threading
from collections.abc import Callable

from confluent_kafka import KafkaError, Message


class Receipt:
    """What is known of one send. Written once by the delivery thread, read by any number of waiters."""

    __slots__ = ("_gate", "_why", "error", "offset")

    def __init__(self, why: Callable[[KafkaError], str]) -> None:
        self._why = why
        #: Offset of the stored record; -1 until then.
        self.offset = -1
        #: Why it is not known to be stored.
        self.error: str | None = None
        # A held lock is the cheapest event there is: released once, by the delivery report.
        self._gate = threading.Lock()
        self._gate.acquire()

    def report(self, error: KafkaError | None, message: Message) -> None:
        """Take the delivery report; the client library calls it."""
        if error is not None:
            self.error = self._why(error)
        else:
            self.offset = message.offset() or 0
        self._gate.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the report, and tell whether the record is stored. `error` says why not."""
        if not self._gate.acquire(timeout=timeout_s):
            self.error = f"no answer within {timeout_s:g} s"
            return False
        # The next waiter passes as well.
        self._gate.release()
        return self.error is None


Report = Callable[[KafkaError | None, Message], None]
