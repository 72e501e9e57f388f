"""The table of decisions: what a decision does, by the state of its transaction when the decision is read. Pure.

The first decision in the op log wins. A decision is durable before its author can know whether it is the first. So the
op log also holds later, repeated and foreign decisions. Every reader must judge them alike, also after a restart. There
are three exceptions to "the first wins":

- A transaction of several messages can end by COMMIT or DISCARD only when all of its halves are there. Until then such
  a decision is held, and so are all decisions after it.
- A ROLLBACK of the producer or an operator takes back the COMMIT of a message that waits for its `deliver_at`. The
  ROLLBACK must be stored before that time by the broker's clock. A delay ends only when all records from before a
  restart are read, so that a restart does not change the outcome.
- A DISCARD of an operator overrules a COMMIT that cannot be published. While a Kafka transaction with the message is
  under way, the message may be visible already. The DISCARD is held until that transaction has ended.

Only `judge` says what a decision does. `state.PartitionState` applies it.
"""

from __future__ import annotations

from enum import Enum, IntEnum

from penstock.errors import TransactionError, TransactionRefusedError
from penstock.transactions.core.pending import Pending
from penstock.transactions.wire.ops import Author, Op, Verdict


class Standing(IntEnum):
    """The state of a pending transaction when a decision is read: the rows of the table."""

    #: Halves are missing and may arrive.
    PARTIAL = 0
    #: Halves contradict each other, or can no longer arrive.
    SPOILED = 1
    #: All halves are there, and there is no decision.
    UNDECIDED = 2
    #: COMMIT stands, and was not due yet when the new decision was stored.
    DELAYED = 3
    #: COMMIT stands.
    COMMITTED = 4
    #: COMMIT stands, and a Kafka transaction with it is under way.
    IN_FLIGHT = 5
    #: ROLLBACK or DISCARD stands.
    OVER = 6


class Kind(IntEnum):
    """The verdict of a decision, with its author if that matters: the columns of the table."""

    #: UNKNOWN.
    ANSWER = 0
    COMMIT = 1
    #: DISCARD of any author except an operator.
    DISCARD = 2
    #: DISCARD of an operator.
    OVERRULE = 3
    #: ROLLBACK of a check or of the coordinator.
    ROLLBACK = 4
    #: ROLLBACK of the producer or of an operator.
    WITHDRAW = 5


class Ruling(Enum):
    """What a decision does."""

    COUNT = "it counts as one more answered check, if it answers the open check"
    DECIDE = "it stands from now on"
    REPLACE = "it replaces the decision that stood"
    HOLD = "it is judged later"
    LATE = "it is refused: another decision was the first"
    NOT_ALL = "it is refused: not all halves are there"


def _table() -> tuple[tuple[Ruling, ...], ...]:
    count, decide, replace, hold = Ruling.COUNT, Ruling.DECIDE, Ruling.REPLACE, Ruling.HOLD
    late, not_all = Ruling.LATE, Ruling.NOT_ALL
    # fmt: off
    rows = {
        #                    ANSWER  COMMIT   DISCARD  OVERRULE  ROLLBACK  WITHDRAW
        Standing.PARTIAL:   (count,  hold,    hold,    hold,     decide,   decide),
        Standing.SPOILED:   (count,  not_all, not_all, not_all,  decide,   decide),
        Standing.UNDECIDED: (count,  decide,  decide,  decide,   decide,   decide),
        Standing.DELAYED:   (count,  late,    late,    replace,  late,     replace),
        Standing.COMMITTED: (count,  late,    late,    replace,  late,     late),
        Standing.IN_FLIGHT: (count,  late,    late,    hold,     late,     late),
        Standing.OVER:      (count,  late,    late,    late,     late,     late),
    }
    # fmt: on
    return tuple(rows[standing] for standing in Standing)


#: By standing and kind.
TABLE = _table()

