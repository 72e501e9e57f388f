"""A committed message that is taken back before it is due: who may do so, and what is said where it cannot be.

The first decision stands, with this exception: a ROLLBACK of the producer group, or of an operator, counts against a
COMMIT as long as the message waits for its `deliver_at`. What has become due is published, or about to be. Pure.
"""

from __future__ import annotations

from penstock.errors import TransactionError, TransactionRefusedError
from penstock.transactions.wire.ops import Author, Verdict

_MAY_CANCEL = frozenset({Author.PRODUCER, Author.OPERATOR})


def may_cancel(verdict: Verdict, author: Author) -> bool:
    """Tell whether a decision counts against the COMMIT of a message that is not due yet."""
    return verdict is Verdict.ROLLBACK and author in _MAY_CANCEL


def not_pending(transaction_id: str, group: str) -> TransactionError:
    """Return what is raised where nothing is known of a transaction."""
    return TransactionError(
        f"transaction {transaction_id} cannot be cancelled: none of group {group} with that id is pending; it is "
        "settled, or never was"
    )


def not_cancelled(transaction_id: str, stands: Verdict | None) -> TransactionRefusedError:
    """Return what is raised where it is too late, or too early, by the decision that stands."""
    why = {
        None: "it is not decided yet; roll it back where its local transaction runs, or let a check decide",
        Verdict.COMMIT: "it is published, or about to be: only what waits for its deliver_at is taken back",
    }.get(stands, "it is in the discarded topic, or on its way there; nobody has to cancel it")
    return TransactionRefusedError(f"transaction {transaction_id} cannot be cancelled: {why}")
