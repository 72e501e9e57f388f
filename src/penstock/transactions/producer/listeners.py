"""Local transactions as objects, for those who come from RocketMQ.

A thin layer on `TransactionalProducer.send`. One rule differs from a plain `execute` function, and is RocketMQ's: what
raises, or returns None, is UNKNOWN and left to a check; an `execute` function that returns None commits, and one that
raises rolls back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from penstock.transactions.model import HalfMessage, TransactionState
from penstock.transactions.producer.transaction import Transaction

_log = logging.getLogger("penstock.transactions")


class TransactionListener(Protocol):
    """A local transaction and its check in one object, as in RocketMQ since 4.3. Called by many threads at once."""

    def execute_local_transaction(self, message: HalfMessage, argument: object) -> TransactionState | None:
        """Run the local transaction of a message whose half is stored, in the thread that sends.

        Args:
            message: the message, with its transaction id; write it with your own data.
            argument: what was given to `send_in_transaction`.

        Returns:
            What became of it. None, or an exception, is UNKNOWN, unlike with `send(execute=)`.
        """

    def check_local_transaction(self, half: HalfMessage) -> TransactionState:
        """Say what became of an undecided local transaction; what raises is UNKNOWN."""


#: A local transaction as a function, given with a call.
Run = Callable[[HalfMessage, object], TransactionState | None]


def executing(run: Run, argument: object) -> Callable[[Transaction], TransactionState]:
    """Return an `execute` function that keeps RocketMQ's rule: whatever is no answer is UNKNOWN."""

    def execute(tx: Transaction) -> TransactionState:
        try:
            state: object = run(tx.message, argument)
        except Exception:  # noqa: BLE001 - the user's object may raise anything
            _log.exception("the local transaction of %s raised; it is left to a check", tx.transaction_id)
            return TransactionState.UNKNOWN
        if isinstance(state, TransactionState):
            return state
        if state is not None:
            _log.error(
                "the local transaction of %s returned a %s instead of a TransactionState; it is left to a check",
                tx.transaction_id,
                type(state).__name__,
            )
        return TransactionState.UNKNOWN

    return execute
