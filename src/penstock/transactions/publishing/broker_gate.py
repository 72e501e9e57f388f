"""Whether the brokers that a Kafka transaction needs answer: after a failure nothing is published before they do.

The client library waits for a group's coordinator without end in the midst of a Kafka transaction. Here it is asked
with a time limit, on a thread that can be left behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from confluent_kafka import KafkaException

from penstock.clients.bounded_calls import BackgroundCall, LeftBehind, NotAnsweredError
from penstock.clients.kafka_errors import reason

_log = logging.getLogger("penstock.transactions")

#: Seconds for one question, and between two.
_LIMIT_S = 5.0
_AGAIN_S = 0.2


class BrokerGate:
    """Open as long as nothing failed, and from an answer on. Used by one thread; waits for nothing.

    `ask` returns once the brokers have answered, or raises `KafkaException`.
    """

    def __init__(self, ask: Callable[[], object], left: LeftBehind) -> None:
        self._ask = ask
        self._left = left
        self._question: BackgroundCall[bool] | None = None
        self._not_before = 0.0
        #: Whether transactions may begin.
        self.is_open = True

    def shut(self) -> None:
        """Something failed: ask, before anything is tried again."""
        self.is_open = False

    def poll(self, now: float) -> bool:
        """Ask, if it is shut, and take the answer; tell whether it has opened now."""
        if self._question is None:
            if not self.is_open and now >= self._not_before:
                self._question = BackgroundCall("asking whether brokers answer", self._answered, _LIMIT_S, self._left)
            return False
        try:
            has_answered = self._question.answer() is not None
        except (KafkaException, NotAnsweredError) as error:
            text = reason(error) if isinstance(error, KafkaException) else error
            _log.debug("the brokers do not answer: %s", text)
            self._question, self._not_before = None, now + _AGAIN_S
            return False
        if has_answered:
            self._question, self.is_open = None, True
        return has_answered

    def _answered(self) -> bool:
        self._ask()
        return True