_KINDS = {
    Verdict.UNKNOWN: Kind.ANSWER,
    Verdict.COMMIT: Kind.COMMIT,
    Verdict.DISCARD: Kind.DISCARD,
    Verdict.ROLLBACK: Kind.ROLLBACK,
}
#: By verdict and author.
_KIND_OF = {(verdict, author): kind for verdict, kind in _KINDS.items() for author in Author} | {
    (Verdict.DISCARD, Author.OPERATOR): Kind.OVERRULE,
    (Verdict.ROLLBACK, Author.OPERATOR): Kind.WITHDRAW,
    (Verdict.ROLLBACK, Author.PRODUCER): Kind.WITHDRAW,
}
#: The row of undecided transactions, by verdict and author.
_UNDECIDED = {key: TABLE[Standing.UNDECIDED][kind] for key, kind in _KIND_OF.items()}
# Looking up a member of an enumeration is slow, and every decision comes through here.
_COMMIT = Verdict.COMMIT


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


def judge(pending: Pending, op: Op, appended_ms: int, *, is_delayed: bool, may_grow: bool) -> Ruling:
    """Return what a decision does to a transaction that it fits.

    Args:
        pending: the transaction.
        op: the decision.
        appended_ms: the decision's append time, in the broker's milliseconds.
        is_delayed: whether the transaction waits for its time.
        may_grow: whether missing halves may still arrive.
    """
    if pending.verdict is None and pending.parts is None:
        # The usual case, with the same result as below.
        return _UNDECIDED[op.verdict, op.author]
    standing = standing_of(pending, appended_ms, is_delayed=is_delayed, may_grow=may_grow)
    return TABLE[standing][_KIND_OF[op.verdict, op.author]]


def standing_of(pending: Pending, appended_ms: int, *, is_delayed: bool, may_grow: bool) -> Standing:
    """Return the state of a transaction. Arguments are those of `judge`."""
    if pending.verdict is None:
        if pending.parts is None or pending.is_complete:
            return Standing.UNDECIDED
        return Standing.PARTIAL if may_grow and not pending.parts.is_spoiled else Standing.SPOILED
    if pending.verdict is not _COMMIT:
        return Standing.OVER
    due_ms = pending.half.deliver_at_ms
    if is_delayed and due_ms is not None and appended_ms < due_ms:
        return Standing.DELAYED
    return Standing.IN_FLIGHT if pending.in_flight else Standing.COMMITTED


def misfit(pending: Pending, op: Op) -> Refusal | None:
    """Return the reason why an op cannot belong to a transaction, or None."""
    if op.group != pending.half.group:
        return Refusal.WRONG_GROUP
    if not op.half_offsets:
        return None
    if pending.parts is None:
        fits = op.half_offsets == (pending.offset,)
    elif op.author is Author.PRODUCER and op.verdict is _COMMIT:
        fits = op.half_offsets == pending.offsets
    else:
        # A check or an operator may know only some of the halves.
        fits = set(op.half_offsets) <= set(pending.offsets)
    return None if fits else Refusal.WRONG_PLACE


def is_next_answer(pending: Pending, op: Op, place: tuple[int, int]) -> bool:
    """Tell whether an UNKNOWN answers the open check.

    A late, repeated or forged answer has another number, and does not count.
    """
    is_next = op.check_number == pending.check_count + 1 and place > pending.answered_at
    return pending.verdict is None and is_next


def may_cancel(verdict: Verdict, author: Author) -> bool:
    """Tell whether a decision can take back the COMMIT of a message that is not due yet."""
    return _KIND_OF.get((verdict, author)) is Kind.WITHDRAW


def not_pending(transaction_id: str, group: str) -> TransactionError:
    """Return the error for cancelling a transaction that is not pending."""
    return TransactionError(
        f"transaction {transaction_id} cannot be cancelled: none of group {group} with that id is pending; it is "
        "settled, or never was"
    )


def not_cancelled(transaction_id: str, stands: Verdict | None) -> TransactionRefusedError:
    """Return the error for cancelling too early or too late, by the decision that stands."""
    why = {
        None: "it is not decided yet; roll it back where its local transaction runs, or let a check decide",
        Verdict.COMMIT: "it is published, or about to be; only a message that waits for its deliver_at is taken back",
    }.get(stands, "it is in the discarded topic, or on its way there; you need not cancel it")
    return TransactionRefusedError(f"transaction {transaction_id} cannot be cancelled: {why}")
