"""Which decision of a pending transaction counts: the first in the op log, with few exceptions. Pure."""

from __future__ import annotations

from enum import Enum

from penstock.transactions.core.cancelling import may_cancel
from penstock.transactions.core.pending import Pending
from penstock.transactions.wire.ops import Author, Op, Verdict

#: Decisions that move all messages of a transaction, and so need all of its halves.
NEED_ALL = frozenset({Verdict.COMMIT, Verdict.DISCARD})


class Refusal(Enum):
    """Why a record was refused."""

    DUPLICATE_ID = "its transaction id belongs to another half"
    SETTLED_OR_UNKNOWN = "no such transaction is pending: it is settled, or never was"
    ALREADY_DECIDED = "the transaction was decided before: the first decision stands"
    WRONG_GROUP = "it comes from another producer group than the half"
    WRONG_PLACE = "it names other offsets than those of the half"
    INCOMPLETE = (
        "not all halves of the transaction are there, or they contradict each other: it can only be rolled back"
    )


def misfit(pending: Pending, op: Op) -> Refusal | None:
    """Say why an op cannot be of a transaction, or return None."""
    if op.group != pending.half.group:
        return Refusal.WRONG_GROUP
    is_usual = pending.parts is None and op.half_offsets == (pending.offset,)
    return Refusal.WRONG_PLACE if op.half_offsets and not is_usual and not pending.is_named_by(op) else None


def is_next_answer(pending: Pending, op: Op, place: tuple[int, int]) -> bool:
    """Tell whether an UNKNOWN is the answer to the check that is awaited.

    A late, repeated or forged answer carries a number that is not the next: it counts for nothing.
    """
    is_next = op.check_number == pending.check_count + 1 and place > pending.answered_at
    return pending.verdict is None and is_next


def overrules(op: Op, pending: Pending) -> bool:
    """Tell whether a decision takes effect though there is one: an operator discards what cannot be published."""
    is_discard = op.verdict is Verdict.DISCARD and op.author is Author.OPERATOR
    return is_discard and pending.verdict is Verdict.COMMIT


def is_cancellation(pending: Pending, op: Op, appended_ms: int) -> bool:
    """Tell whether a decision takes the COMMIT of a delayed message back, so that it counts though it is not the first.

    By the broker's clock it was stored before the message was due, and nobody has begun to publish it. Delays end only
    once all is read that was stored before a restart, so the restart changes nothing of it.
    """
    due_ms = pending.half.deliver_at_ms
    is_early = due_ms is not None and appended_ms < due_ms
    return may_cancel(op.verdict, op.author) and pending.verdict is Verdict.COMMIT and is_early
