"""What the client library says of a Kafka transaction in its log alone; above all, whether its end is known.

librdkafka (2.16, seen) repeats an EndTxn whose answer was lost, inside one call of `commit_transaction`, with the same
producer id and epoch, and then reports success. The first one may still be on its way, and would end whatever this
producer has open when it arrives (KAFKA-17754). So an end that was repeated is an end in doubt, even if it was answered
well. The only sign of it is a line of the library's log; the watch stands where the client expects its logger.

The same log has which topics the broker did not let into the transaction: their messages fail as purged, all alike.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from penstock.clients.kafka_errors import reason
from penstock.clients.transactional.faults import not_let_in
from penstock.errors import PenstockError

#: What the library is asked to log: every EndTxn that was answered or lost, among thirty lines a transaction.
CONTEXT = "eos"

_END = "ENDTXN"
_ADD = "ADDPARTS"
_GET_ID = "GETPID"
_CONCURRENT = "concurrent operation"
_FAILED = "FAIL"
#: Answers after which no request of that kind is under way any more.
_ANSWERED = (
    "EndTxn returned NO_ERROR ",
    "EndTxn returned CONCURRENT_TRANSACTIONS ",
    "EndTxn returned INVALID_TXN_STATE ",
)
#: A connection that carried requests ended: positions that were on it are sent again, and may arrive a second time.
_WAS_UP = "in state UP"
_COMMITTED = "committed"
#: Seconds after which a broker that stood still knows that others lead in its place: until then it tells what was, and
#: that a transaction is not to be found there says nothing.
SURE_S = 3.0
#: Seconds that an end may take which the library does not speak of, so that it passes for known.
_UNREPORTED_END_S = 0.1


class UnknownEndError(PenstockError):
    """It is not known how a Kafka transaction ended, or a late EndTxn may still end another: discard the producer.

    Where it `is_committed`, the broker has said so, and only the producer is of no use any more. To ask somebody else
    would be worse: a broker that stood still, and does not know yet that others lead in its place, tells what was.
    """

    def __init__(self, text: str, *, is_committed: bool = False) -> None:
        super().__init__(text)
        self.is_committed = is_committed


class EndWatch:
    """Reads the library's log of one producer, and passes on to `log`, a `logging.Logger`, what its user wants to read.

    Written by the thread that serves the producer, read by it: one thread at a time.
    """

    def __init__(self, log: Any, *, debugging: bool) -> None:
        self._log = log
        self._debugging = debugging
        self._ends = 0
        self._sign: str | None = None
        #: Topics that the broker did not let into the transaction, with its reason, since the last `begin`.
        self.refused: dict[str, str] = {}
        #: Whether it answered since then, to who asks for a transactional id, that its last transaction, whose end is
        #: decided, waits for its markers.
        self.is_concurrent = False

    def log(self, level: int, text: str, /, *arguments: object) -> None:
        """Take a line from the client library: its kind, the client's name and what it says are the arguments."""
        kind, said = (arguments[0], str(arguments[-1])) if arguments else (None, "")
        if kind == _END:
            self._ends += 1
            if not any(answer in said for answer in _ANSWERED):
                self._sign = "its end was sent more than once"
        elif kind == _FAILED and _WAS_UP in said:
            self._sign = self._sign or "a connection ended while it was open"
        elif kind == _ADD and (refused := not_let_in(said)) is not None:
            self.refused.update([refused])
        elif kind == _GET_ID and _CONCURRENT in said:
            self.is_concurrent = True
        if level > logging.DEBUG or self._debugging:
            self._log.log(level, text, *arguments)

    def begin(self) -> None:
        """A transaction begins, or a transactional id is asked for: what was before does not count."""
        self._ends = 0
        self._sign = None
        self.refused, self.is_concurrent = {}, False

    def commit(self, producer: Producer, timeout_s: float) -> None:
        """End the transaction with a commit, and return once it is known to be committed.

        Raises `KafkaException` where it was not committed, and has to be aborted, and `UnknownEndError` where nobody
        knows, or a late end of it may come.
        """
        begun = time.monotonic()
        try:
            producer.commit_transaction(timeout_s)
        except KafkaException as error:
            inner = error.args[0]
            # The library asks for an abort where no EndTxn went out, or the broker refused it. All else is unknown.
            if isinstance(inner, KafkaError) and inner.txn_requires_abort() and not inner.retriable():
                raise
            raise UnknownEndError(f"the end of a Kafka transaction is in doubt: {reason(error)}") from error
        self._require_known(producer, begun, _COMMITTED)

    def abort(self, producer: Producer, timeout_s: float) -> None:
        """End the transaction with an abort; return once it is known to be aborted, or raise `UnknownEndError`."""
        begun = time.monotonic()
        try:
            producer.abort_transaction(timeout_s)
        except KafkaException as error:
            self.serve(producer)
            if error.args[0].code() == KafkaError.INVALID_TXN_STATE and self._sign is None:
                # The broker knows of no open transaction: none of its partitions was let in, for want of a right, say.
                return
            raise UnknownEndError(f"a Kafka transaction could not be aborted: {reason(error)}") from error
        self._require_known(producer, begun, "aborted")

    def serve(self, producer: Producer) -> None:
        """Have all lines of the library's log read that are there, of a client that may have failed."""
        with contextlib.suppress(KafkaException):
            producer.poll(0)

    def _require_known(self, producer: Producer, begun: float, how: str) -> None:
        """Raise `UnknownEndError` where an end that was answered may come a second time."""
        took_s = time.monotonic() - begun
        try:
            # The library's log is served here, all of it: its lines on the end came before the answer did.
            producer.poll(0)
        except KafkaException as error:
            doubt: str | None = f"the client failed: {reason(error)}"
        else:
            doubt = self.doubt(took_s)
        if doubt is not None:
            raise UnknownEndError(f"a Kafka transaction was {how}, but {doubt}", is_committed=how == _COMMITTED)

    def doubt(self, took_s: float) -> str | None:
        """Say why the end of the transaction is in doubt, though it was answered; None when it is known.

        The seconds it took count where the library did not speak of it: another version might not.
        """
        if self._sign is None and not self._ends and took_s > _UNREPORTED_END_S:
            return "its end took long, and the client library does not say whether it was repeated"
        return self._sign
