"""Whether the brokers that a Kafka transaction needs answer: after a failure nothing is published before they do.

The client library waits for a group's coordinator without end in the midst of a Kafka transaction. Here it is asked
with a time limit, on a disposable thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from confluent_kafka import KafkaException

from penstock.clients.bounded_calls import Call, Disposable, LeftBehind
from penstock.clients.kafka_errors import reason

_log = logging.getLogger("penstock.transactions")

#: Seconds for one question, and between two.
_LIMIT_S = 5.0
_AGAIN_S = 0.2


class BrokerGate:
    """Open as long as nothing failed, and from an answer on. Used by one thread; waits for nothing.

    `ask` returns once the brokers have answered, or raises `KafkaException`.
    """

    def __init__(self, ask: Callable[[], None], left: LeftBehind) -> None:
        self._ask = ask
        self._left = left
        self._thread: Disposable | None = None
        self._question: Call[None] | None = None
        self._not_before = 0.0
        #: Whether transactions may begin.
        self.is_open = True

    def shut(self) -> None:
        """Something failed: ask, before anything is tried again."""
        self.is_open = False

    def poll(self, now: float) -> bool:
        """Ask, if it is shut, and take the answer; tell whether it has opened now."""
        question = self._question
        if question is None:
            if self.is_open or now < self._not_before:
                return False
            if self._thread is None:
                self._left.require_few()
                self._thread = Disposable("penstock-broker-gate", self._left)
            self._question = self._thread.start("asking whether brokers answer", self._ask)
            return False
        if not question.done():
            if question.age_s >= _LIMIT_S and self._thread is not None:
                # The call that hangs closes by itself.
                self._thread.leave(lambda: None)
                self._thread, self._question = None, None
            return False
        self._question = None
        try:
            question.result()
        except KafkaException as error:
            _log.debug("the brokers do not answer: %s", reason(error))
            self._not_before = now + _AGAIN_S
        else:
            self.is_open = True
        return self.is_open

    def close(self) -> None:
        """Let its thread end."""
        if self._thread is not None:
            self._thread.close()
