"""The check responder of a producer: it takes checks of its group, calls the user's function, stores the answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from confluent_kafka import KafkaException

from penstock.clients.kafka_errors import reason
from penstock.errors import DecisionNotStoredError, raised
from penstock.transactions.bulkhead import BulkheadPool, answer_of
from penstock.transactions.messages import as_seen
from penstock.transactions.model import HalfMessage, TransactionState
from penstock.transactions.store import CheckSource, Store
from penstock.transactions.wire.half import CheckRequest
from penstock.transactions.wire.ops import Author, Verdict

#: Returns the outcome of a half's local transaction. Called on threads of its own, maybe more than once.
Check = Callable[[HalfMessage], TransactionState]

_log = logging.getLogger("penstock.transactions")

#: Seconds between two looks whether to stop, and before the next try after a failure of the connection.
_POLL_S = 0.2
#: Checks that may wait for each worker. More are skipped: the coordinator asks again.
_QUEUE_PER_WORKER = 250
#: Seconds that one check may take.
CHECK_TIMEOUT_S = 30.0


class CheckResponder:
    """Answers the checks of one producer group in this process.

    One thread takes checks and a few slots run the user's function; if it raises, the answer is UNKNOWN. A check that
    hangs blocks its slot until the time limit, and no other check; a late answer still counts. While the check of a
    transaction runs here, another check of it is ignored.
    """

    def __init__(self, store: Store, group: str, check: Check, workers: int, timeout_s: float) -> None:
        self._store = store
        self._group = group
        self._check = check
        self._workers = workers
        self._stopping = threading.Event()
        self._pool = BulkheadPool(workers, timeout_s, f"penstock-check-{group}")
        # Written by start().
        self._thread: threading.Thread | None = None
        # Guards the fields below: the listening thread adds, the workers remove and count.
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self.answered = 0
        self.failed = 0
        self.skipped = 0

    def start(self) -> None:
        """Start listening for checks; settings that a consumer refuses raise `ConfigurationError`."""
        source = self._store.checks(self._group)
        name = f"penstock-checks-{self._group}"
        self._thread = threading.Thread(target=self._listen, args=(source,), name=name, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop listening and wait for running checks, at most `timeout_s` seconds; then abandon them."""
        self._stopping.set()
        if self._thread is not None:
            deadline = time.monotonic() + timeout_s
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.warning("%s is abandoned: a call of the store does not return", self._thread.name)
            self._pool.close(max(0.0, deadline - time.monotonic()))

    @property
    def hung(self) -> int:
        """Checks that were given up because they did not return in time."""
        return self._pool.hung

    def _listen(self, source: CheckSource) -> None:
        try:
            while not self._stopping.is_set():
                self._take(source)
                self._pool.tend()
        finally:
            source.close()

    def _take(self, source: CheckSource) -> None:
        try:
            with self._lock:
                running = list(self._running)
            requests = source.take(_POLL_S, running)
        except KafkaException as error:
            _log.warning("checks of group %s cannot be taken: %s; trying again", self._group, reason(error))
        except:  # noqa: E722 - see `raised`; the next try may succeed
            # If the thread ended here, the group would silently stop answering.
            _log.error("checks of group %s cannot be taken; trying again", self._group, exc_info=raised())
        else:
            for request in requests:
                if self._admit(request.half.transaction_id):
                    self._pool.submit(_label(request), partial(self._answer, request))
            return
        self._stopping.wait(_POLL_S)

    def _admit(self, transaction_id: str) -> bool:
        with self._lock:
            if transaction_id in self._running:
                return False
            if len(self._running) >= self._workers * _QUEUE_PER_WORKER:
                self.skipped += 1
                return False
            self._running.add(transaction_id)
            return True

    def _answer(self, request: CheckRequest) -> None:
        transaction_id = request.half.transaction_id
        try:
            # As in RocketMQ, a check that fails is no decision.
            message = as_seen(request.half, request.check_number - 1)
            state = answer_of(_label(request), partial(self._check, message))
            with self._lock:
                self.failed += state is None
            self._store.answer(request, Verdict[(state or TransactionState.UNKNOWN).name], Author.CHECK)
        except DecisionNotStoredError as error:
            _log.warning("%s", error)
        else:
            with self._lock:
                self.answered += 1
        finally:
            with self._lock:
                self._running.discard(transaction_id)


def _label(request: CheckRequest) -> str:
    return f"check {request.check_number} of transaction {request.half.transaction_id}"
