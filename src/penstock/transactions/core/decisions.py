"""Which decision of a transaction counts: one table, by how the transaction stands when a decision is read. Pure.

The first decision in the op log wins. A decision is durable before anybody knows whether it is the first, so the op log
holds later ones, repeated ones, and those of strangers; all who read it must judge them alike, after a restart too.
There are three exceptions to "the first wins":

- A transaction of several messages can end by COMMIT or DISCARD only when all of its halves are there. Until they are,
  such a decision is held, and all that come after it.
- A ROLLBACK of the producer or of an operator takes back the COMMIT of a message that waits for its `deliver_at`, if it
  was stored before that time by the broker's clock. Delays end only once all is read that was stored before a restart:
  so the restart changes nothing of it.
- A DISCARD of an operator overrules a COMMIT that cannot be published. While a Kafka transaction with it is under way,
  it may be visible already: the DISCARD is held until that has ended.

`judge` is the only place that says what a decision does; `state.PartitionState` does it.
"""

from __future__ import annotations

from enum import Enum, IntEnum

from penstock.errors import TransactionError, TransactionRefusedError
from penstock.transactions.core.pending import Pending
from penstock.transactions.wire.ops import Author, Op, Verdict


class Standing(IntEnum):
    """How a pending transaction stands when a decision is read: the rows of the table."""

    #: Halves are missing, and may come.
    PARTIAL = 0
    #: Halves contradict each other, or cannot come any more.
    SPOILED = 1
    #: All halves are there, nobody has decided.
    UNDECIDED = 2
    #: COMMIT stands, and its time had not come when the decision that is judged was stored.
    DELAYED = 3
    #: COMMIT stands.
    COMMITTED = 4
    #: COMMIT stands, and a Kafka transaction with it is under way.
    IN_FLIGHT = 5
    #: ROLLBACK or DISCARD stands.
    OVER = 6


class Kind(IntEnum):
    """What a decision says, and who says it, as far as it matters: the columns of the table."""

    #: UNKNOWN.
    ANSWER = 0
    COMMIT = 1
    #: DISCARD of anybody but an operator.
    DISCARD = 2
    #: DISCARD of an operator.
    OVERRULE = 3
    #: ROLLBACK of a check or of the coordinator.
    ROLLBACK = 4
    #: ROLLBACK of the producer or of an operator.
    WITHDRAW = 5


class Ruling(Enum):
    """What a decision does."""

    COUNT = "one more answered check, if it answers the check that is awaited"
    DECIDE = "it stands from now on"
    REPLACE = "it stands instead of the former one"
    HOLD = "it is judged later"
    LATE = "it is refused: another one was the first"
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
_UNDECIDED = TABLE[Standing.UNDECIDED]

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
# A member of an enumeration is slow to look up, and this is the way of every decision.
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
    """Say what a decision does that fits a transaction; it was appended at `appended_ms`, in the broker's milliseconds.

    `is_delayed` tells whether the transaction waits for its time; `may_grow`, whether halves that are missing may come.
    """
    if pending.verdict is None and pending.parts is None:
        # Nearly all; the rest says the same.
        return _UNDECIDED[_KIND_OF[op.verdict, op.author]]
    standing = standing_of(pending, appended_ms, is_delayed=is_delayed, may_grow=may_grow)
    return TABLE[standing][_KIND_OF[op.verdict, op.author]]


def standing_of(pending: Pending, appended_ms: int, *, is_delayed: bool, may_grow: bool) -> Standing:
    """Say how a transaction stands; arguments are those of `judge`."""
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


def may_cancel(verdict: Verdict, author: Author) -> bool:
    """Tell whether a decision counts against the COMMIT of a message that is not due yet."""
    return _KIND_OF.get((verdict, author)) is Kind.WITHDRAW


def not_pending(transaction_id: str, group: str) -> TransactionError:
    """Return what is raised where nothing is known of a transaction that is to be cancelled."""
    return TransactionError(
        f"transaction {transaction_id} cannot be cancelled: none of group {group} with that id is pending; it is "
        "settled, or never was"
    )


def not_cancelled(transaction_id: str, stands: Verdict | None) -> TransactionRefusedError:
    """Return what is raised where it is too late, or too early, to cancel, by the decision that stands."""
    why = {
        None: "it is not decided yet; roll it back where its local transaction runs, or let a check decide",
        Verdict.COMMIT: "it is published, or about to be: only what waits for its deliver_at is taken back",
    }.get(stands, "it is in the discarded topic, or on its way there; nobody has to cancel it")
    return TransactionRefusedError(f"transaction {transaction_id} cannot be cancelled: {why}")
