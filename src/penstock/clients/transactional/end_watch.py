"""Watches the client library's log for facts about a Kafka transaction, above all whether its end is known.

If the answer to an EndTxn is lost, librdkafka (2.16, seen) repeats it inside one call of `commit_transaction`, with the
same producer id and epoch, and then reports success. The first request may still be on its way. It would end whatever
transaction this producer has open when it arrives (KAFKA-17754). So a repeated end is an end in doubt, even after a
successful answer. The only sign of it is a line in the library's log, so the watch is the client's logger.

The same log names the topics that the broker kept out of the transaction. All their messages fail as purged.
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

#: The debug context with every EndTxn that was answered or lost, among thirty lines a transaction.
CONTEXT = "eos"

_END = "ENDTXN"
_ADD = "ADDPARTS"
_GET_ID = "GETPID"
_CONCURRENT = "concurrent operation"
_FAILED = "FAIL"
#: Answers after which no such request is under way.
_ANSWERED = (
    "EndTxn returned NO_ERROR ",
    "EndTxn returned CONCURRENT_TRANSACTIONS ",
    "EndTxn returned INVALID_TXN_STATE ",
)
#: A connection that carried requests ended. Positions on it are sent again, and may arrive twice.
_WAS_UP = "in state UP"
_COMMITTED = "committed"
#: Seconds after which a broker that was frozen knows its successors as leaders. Until then its answers are outdated: a
#: transaction that is absent there may exist.
SURE_S = 3.0
#: Seconds within which an end counts as known although the library logged nothing about it.
_UNREPORTED_END_S = 0.1


class UnknownEndError(PenstockError):
    """The end of a Kafka transaction is unknown, or a late EndTxn may still end another one: discard the producer.

    If it `is_committed`, the broker has said so, and only the producer must be discarded. Asking another broker would
    be worse: one that was frozen, and does not know its successor yet, gives an outdated answer.
    """

    def __init__(self, text: str, *, is_committed: bool = False) -> None:
        super().__init__(text)
        self.is_committed = is_committed


class EndWatch:
    """Reads the library's log of one producer and passes the user's part on to `log`, a `logging.Logger`.

    One thread at a time: the one that serves the producer writes and reads it.
    """

    def __init__(self, log: Any, *, debugging: bool) -> None:
        self._log = log
        self._debugging = debugging
        self._ends = 0
        self._sign: str | None = None
        #: Topics that the broker kept out of the transaction, with its reason, since the last `begin`.
        self.refused: dict[str, str] = {}
        #: Whether the broker answered since then that the id's last transaction still waits for its markers.
        self.is_concurrent = False

    def log(self, level: int, text: str, /, *arguments: object) -> None:
        """Take a line from the client library. The arguments are its kind, the client's name and its text."""
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
        """Forget earlier lines: a transaction begins, or a transactional id is requested."""
        self._ends = 0
        self._sign = None
        self.refused, self.is_concurrent = {}, False

    def commit(self, producer: Producer, timeout_s: float) -> None:
        """Commit the transaction, and return when it is known to be committed.

        Raises `KafkaException` if it was not committed and must be aborted, and `UnknownEndError` if its end is
        unknown, or a late end may come.
        """
        begun = time.monotonic()
        try:
            producer.commit_transaction(timeout_s)
        except KafkaException as error:
            inner = error.args[0]
            # The library asks for an abort if no EndTxn was sent or the broker refused it. All else is unknown.
            if isinstance(inner, KafkaError) and inner.txn_requires_abort() and not inner.retriable():
                raise
            raise UnknownEndError(f"the end of a Kafka transaction is in doubt: {reason(error)}") from error
        self._require_known(producer, begun, _COMMITTED)

    def abort(self, producer: Producer, timeout_s: float) -> None:
        """Abort the transaction; return when it is known to be aborted, or raise `UnknownEndError`."""
        begun = time.monotonic()
        try:
            producer.abort_transaction(timeout_s)
        except KafkaException as error:
            self.serve(producer)
            if error.args[0].code() == KafkaError.INVALID_TXN_STATE and self._sign is None:
                # The broker knows no open transaction: it let no partition in, for example for want of a permission.
                return
            raise UnknownEndError(f"a Kafka transaction could not be aborted: {reason(error)}") from error
        self._require_known(producer, begun, "aborted")

    def serve(self, producer: Producer) -> None:
        """Read all available lines of the library's log; the client may have failed."""
        with contextlib.suppress(KafkaException):
            producer.poll(0)

    def _require_known(self, producer: Producer, begun: float, how: str) -> None:
        """Raise `UnknownEndError` if an answered end may arrive a second time."""
        took_s = time.monotonic() - begun
        try:
            # Serves the whole log. The lines about the end were written before its answer.
            producer.poll(0)
        except KafkaException as error:
            doubt: str | None = f"the client failed: {reason(error)}"
        else:
            doubt = self.doubt(took_s)
        if doubt is not None:
            raise UnknownEndError(f"a Kafka transaction was {how}, but {doubt}", is_committed=how == _COMMITTED)

    def doubt(self, took_s: float) -> str | None:
        """Return why the answered end of the transaction is in doubt, or None if it is known.

        If the library logged nothing about the end, as another version might, the time it took decides.
        """
        if self._sign is None and not self._ends and took_s > _UNREPORTED_END_S:
            return "its end took long, and the client library does not say whether it was repeated"
        return self._sign
