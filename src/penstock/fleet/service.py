"""`TopicService`: a thread that serves a process by a topic, for ever, whatever happens to the topic or its brokers."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod

from confluent_kafka import KafkaException

from penstock.clients.kafka_errors import reason
from penstock.clients.rights import MissingRightError
from penstock.errors import PenstockError

_log = logging.getLogger(__name__)

#: Seconds between two tries after a failure.
RETRY_DELAY_S = 5.0


class TopicService(ABC):
    """Works on a daemon thread until it is stopped. `start` and `stop` are for one thread.

    Nobody waits for it. Whatever fails, as a topic, a right or a broker that is missing, is logged once until it works
    again; the app runs on.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._stopping = threading.Event()
        #: Set while it works; written by its thread.
        self.is_listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # The thread's alone.
        self._trouble: str | None = None

    @abstractmethod
    def _work(self) -> None:
        """Do what there is to do until `_stopping` is set; what it raises is logged, and it is called again."""

    @abstractmethod
    def _say_failed(self, why: str) -> None:
        """Log why it fails, once until it works again."""

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self, left_s: float = 1.0) -> None:
        """End, within `left_s` seconds: a call of the client that hangs is abandoned with the thread."""
        self._stopping.set()
        if self.is_listening.is_set():
            self._thread.join(left_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._work()
            except MissingRightError as error:
                # Whoever lacks two permissions names the second when the first was given.
                if str(error) != self._trouble:
                    self._trouble = None
                self._failed(str(error))
            except PenstockError as error:
                self._failed(str(error))
            except KafkaException as error:
                self._failed(reason(error))
            except Exception as error:  # noqa: BLE001 - what serves the app must never end it
                self._failed(f"unexpected {type(error).__name__}")
            self.is_listening.clear()
            self._stopping.wait(RETRY_DELAY_S)

    def _works(self) -> None:
        self.is_listening.set()
        if self._trouble is not None:
            _log.info("%s works again, after: %s", self._thread.name, self._trouble)
            self._trouble = None

    def _failed(self, why: str) -> None:
        if self._trouble is None:
            self._say_failed(why)
        self._trouble = why
